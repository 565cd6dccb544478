"""What of other cells comes along with an exercise's own one, and magics that are no Python."""

from __future__ import annotations

import ast
import contextlib
import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dtlib.grading.sandbox.harness.cells import explain, load
from dtlib.grading.sandbox.harness.magics import parse

from .answers import ROOT
from .engine import OWN, demo, own

EVIL = 'print("ran", file=open("/nonexistent/never", "w"))'


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
            "import sys\nfrom dtlib.grading.sandbox.harness.cells import load\n"
            "f = load([('setup', 'import numpy as np\\nimport torch'), ('a-1', 'def f(): return np')], 'a-1', 'f')\n"
            "f()\nprint('torch' in sys.modules, any('checks' in name for name in sys.modules))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["False", "False"]


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
