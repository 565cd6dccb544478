"""One exercise out of a notebook: its own cell in full, of the others what it needs, and never another's harm."""

from __future__ import annotations

import linecache
import sys
import traceback

import pytest

from dtlib.grading import all_exercises
from dtlib.grading.sandbox.harness.cells import Unusable, explain, is_blank, load

from .answers import FEW
from .answers import cells as code_of
from .engine import OWN, demo, own


def load_exercise(exercise, cells):
    return load(cells, exercise.id.replace(".", "-"), exercise.function)


def unusable(*cells: tuple[str, str] | str) -> Unusable:
    with pytest.raises(Unusable) as caught:
        demo(*cells)
    return caught.value


FILLED_NOWHERE = """
class F:
    def forward(x):
        'Words.'
        raise NotImplementedError('forward')

    def backward(x):
        raise NotImplementedError('backward')

def f():
    return F.forward(1)
"""
EXERCISES = list(all_exercises().values())


class TestTheCourse:
    @pytest.mark.parametrize("exercise", EXERCISES, ids=lambda each: each.id)
    def test_every_answer_of_the_solutions_loads(self, exercise):
        function = load_exercise(exercise, list(code_of(exercise.id.partition(".")[0], "solutions").items()))
        assert function.__name__ == exercise.function
        assert function.__code__.co_filename == f"<cell {exercise.id.replace('.', '-')}>"
        assert function.__globals__["__name__"] == function.__module__ == "__main__"

    @pytest.mark.parametrize("exercise", EXERCISES, ids=lambda each: each.id)
    def test_every_blank_of_the_exercises_loads_and_is_blank_when_called(self, exercise):
        function = load_exercise(exercise, list(code_of(exercise.id.partition(".")[0], "exercises").items()))
        with pytest.raises(NotImplementedError):
            function(*[None] * function.__code__.co_argcount)

    @pytest.mark.parametrize(
        "instead",
        [None, "def broken(:", "raise RuntimeError", "import sys; sys.exit()", "torch = np = dist = tensor = None"],
        ids=["deleted", "syntax error", "raises", "exits", "rebinds"],
    )
    @pytest.mark.parametrize(
        "exercise",
        [each if each.id in FEW else pytest.param(each, marks=pytest.mark.soak) for each in EXERCISES],
        ids=lambda each: each.id,
    )
    def test_any_other_cell_may_be_lost(self, exercise, instead):
        cells = code_of(exercise.id.partition(".")[0], "solutions")
        for lost in cells.keys() - {exercise.id.replace(".", "-")}:
            kept = [(id, source if id != lost else instead) for id, source in cells.items()]
            function = load_exercise(exercise, [each for each in kept if each[1] is not None])
            assert function.__name__ == exercise.function, lost
            space = function.__globals__
            assert space.get("np", sys.modules["numpy"]) is sys.modules["numpy"], lost
            assert space.get("torch", sys.modules.get("torch")) is sys.modules.get("torch"), lost

    def test_one_exercise_may_use_another(self):
        cells = list(code_of("collectives", "solutions").items())
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
            cells = [("", source) for _, source in list(code_of(exercise.id.partition(".")[0], "solutions").items())]
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

    @pytest.mark.parametrize("where", [OWN + "-check", "demo-1", "demo-1-check"])
    @pytest.mark.parametrize("left", ["", "def f(): pass", FILLED_NOWHERE], ids=["empty", "stub", "class"])
    def test_an_answer_counts_in_whatever_cell_it_was_typed(self, where, left):
        typed = (where, "def f():\n    return 1\ngrading.check('demo.2')\nf()")
        for cells in ([own(left), typed], [typed, own(left)]):
            assert demo(*cells)() == 1
            assert demo(*cells, own("def f():\n    return 2"))() == demo(*cells, "def f():\n    return 2")() == 2
        last = ("demo-3", "def f():\n    return 3")
        assert demo(own(left), typed, last)() == (1 if where == OWN + "-check" else 3)
        assert unusable(own("def f(): pass"), (where, "f = print")).kind == "blank", "a name of theirs"

    def test_a_class_of_which_one_method_is_written_is_an_answer(self):
        assert demo(own(FILLED_NOWHERE + "\ndef f(): return 2"), ("demo-1", "def f(): return 1"))() == 2
        begun = FILLED_NOWHERE.replace("raise NotImplementedError('backward')", "return 2")
        with pytest.raises(NotImplementedError):
            demo(own(begun), ("demo-1", "def f(): return 1"))()

    def test_a_check_cell_defines_nothing_else(self):
        error = unusable((OWN + "-check", "f = 1"))
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


class TestIsBlank:
    def test_of_functions_and_other_things(self):
        def blank(x):
            """Words."""

        assert is_blank(blank)
        assert not is_blank(lambda: 1)
        assert not is_blank(print)
        assert not is_blank(7)
