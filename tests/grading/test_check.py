"""`grading.check` always answers: pass, fail or not attempted, whatever the learner's function does."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial

import nbformat
import pytest
from nbclient import NotebookClient

from dtlib import grading
from dtlib.grading import NoPoints, all_exercises, check
from dtlib.grading.classroom import check as notebook
from dtlib.grading.sandbox.walls.limits import Limits

from .answers import cells, namespace, reference_namespace

SETUP = cells("collectives")["setup"]


@pytest.fixture(autouse=True, scope="module")
def impatient() -> Iterator[None]:
    """Whoever hangs is given up sooner than in a learner's notebook."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dtlib.grading.classroom.check.Limits", partial(Limits, patience_seconds=0.7))
        notebook._sandbox.cache_clear()
        yield
    notebook._sandbox.cache_clear()


def answer(exercise: str, source: str, **options) -> grading.Result:
    return check(exercise, seed=3, namespace=namespace(SETUP, source), **options)


def ring(body: str) -> str:
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return f"def ring_on_paper(full_bytes, n, link_bytes_per_s):\n{lines}"


class TestNotAttempted:
    def test_unknown_id_lists_the_known_ones(self):
        result = check("collectives.99")
        assert result.status == "not attempted"
        assert "no exercise 'collectives.99'" in result.message
        assert "collectives.1, collectives.2" in result.message

    @pytest.mark.parametrize("strange", [None, 7, ["collectives.1"], "", "collectives"])
    def test_strange_ids_are_answered_too(self, strange):
        result = check(strange)
        assert result.status == "not attempted"
        assert "exercise" in result.message or "check itself failed" in result.message

    def test_function_is_missing(self):
        result = check("collectives.2", namespace={})
        assert result.status == "not attempted"
        assert "no function `ring_on_paper` yet" in result.message

    def test_name_is_no_function(self):
        result = check("collectives.2", namespace={"ring_on_paper": 7})
        assert result.status == "not attempted"
        assert "is a int" in result.message

    @pytest.mark.parametrize(
        "body", ["pass", "...", '"""Only words."""', "return None", 'raise NotImplementedError("x")']
    )
    def test_body_is_blank(self, body):
        result = answer("collectives.2", ring(body))
        assert result.status == "not attempted", str(result)
        assert result.points == 0

    def test_half_written_answer_that_still_raises_not_implemented(self):
        result = answer("collectives.2", ring("sent = 2 * full_bytes\nraise NotImplementedError"))
        assert result.status == "not attempted"

    def test_not_implemented_by_somebody_else_is_a_failure(self):
        body = "import collections.abc\nreturn abs(torch.empty(1, device='meta').numpy())"
        result = answer("collectives.2", ring(body))
        assert result.status == "fail"
        assert "NotImplementedError" in result.message or "TypeError" in result.message


class TestAlwaysAnswers:
    @pytest.mark.parametrize(
        ("body", "told"),
        [
            ("return 'a lot'", "expected a tuple (sent_bytes, seconds)"),
            ("return None if n else 0", "expected a tuple (sent_bytes, seconds)"),
            ("return float('nan'), float('nan')", "Saw nan; expected a finite number"),
            ("return float('inf'), -1.0", "Saw inf"),
            ("return full_bytes > 0, True", "Saw True"),
            ("return (1, 2, 3)", "Saw [1, 2, 3]; expected a tuple"),
            ("return object(), lambda: 0", "Saw an object"),
            ("return 10**400, 1", "Saw an int"),
            ("return [full_bytes] * 5000, 1", "Saw a list"),
            (
                "return full_bytes / 0, 1",
                "No result: the function raised ZeroDivisionError: division by zero, in line 2",
            ),
            ("return undefined_name", "NameError: name 'undefined_name' is not defined"),
            ("import os\nos._exit(0)", "exited"),
            ("import os\nos._exit(3)", "exited"),
            ("import sys\nsys.exit('bye')", "sys.exit"),
            ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
            ("raise KeyboardInterrupt", "KeyboardInterrupt"),
            ("class Odd(BaseException): pass\nraise Odd('x')", "Odd"),
            ("return ring_on_paper(full_bytes, n, link_bytes_per_s)", "RecursionError"),
        ],
    )
    def test_strange_answers(self, body, told):
        result = answer("collectives.2", ring(body))
        assert result.status == "fail", str(result)
        assert result.points == 0
        assert told in str(result), str(result)

    def test_wrong_number_of_arguments(self):
        result = answer("collectives.2", "def ring_on_paper(full_bytes):\n    return full_bytes, 1.0\n")
        assert result.status == "fail"
        assert "takes 1 positional argument but 3 were given" in result.message

    def test_exception_shows_its_own_line(self):
        result = answer("collectives.2", ring("share = (n - 1) / n\nreturn share * missing, 1"))
        assert "line 3 of `ring_on_paper`: `return share * missing, 1`" in result.message

    def test_exception_of_a_rank_shows_rank_and_line(self):
        source = (
            "def tree_broadcast(tensor, src):\n    if dist.get_rank():\n        tensor[10**9]\n    dist.barrier()\n"
        )
        result = answer("collectives.4", source)
        assert result.status == "fail"
        assert "rank 1 raised IndexError" in result.message
        assert "line 3 of `tree_broadcast`: `tensor[10**9]`" in result.message

    def test_endless_loop_is_ended(self):
        result = answer("collectives.2", ring("while True:\n    pass"), timeout_s=0.6)
        assert result.status == "fail"
        assert "after 1 s of its own computing time" in result.message
        assert "`pass`" in result.message or "`while True:`" in result.message

    def test_loop_that_catches_everything_is_ended(self):
        body = "while True:\n    try:\n        while True:\n            pass\n    except BaseException:\n        pass"
        result = answer("collectives.2", ring(body), timeout_s=0.2)
        assert result.status == "fail"
        assert "of its own computing time" in result.message

    def test_deadlock_names_the_ranks_and_their_lines(self):
        source = "def tree_broadcast(tensor, src):\n    dist.recv(tensor, 1 - dist.get_rank())\n"
        result = answer("collectives.4", source)
        assert result.status == "fail"
        assert "nothing moved any more, and ranks 0, 1 had not returned" in result.message
        assert "rank 0 at line 2: `dist.recv(tensor, 1 - dist.get_rank())`" in result.message
        assert "not run, because an earlier case hung" not in result.checks[1].message

    def test_print_storm_is_cut(self, capsys):
        body = "for _ in range(20_000):\n    print('x' * 99)\nreturn 2 * (n - 1) / n * full_bytes, 1.0"
        result = answer("collectives.2", ring(body))
        assert result.status == "partly right"
        assert 3000 < len(result.printed) < 5000
        assert "the rest is not shown" in result.printed
        assert capsys.readouterr().out == ""

    def test_result_that_compares_equal_to_everything(self):
        source = (
            "class Yes(float):\n"
            "    def __eq__(self, other): return True\n"
            "    def __sub__(self, other): return 0.0\n"
            "    def __reduce__(self): return (print, ('ran in the judge',))\n"
            "    __hash__ = float.__hash__\n" + ring("return Yes(1), Yes(1)")
        )
        result = answer("collectives.2", source)
        assert result.status == "fail"
        assert result.points == 0

    def test_function_that_cannot_travel(self):
        source = "import threading\nlock = threading.Lock()\n" + ring("with lock:\n    return 1, 2")
        result = answer("collectives.2", source)
        assert result.status == "fail"
        assert "cannot be sent" in result.message

    def test_fault_of_the_checks_is_not_the_learners(self, monkeypatch):
        def broken(*args, **kwargs):
            raise RuntimeError("a bug of ours")

        monkeypatch.setattr("dtlib.grading.sandbox.runner.Sandbox.run", broken)
        result = check("collectives.2", namespace=reference_namespace("collectives"))
        assert result.status == "not attempted"
        assert "not your fault" in result.message

    def test_keyboard_interrupt_passes_through(self, monkeypatch):
        def interrupted(*args, **kwargs):
            raise KeyboardInterrupt

        monkeypatch.setattr("dtlib.grading.sandbox.runner.Sandbox.run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            check("collectives.2", namespace=reference_namespace("collectives"))


class TestFreshInputs:
    def test_hard_coded_answers_fail(self):
        exercise = grading.all_exercises()["collectives.2"]
        (case, *_) = exercise.cases(3)
        full_bytes, n, rate = case["arguments"]
        sent = 2 * (n - 1) / n * full_bytes
        assert answer("collectives.2", ring(f"return {sent!r}, {sent / rate!r}")).status == "fail"

    def test_cases_repeat_with_the_seed_and_differ_without(self):
        for exercise in grading.all_exercises().values():
            same = [repr(exercise.cases(seed)) for seed in (1, 1, 2)]
            assert same[0] == same[1] != same[2], exercise.id

    def test_two_runs_with_one_seed_give_identical_results(self):
        space = namespace(SETUP, ring("return full_bytes, 1.0"))
        first, second = (check("collectives.2", seed=8, namespace=space) for _ in range(2))
        assert asdict(first) == asdict(second)

    def test_failure_tells_how_to_repeat_it(self):
        result = check("collectives.2", namespace=namespace(SETUP, ring("return 1.0, 1.0")))
        seed = int(result.again.split("seed=")[1].split(")")[0])
        again = check("collectives.2", seed=seed, namespace=namespace(SETUP, ring("return 1.0, 1.0")))
        assert again.message == result.message


class TestOwnWork:
    RIGHT = "sent = 2 * (n - 1) / n * full_bytes\nreturn sent, sent / link_bytes_per_s"

    def test_units_and_the_registry_of_models_are_tools(self):
        tools = "from dtlib.theory import models, units\nassert models.model('gpt2-124m').hidden * units.MB\n"
        assert answer("collectives.2", ring(tools + self.RIGHT)).status == "pass"

    @pytest.mark.parametrize(
        "called",
        [
            "models.gpt('mine', num_layers=1, hidden=64, num_heads=2, vocab=9, seq=8)",
            "collectives.ring_all_reduce_bytes(8, 2)",
        ],
    )
    def test_a_formula_of_the_library_is_not_ones_own(self, called):
        result = answer("collectives.2", ring(f"from dtlib.theory import collectives, models\n{called}\n{self.RIGHT}"))
        assert (result.points, result.mistakes) == (0, ("library called",)), str(result)


class TestFindsTheFunction:
    def test_in_the_caller(self):
        def ring_on_paper(full_bytes, n, link_bytes_per_s):
            sent = 2 * (n - 1) / n * full_bytes
            return sent, sent / link_bytes_per_s

        assert ring_on_paper
        assert check("collectives.2").status == "pass"

    def test_in_a_script(self):
        script = ring("sent = 2 * (n - 1) / n * full_bytes\nreturn sent, sent / link_bytes_per_s")
        script += 'from dtlib import grading\nprint(grading.check("collectives.2").status)\n'
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
        assert done.stdout.strip() == "pass", done.stderr

    def test_helper_functions_travel_along(self):
        source = "def share(n):\n    return 2 * (n - 1) / n\n"
        source += ring("return share(n) * full_bytes, share(n) * full_bytes / link_bytes_per_s")
        assert answer("collectives.2", source).status == "pass"


class TestShowsItself:
    def test_text_and_html_of_a_failure(self):
        result = answer("collectives.2", ring("return 2 * full_bytes, '<b>fast</b>'"))
        text, html = str(result), result._repr_html_()
        assert text.startswith("✗ collectives.2 · What a ring sends")
        assert "0 of 5 points" in text
        assert "✗ bytes sent by each rank (0/3)" in text
        assert "&lt;b&gt;fast" in html
        assert "<b>fast" not in html
        assert result._repr_mimebundle_()["text/plain"] == text

    def test_result_is_plain_data(self):
        result = answer("collectives.2", ring("return 2 * full_bytes, 1.0"))
        told = json.loads(json.dumps(asdict(result)))
        assert told["status"] == "fail"
        assert [each["mistake"] for each in told["checks"] if each["max_points"]] == ["2 D", ""]

    def test_what_it_was_doing_is_gone_when_it_is_done(self):
        source = ring("return 1.0, 1.0") + 'from dtlib import grading\ngrading.check("collectives.2")\n'
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
        NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
        progress, shown = notebook.cells[0].outputs
        assert progress["data"]["text/plain"] == ""
        assert "fail · 0 of 5 points" in shown["data"]["text/plain"]

    def test_prose_keeps_code_apart(self):
        result = grading.Result("x.1", "t", "not attempted", "call `f(x)` & <go>")
        assert "<code>f(x)</code> &amp; &lt;go&gt;" in result._repr_html_()


class TestUnderNbgrader:
    """nbgrader takes an error for zero points and a number for partial credit."""

    def test_partial_credit_is_a_number(self, monkeypatch):
        monkeypatch.setenv("NBGRADER_EXECUTION", "autograde")
        result = answer("collectives.2", ring("return 2 * (n - 1) / n * full_bytes, 1.0"))
        assert float(result._repr_mimebundle_()["text/plain"]) == 3.0

    def test_no_points_raise(self, monkeypatch):
        monkeypatch.setenv("NBGRADER_EXECUTION", "autograde")
        with pytest.raises(NoPoints, match="0 of 5 points"):
            answer("collectives.2", ring("return 1.0, 1.0"))


def test_harnesses_bring_no_answers_along():
    """The process of a submission needs the harnesses, and they import neither checks nor the judge."""
    script = (
        "import sys, dtlib.grading.sandbox.harness as h\n"
        "[h.resolve(name) for name in ('paper.call', 'collectives.all_reduce', 'dp.overlap')]\n"
        "rooms = [name[14:] for name in sys.modules if name.startswith('dtlib.grading.') and 'harness' not in name]\n"
        "print(*sorted(rooms))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["exercises", "exercises.inputs", "exercises.plain", "sandbox"], done.stderr


def numbers(piece: object) -> set[int]:
    """The whole numbers in a piece."""
    if isinstance(piece, dict | list | tuple):
        return set().union(*map(numbers, piece.values() if isinstance(piece, dict) else piece))
    return {piece} if isinstance(piece, int) else set()


@pytest.mark.parametrize("name", all_exercises())
def test_nobody_is_told_the_seed_of_what_comes_later(name):
    exercise = all_exercises()[name]
    for case in exercise.cases(7):
        for rank in range(case.get("world_size", 1)):
            told = [
                *dict(exercise.named(case, rank)).values(),
                *(piece for _, piece in exercise.handed_out(case, rank)),
            ]
            assert case.get("seed", -1) not in numbers(told), case


def test_importing_grading_does_not_import_torch():
    script = "import sys, dtlib.grading, dtlib.grading.exercises.release; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr
