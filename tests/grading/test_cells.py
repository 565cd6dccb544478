"""One exercise out of a notebook: its own cell in full, of the others what it needs, and never another's harm."""

from __future__ import annotations

import ast
import contextlib
import json
import linecache
import subprocess
import sys
import traceback

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dtlib.grading import all_exercises
from dtlib.grading.harness.cells import Unusable, explain, is_blank, load
from dtlib.grading.harness.magics import parse

from .answers import ROOT

OWN = "demo-2"
EVIL = 'print("ran", file=open("/nonexistent/never", "w"))'


def notebook(stem: str, folder: str) -> list[tuple[str, str]]:
    told = json.loads((ROOT / folder / f"{stem}.ipynb").read_text(encoding="utf-8"))
    return [(each["id"], "".join(each["source"])) for each in told["cells"] if each["cell_type"] == "code"]


def load_exercise(exercise, cells):
    return load(cells, exercise.id.replace(".", "-"), exercise.function)


def demo(*cells: tuple[str, str] | str):
    """`f` of cell ``demo-2``; a cell without an id is an added one."""
    return load([("", each) if isinstance(each, str) else each for each in cells], OWN, "f")


def unusable(*cells: tuple[str, str] | str) -> Unusable:
    with pytest.raises(Unusable) as caught:
        demo(*cells)
    return caught.value


def own(source: str) -> tuple[str, str]:
    return (OWN, source)


EXERCISES = list(all_exercises().values())
CASES = [
    pytest.param(each, cell, id=f"{each.id} without {cell}")
    for each in EXERCISES
    for cell, _ in notebook(each.id.partition(".")[0], "solutions")
    if cell != each.id.replace(".", "-")
]


class TestTheCourse:
    @pytest.mark.parametrize("exercise", EXERCISES, ids=lambda each: each.id)
    def test_every_answer_of_the_solutions_loads(self, exercise):
        function = load_exercise(exercise, notebook(exercise.id.partition(".")[0], "solutions"))
        assert function.__name__ == exercise.function
        assert function.__code__.co_filename == f"<cell {exercise.id.replace('.', '-')}>"
        assert function.__globals__["__name__"] == function.__module__ == "__main__"

    @pytest.mark.parametrize("exercise", EXERCISES, ids=lambda each: each.id)
    def test_every_blank_of_the_exercises_loads_and_is_blank_when_called(self, exercise):
        function = load_exercise(exercise, notebook(exercise.id.partition(".")[0], "exercises"))
        with pytest.raises(NotImplementedError):
            function(*[None] * function.__code__.co_argcount)

    @pytest.mark.parametrize(
        "instead",
        [None, "def broken(:", "raise RuntimeError", "import sys; sys.exit()", "torch = np = dist = tensor = None"],
        ids=["deleted", "syntax error", "raises", "exits", "rebinds"],
    )
    @pytest.mark.parametrize(("exercise", "cell"), CASES)
    def test_any_other_cell_may_be_lost(self, exercise, cell, instead):
        cells = notebook(exercise.id.partition(".")[0], "solutions")
        kept = [(id, source if id != cell else instead) for id, source in cells if id != cell or instead is not None]
        function = load_exercise(exercise, kept)
        assert function.__name__ == exercise.function
        space = function.__globals__
        assert space.get("np", sys.modules["numpy"]) is sys.modules["numpy"]
        assert space.get("torch", sys.modules["torch"]) is sys.modules["torch"]

    def test_one_exercise_may_use_another(self):
        cells = notebook("collectives", "solutions")
        assert "ring_reduce_scatter" in load(cells, "collectives-6", "ring_all_reduce").__globals__
        without = [each for each in cells if each[0] != "collectives-5"]
        assert "ring_reduce_scatter" not in load(without, "collectives-6", "ring_all_reduce").__globals__
        broken = [(id, "def ring_reduce_scatter(tensor):\n  return 1 +" if id.endswith("5") else s) for id, s in cells]
        function = load(broken, "collectives-6", "ring_all_reduce")
        with pytest.raises(NameError) as caught:
            eval("ring_reduce_scatter", function.__globals__)
        assert explain(caught.value) == (
            "`ring_reduce_scatter` is missing, because cell `collectives-5` is no valid Python"
        )

    def test_old_notebooks_have_no_ids(self):
        for exercise in EXERCISES:
            cells = [("", source) for _, source in notebook(exercise.id.partition(".")[0], "solutions")]
            assert load_exercise(exercise, cells).__name__ == exercise.function


class TestOwnCell:
    def test_is_found_by_id_although_another_cell_defines_the_function_too(self):
        assert demo("def f():\n return 1", own("def f():\n return 2"), "def f():\n return 3")() == 2

    def test_is_the_last_one_with_the_id_that_answers(self):
        stub = "def f():\n    raise NotImplementedError('your turn')"
        assert demo(own("def f():\n return 1"), own("def f():\n return 2"), own(stub), own("x = 1"))() == 2

    @pytest.mark.parametrize(
        "left", ["", "x = 1", "def f(:", "def f(): pass", "def f():\n  '''Words.'''\n  raise NotImplementedError('x')"]
    )
    def test_an_added_cell_answers_where_the_own_one_does_not(self, left):
        assert demo(own(left), "def f():\n return 1", "def f():\n return 2", "y = 1")() == 2

    def test_an_import_in_another_cell_is_no_answer(self):
        assert unusable("from math import sqrt as f", own("def f(): pass")).kind == "blank"
        assert demo("from math import sqrt as f", own(""))(4) == 2, "but better than nothing"

    def test_last_definition_in_the_cell_wins(self):
        assert demo(own("def f():\n return 1\ndef f():\n return 2"))() == 2
        assert demo(own("def f(): pass\nf = lambda: 3"))() == 3

    def test_a_check_cell_defines_nothing(self):
        error = unusable((OWN + "-check", "def f():\n return 1"))
        assert (error.kind, error.line) == ("missing", "")
        assert error.text == "only cell `demo-2-check` defines `f`, and checks do not run here"
        error = unusable(("demo-1-check", "a = 1"), own("f = a"))
        assert error.text.endswith(
            "(`a` is missing, because cell `demo-1-check` is a check, and checks do not run here)"
        )

    def test_another_exercise_does_not_answer_a_blank_one(self):
        other = ("demo-1", "f = None")
        assert unusable(other, own("def f(): pass"), other).kind == "blank"
        assert unusable(other, own(""), other).text == "`f` is a NoneType, and should be a function"
        assert demo(("demo-1", "def f(): return 1"), own("# see above"))() == 1

    def test_runs_in_full(self):
        source = "table = {}\ntable['a'] = 1\nfor k in range(3):\n    table[k] = k\ndef f():\n    return table"
        assert demo(own(source))() == {"a": 1, 0: 0, 1: 1, 2: 2}

    @pytest.mark.parametrize("call", ["grading.check('demo.2')", "lab.run(f)", "x = lab.run(f)\nprint(x)", "f(1, 2)"])
    def test_lines_that_try_the_function_out_do_no_harm(self, call):
        assert demo("from dtlib import lab, grading", own(f"def f():\n    return 1\n{call}"))() == 1

    def test_lines_that_try_the_function_out_do_not_run(self):
        tries = "f()\nprint(f())\nx = [f() for _ in range(3)]\nfor _ in range(3):\n    f()\nassert f() == 2"
        assert demo(own(f"seen = []\ndef f():\n    seen.append(1)\n    return len(seen)\n{tries}"))() == 1
        needed = (
            "def f():\n    return 1\nonce = f()\ndef f(once=once):\n    return g() + once\ndef g():\n    return f and 1"
        )
        assert demo(own(needed))() == 2

    def test_what_raises_before_the_definition_is_told_with_its_line(self):
        error = unusable(own("def half(x):\n    return x / 0\n\ny = half(1)\ndef f(): return y"))
        assert error.kind == "raised"
        assert error.text == "the cell raised ZeroDivisionError: division by zero"
        assert error.line == "line 2 of cell `demo-2`: `return x / 0`"
        assert str(error) == f"{error.text}, in {error.line}"

    @pytest.mark.parametrize("leave", ["import sys\nsys.exit(0)", "raise SystemExit", "exit()", "quit(3)"])
    @pytest.mark.parametrize("answer", ["{}\ndef f(): return 1", "def f(): return 1\n{}"])
    def test_exit_does_not_pass(self, leave, answer):
        error = unusable(own(answer.format(leave)))
        assert error.kind == "raised"
        assert "called sys.exit" in error.text
        assert "of cell `demo-2`" in error.line

    @pytest.mark.parametrize("name", ["KeyboardInterrupt", "GeneratorExit", "BaseException"])
    def test_no_exception_passes(self, name):
        assert unusable(own(f"def f(): return 1\nraise {name}")).text == f"the cell raised {name}"

    def test_an_exception_that_fights_back(self):
        source = (
            "class Meta(type):\n    __name__ = property(lambda s: 1 / 0)\n"
            "class Evil(Exception, metaclass=Meta):\n    def __str__(self): raise SystemExit\nraise Evil"
        )
        assert (
            unusable(own(source + "\ndef f(): return 1")).text
            == "the cell raised an exception whose text cannot be read"
        )

    def test_missing_name_is_explained(self):
        error = unusable("table = 1 / 0", own("f = table.get"))
        assert error.kind == "raised"
        assert "`table` is missing, because line 1 of cell `number 1` raised ZeroDivisionError" in error.text


class TestUnusable:
    @pytest.mark.parametrize(
        "cells", [(), ("x = 1",), (own("x = 1"),), (own(""),), (own("if False:\n    def f(): 1"),)]
    )
    def test_missing(self, cells):
        error = unusable(*cells)
        assert error.kind == "missing"
        assert error.text == "cell `demo-2` does not define `f`" or error.text.startswith("no cell defines `f`")

    @pytest.mark.parametrize(("value", "type"), [("7", "int"), ("'a'", "str"), ("None", "NoneType")])
    def test_not_callable(self, value, type):
        error = unusable(own(f"f = {value}"))
        assert (error.kind, error.text) == ("missing", f"`f` is a {type}, and should be a function")

    @pytest.mark.parametrize("body", ["pass", "...", "'Words.'", "return None", "return", "'Words.'\n    pass"])
    def test_blank(self, body):
        error = unusable(own(f"def f(x):\n    {body}"))
        assert (error.kind, error.text) == ("blank", "`f` has no body yet")

    @pytest.mark.parametrize(
        ("source", "number", "line"),
        [
            ("x = 1\ndef f(:\n    pass", 2, "def f(:"),
            ("def f():\n\treturn 1\n        return 2", 3, "return 2"),
            ("def f():\n    return 1\nreturn 2", 3, "return 2"),
            ("%matplotlib inline\ndef f():\n    return (1", 3, "return (1"),
            ("<<<<<<< HEAD\ndef f(): return 1", 1, "<<<<<<< HEAD"),
            ("def f():\n    x = 1\n    nonlocal x", 3, "nonlocal x"),
            ("def f(): pass\nfrom __future__ import braces", 2, "from __future__ import braces"),
        ],
    )
    def test_syntax(self, source, number, line):
        error = unusable(own(source))
        assert error.kind == "syntax"
        assert error.text.startswith("the cell is no valid Python (")
        assert error.line == f"line {number} of cell `demo-2`: `{line}`"

    def test_syntax_error_in_a_cell_without_an_id(self):
        error = unusable("x = 1", "def f(:\n    return 1")
        assert (error.kind, error.line) == ("syntax", "line 1 of cell `number 2`: `def f(:`")

    @pytest.mark.parametrize(
        "source",
        [
            "(" * 100_000,
            "[" * 5000 + "]" * 5000,
            "-" * 100_000 + "1",
            "not " * 50_000 + "x",
            "x" + "[0]" * 20_000,
            "1" + "+1" * 50_000,
            "lambda:" * 20_000 + "x",
            "".join(" " * each + "if x:\n" for each in range(200)),
            "f = '\0'",
            "f = '\ud800'",
            "f = 1" + "0" * 10_000,
        ],
        ids=lambda source: source[:8],
    )
    def test_what_no_parser_can_read(self, source):
        error = unusable(own(f"def f(): return 1\nx = {source}" if "f =" not in source else source))
        assert error.kind in ("syntax", "missing")
        assert demo(f"x = {source}", own("def f(): return 1"))() == 1
        assert demo(f"x = {source}", own("def f(): return 1 if f else x"))() == 1, "needed, and skipped"


class TestSlice:
    @pytest.mark.parametrize(
        ("source", "used"),
        [
            ("import math", "math.floor(2.5)"),
            ("import os.path as p", "len(p.sep) + 1"),
            ("from math import floor", "floor(2.5)"),
            ("from math import *", "floor(2.5)"),
            ("a = 1\nb = a + 1", "b"),
            ("a, *b = 0, 2", "b[0]"),
            ("a: int = 2", "a"),
            ("a = 1\na += 1", "a"),
            ("a = {}\na['x'] = 2", "a['x']"),
            ("a = {'y': {}}\na['y']['x'] = 2", "a['y']['x']"),
            ("a = []\na.append(2)", "a[0]"),
            ("a = []\nfor each in range(3):\n    a.append(each)", "a[2]"),
            ("a = [1, 2]\nwhile len(a) > 1:\n    del a[0]", "a[0]"),
            ("def g(): return h()\ndef h(): return 2", "g()"),
            ("class A:\n    B = 2\n    def g(self): return self.B", "A().g()"),
            ("X = 2\nclass A:\n    def g(self): return X", "A().g()"),
            ("from functools import partial\ng = partial(pow, 2)", "g(1)"),
            ("K = 2\n@staticmethod\ndef g(x=K): return x", "g()"),
            ("if True:\n    a = 2\nelse:\n    a = 3", "a"),
            ("try:\n    import never_heard_of as a\nexcept ImportError:\n    a = 2", "a"),
            ("import contextlib\nwith contextlib.nullcontext(2) as a:\n    pass", "a"),
            ("if (a := 2) > 1: pass", "a"),
            ("from __future__ import annotations\ndef g(x: Never = 2) -> Heard: return x", "g()"),
            ("a = [x for x in range(3)]", "a[2]"),
            ("%load_ext autoreload\n!pip install x\na = 2", "a"),
        ],
    )
    def test_brings_what_is_needed(self, source, used):
        for cells in ((source, own(f"def f():\n    return {used}")), (own(f"def f():\n    return {used}"), source)):
            assert demo(*cells)() == 2
        each_alone = source.split("\n") if "    " not in source else [source]
        assert demo(*each_alone, own(f"def f():\n    return {used}"))() == 2

    @pytest.mark.parametrize(
        "source",
        [
            EVIL,
            "raise SystemExit",
            "import os; os.abort()",
            "np.floor = None",
            "np.floor, other = None, 1",
            "for each in [1]:\n    np.floor = None",
            "torch = dist = np = None",
            "def np(): pass",
            "class np: pass",
            "for np in range(3): pass",
            "del np",
            "np += 1",
            "lab.run(lambda: 1)",
            "a = b = c = 1 / 0",
        ],
    )
    @pytest.mark.parametrize("id", ["", "demo-1", "demo-3", "demo-1-check", "setup"])
    def test_leaves_what_is_not(self, source, id):
        assert demo((id, source), own("def f():\n    return np.floor(2.5)"), (id, source))() == 2

    def test_another_exercise_redefines_nothing_that_is_known_without_it(self):
        evil = "def len(x): return 0\nimport math as np\nhelper = None\ndef dist(): pass"
        answer = "def f():\n    return len(helper()), np.__name__, dist.__name__"
        told = demo("def helper(): return 'abc'", ("demo-1", evil), own(answer), ("demo-3", evil))()
        assert told == (3, "numpy", "torch.distributed")

    def test_another_exercise_is_asked_last_and_the_nearest_above_first(self):
        own_cell = own("def f():\n    return helper()")
        one, three, four = [(f"demo-{n}", f"def helper(): return {n}") for n in (1, 3, 4)]
        assert demo(one, own_cell, three)() == 1
        assert demo(one, three, own_cell, four)() == 3
        assert demo(own_cell, three, four)() == 3
        assert demo(one, own_cell, "def helper(): return 'shared'")() == "shared"

    def test_of_another_exercise_only_definitions_run(self):
        other = ("demo-1", "helper = 1\nfor helper in range(3): pass\nif True:\n    helper = 4")
        assert demo(other, own("def f():\n    return helper"))() == 1

    def test_above_comes_before_below(self):
        assert demo("a = [1]", own("def f():\n    return a"), "a.clear()")() == [1]
        assert demo(own("def f():\n    return a"), "a = [1]", "a.clear()")() == []
        assert demo("a = 1", own("def f():\n    return a"), "a = 2")() == 1
        assert demo(own("def f():\n    return a"), "a = 2")() == 2

    def test_what_lies_below_may_need_the_own_cell(self):
        assert demo(own("BASE = 2\ndef f():\n    return twice"), "twice = BASE * 2")() == 4

    def test_a_needed_line_does_not_take_the_prelude_away(self):
        assert demo("np = a = 2", own("def f():\n    return np.floor(a)"))() == 2

    def test_own_names_are_not_looked_for(self):
        assert demo("a = 1 / 0", own("a = 2\ndef f():\n    b = 3\n    return a"), f"a = b = {EVIL}")() == 2

    def test_a_statement_that_raises_costs_only_its_names(self):
        function = demo("a = 1\nb = 1 / 0\nc = 3", own("def f(x):\n    return a + c if x else b"))
        assert function(True) == 4
        with pytest.raises(NameError) as caught:
            function(False)
        assert explain(caught.value) == (
            "`b` is missing, because line 2 of cell `number 1` raised ZeroDivisionError: division by zero"
        )
        assert explain(NameError("of another kind")) == explain(KeyError("b")) == ""

    @pytest.mark.parametrize("leave", ["sys.exit(1)", "quit()", "exec('raise KeyboardInterrupt')"])
    def test_a_statement_that_exits_costs_only_its_names(self, leave):
        function = demo(f"import sys\na = {leave}", own("def f(x):\n    return 1 if x else a"))
        assert function(True) == 1
        with pytest.raises(NameError) as caught:
            function(False)
        assert "line 2 of cell `number 1` raised" in explain(caught.value)

    def test_ranks_are_not_launched_for_a_name(self):
        function = demo("from dtlib import lab\na = lab.run(lambda: 1)", own("def f():\n    return a"))
        with pytest.raises(NameError) as caught:
            function()
        assert "line 2 of cell `number 1` starts processes of its own" in explain(caught.value)

    def test_prelude_is_there_without_a_set_up_cell(self):
        function = demo(own("def f():\n    return [each.__name__ for each in (np, torch, dist, lab, grading)]"))
        assert function() == ["numpy", "torch", "torch.distributed", "dtlib.lab", "dtlib.grading"]
        assert demo(own("display(1)\ndef f():\n    return 2"))() == 2

    def test_namespaces_are_fresh(self):
        cells = ["a = []", own("def f():\n    a.append(1)\n    return len(a)")]
        assert demo(*cells)() == demo(*cells)() == 1

    def test_a_huge_cell_is_passed_over(self):
        huge = "a = 1\n" * 200_000
        assert demo(huge, "b = 2", own("def f():\n    return b"), huge)() == 2
        function = demo(huge, own("def f():\n    return a"))
        with pytest.raises(NameError):
            function()

    def test_nothing_needs_torch_that_does_not_use_it(self):
        code = (
            "import sys\nfrom dtlib.grading.harness.cells import load\n"
            "f = load([('setup', 'import numpy as np\\nimport torch'), ('a-1', 'def f(): return np')], 'a-1', 'f')\n"
            "f()\nprint('torch' in sys.modules, any('checks' in name for name in sys.modules))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["False", "False"]


class TestTracebacks:
    def test_show_the_lines_of_the_cell(self):
        cells = ["def helper(x):\n    # one\n    return 1 / x", own("%%time\n!ls\n\ndef f():\n    return helper(0)")]
        with pytest.raises(ZeroDivisionError) as caught:
            demo(*cells)()
        frames = traceback.extract_tb(caught.value.__traceback__)[1:]
        assert [(each.filename, each.lineno, each.line) for each in frames] == [
            ("<cell demo-2>", 5, "return helper(0)"),
            ("<cell number 1>", 3, "return 1 / x"),
        ]
        linecache.checkcache()
        assert linecache.getline("<cell demo-2>", 2) == "!ls\n"

    def test_line_ends_of_windows_and_odd_characters_shift_nothing(self):
        source = "# a\x0cb\u2028c\x1cd\r\nx = 1\rdef f():\r\n    return y\r\n"
        with pytest.raises(NameError) as caught:
            demo(own(source))()
        (frame,) = traceback.extract_tb(caught.value.__traceback__)[1:]
        assert (frame.lineno, frame.line) == (4, "return y")

    def test_cells_with_the_same_id_keep_their_own_lines(self):
        demo(own("def f():\n    return 1"), own("\n\ndef f():\n    return 2"))
        assert linecache.getline("<cell demo-2>", 2) == "    return 1\n"
        assert linecache.getline("<cell demo-2 (number 2)>", 4) == "    return 2\n"


class TestMagics:
    @pytest.mark.parametrize(
        ("source", "plain"),
        [
            ("%matplotlib inline\nx = 1", "pass\nx = 1"),
            ("!pip install torch 'it\nx = 1", "pass\nx = 1"),
            ("if x:\n    !ls (\n    %time y\nz", "if x:\n    pass\n    pass\nz"),
            ("torch.equal?\nx", "pass\nx"),
            ("torch.equal??\n?torch\nx", "pass\npass\nx"),
            ("files = !ls *.py\nt = %timeit -o f()\nx", "files = None\nt = None\nx"),
            ("!pip install \\\n  torch \\\n  numpy\nx", "pass\n\n\nx"),
            ("%%time\nx", "\nx"),
            ("\n%%capture out\n%%timeit -n 3\nx", "\n\n\nx"),
            ("%%bash\nrm -rf everything", "\n"),
            ("%%writefile x.py\ndef f(): 1", "\n"),
            ("x = (7\n% 4)", "x = (7\n% 4)"),
            ('x = """\n% LaTeX\n!no\nwhat?\n"""', 'x = """\n% LaTeX\n!no\nwhat?\n"""'),
            ('%load x\ny = """\n% LaTeX\n"""', 'pass\ny = """\n% LaTeX\n"""'),
            ("x = 1  # why?\n# %s", "x = 1\n"),
        ],
    )
    def test_are_taken_out_in_place(self, source, plain):
        assert ast.dump(parse(source), include_attributes=False) == ast.dump(ast.parse(plain))
        assert [each.lineno for each in parse(source).body] == [each.lineno for each in ast.parse(plain).body]

    def test_real_mistakes_stay_mistakes(self):
        with pytest.raises(SyntaxError) as caught:
            parse("%time x\ny = 1\nz = (1 +")
        assert caught.value.lineno == 3

    def test_many_magics_are_taken_out_at_once(self):
        assert len(parse("!ls\n" * 20_000).body) == 20_000

    @pytest.mark.parametrize("path", sorted((ROOT / "dtlib" / "grading").glob("*.py")), ids=lambda path: path.name)
    def test_python_stays_as_it_is(self, path):
        source = path.read_text(encoding="utf-8")
        assert ast.dump(parse(source)) == ast.dump(ast.parse(source))

    @given(st.text())
    @example("%")
    @example("%%")
    @example("\\")
    @example("!\\")
    @example("x=!\\\n")
    @example("?" * 100)
    def test_any_text_is_read_or_refused(self, text):
        with contextlib.suppress(SyntaxError):
            parse(text)


WORDS = [
    "def f():\n return 9\n",
    "f",
    "=",
    "g",
    "import os\n",
    "(",
    ")",
    "\n",
    " ",
    ":",
    "%",
    "!",
    "if",
    "'",
    '"""',
    "\\",
]


class TestAnyNotebook:
    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.tuples(st.sampled_from(["", "demo-1", "setup", "demo-1-check"]), st.text()), max_size=4))
    def test_any_other_cells_leave_the_own_one_alone(self, others):
        assert load([*others, own("def f():\n    return 1"), *others], OWN, "f")() == 1

    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.lists(st.sampled_from(WORDS), max_size=8).map("".join), max_size=4))
    def test_cells_of_code_like_text_do_too(self, others):
        cells = [("", each) for each in others]
        assert load([*cells, own("def f():\n    return 1"), *cells], OWN, "f")() == 1


NAMES = st.sampled_from("abc")
LINES = st.one_of(
    st.builds("{} = {}".format, NAMES, st.integers(0, 9)),
    st.builds("{} = {} + {}".format, NAMES, NAMES, NAMES),
    st.builds("{0} += {1}".format, NAMES, NAMES),
    st.builds("{}, {} = {}, 1".format, NAMES, NAMES, NAMES),
    st.builds("for {} in range(3): {} = {} * 2".format, NAMES, NAMES, NAMES),
    st.builds("if {}: {} = 5".format, NAMES, NAMES),
    st.builds("def g(): return {}".format, NAMES),
    st.builds("{} = g()".format, NAMES),
    st.builds("T = {{{!r}: {}}}".format, NAMES, NAMES),
    st.builds("T[{!r}] = {}".format, NAMES, NAMES),
    st.builds("T.update({}={})".format, NAMES, NAMES),
    st.builds("print({})".format, NAMES),
    st.builds("import math as {}".format, st.just("m")),
    st.builds("{} = m.floor({} / 2)".format, NAMES, NAMES),
)


class TestLikeTheNotebook:
    """What the sliced notebook computes is what the notebook computes that runs from the top to the own cell."""

    @settings(max_examples=200, deadline=None)
    @given(
        st.lists(st.lists(LINES, max_size=4), max_size=4),
        st.lists(LINES, max_size=2),
        st.lists(st.sampled_from(["a", "b", "c", "g()", "T", "m.pi"]), min_size=1),
    )
    def test_same_values(self, cells, above, used):
        sources = [
            "a = b = c = 0",
            "def g(): return 0",
            "T = {}",
            "import math as m",
            *("\n".join(each) for each in cells),
        ]
        answer = "\n".join([*above, f"def f(): return {', '.join(used)},"])
        space: dict = {}
        with contextlib.redirect_stdout(None):
            for each in (*sources, answer):
                exec(each, space)
            assert demo(*sources, own(answer))() == space["f"]()


class TestIsBlank:
    def test_of_functions_and_other_things(self):
        def blank(x):
            """Words."""

        assert is_blank(blank)
        assert not is_blank(lambda: 1)
        assert not is_blank(print)
        assert not is_blank(7)
