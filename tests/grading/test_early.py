"""Who asks the desk before it is due: weighed while there is nothing to hold, or in an order that nobody keeps.

What a question shows is known to those alone who have come so far. The control is the same answer, had it shown that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from dtlib.grading.exercises.catalogue import all_exercises
from dtlib.grading.exercises.exercise import EARLY as EARLY_MISTAKE
from dtlib.grading.exercises.exercise import Exercise
from dtlib.grading.exercises.pp import executor
from dtlib.grading.exercises.seen import Case, Observed
from dtlib.grading.exercises.zero import optimizer
from dtlib.grading.sandbox.runner import Sandbox
from dtlib.theory.units import MiB

from .answers import SEED, answer, cells, open_sandbox, run_jobs

EARLY = """
import sys


def the_desk():
    frame = sys._getframe(1)
    while "desk" not in frame.f_locals:
        frame = frame.f_back
    return frame.f_locals["desk"]


def ask_beforehand(how_often):
    desk = the_desk()
    pieces = [desk.ask("", 1.0) for _ in range(how_often)]
    desk.next = lambda shows=None: pieces.pop(0)
    if ASKS:
        desk.ask = lambda label, shows=None: pieces.pop(0)


hoard = []


def FUNCTION(*arguments):
    if not hoard:
        ask_beforehand(TIMES)
    hoard.append(b"1" * HOARD)
    return right(*arguments)
"""
ALL_FORWARD_FIRST = """
def run_schedule(actions, stage, rows, inputs, losses):
    desk = stage.desk
    keys = {}
    for kind, i in actions:
        label = "forward" if kind == "F" else "back"
        keys[label] = desk.ask(label, 1.0)
    ask = desk.ask
    desk.ask = lambda label, shows=None: keys[label] if label in keys else ask(label)
    order = [each for each in actions if each[0] == "F"] + [each for each in actions if each[0] == "B"]
    return right(order, stage, rows, inputs, losses)
"""


def asking(times: int, hoards_mib: int, *, asks: bool = False) -> str:
    """An answer that asks so often before it begins, by name too or not, and then keeps so much."""
    return EARLY.replace("TIMES", str(times)).replace("ASKS", str(asks)).replace("HOARD", str(hoards_mib * MiB))


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with open_sandbox() as opened:
        yield opened


def source(exercise: Exercise, text: str) -> str:
    own = cells(exercise.id.partition(".")[0])[exercise.id.replace(".", "-")]
    return own.replace(f"def {exercise.function}(", "def right(", 1) + text.replace("FUNCTION", exercise.function)


def observed(sandbox: Sandbox, exercise: Exercise, case: Case, text: str) -> Observed:
    (found,) = run_jobs(sandbox, [(exercise, answer(exercise.id, source(exercise, text)), case)])
    assert found.trouble is None, found.trouble
    return found


def verdict(exercise: Exercise, check: str, seen: Observed) -> tuple[str, str]:
    (judged,) = [each for each in exercise.judge([seen]).checks if each.name == check]
    return judged.verdict, judged.message


def had_it_shown(seen: Observed, labels: tuple[str, ...], shown: list[list[float]]) -> Observed:
    """The same, where each rank showed these numbers at its questions of these labels."""
    left = [list(each) for each in shown]
    asks = [ask._replace(shown=left[ask.rank].pop(0)) if ask.label in labels else ask for ask in seen.seen.asks]
    return replace(seen, seen=replace(seen.seen, asks=asks))


@pytest.mark.parametrize(("name", "check", "of"), [("tp.6", "kept", "losses"), ("sp.2", "kept", "output")])
def test_who_is_weighed_before_there_is_anything_to_hold(sandbox: Sandbox, name: str, check: str, of: str):
    exercise = all_exercises()[name]
    case = next(each for each in exercise.cases(SEED) if each.get("weighed"))
    seen = observed(sandbox, exercise, case, asking(1, 150))
    assert verdict(exercise, check, seen)[0] == "fail"
    assert "before it was due" in verdict(exercise, check, seen)[1]
    norms = [[float(np.linalg.norm(said[of].astype(np.float64)))] for said in seen.said]
    assert verdict(exercise, check, had_it_shown(seen, ("between",), norms))[0] == "pass"


@pytest.mark.parametrize(
    ("name", "check", "labels", "times", "asks"),
    [
        ("memory.5", "at rest", ("between steps",), 4, False),
        ("memory.6", "at rest", ("between steps",), 24, True),
        ("zero.3", "memory", ("between",), 2, False),
        ("zero.6", "memory", ("forward ended", "backward ended"), 2, False),
        ("activations.4", "kept", ("between",), 2, False),
        ("activations.5", "kept", ("between",), 2, False),
    ],
)
def test_who_asks_early_is_told_so(
    sandbox: Sandbox, name: str, check: str, labels: tuple[str, ...], times: int, asks: bool
):
    exercise = all_exercises()[name]
    case = next(each for each in exercise.cases(SEED) if each.get("weighed"))
    seen = observed(sandbox, exercise, case, asking(times, 1, asks=asks))
    (judged,) = [each for each in exercise.judge([seen]).checks if each.name == check]
    assert (judged.verdict, judged.mistake) == ("fail", EARLY_MISTAKE)
    assert "before it was due" in judged.message
    told = had_it_shown(seen, labels, [said["shown"] for said in seen.said])
    assert "before it was due" not in verdict(exercise, check, told)[1]


def test_who_is_weighed_before_the_first_step(sandbox: Sandbox):
    exercise = all_exercises()["zero.4"]
    case = next(each for each in exercise.cases(SEED) if each.get("weighed"))
    seen = observed(sandbox, exercise, case, asking(case["steps"], 100))
    assert verdict(exercise, "memory", seen)[0] == "fail"
    assert "before it was due" in verdict(exercise, "memory", seen)[1]
    sums = [[total for total, _ in optimizer.changes(case)]] * case["world_size"]
    assert verdict(exercise, "memory", had_it_shown(seen, ("between steps",), sums))[0] == "pass"


def test_who_asks_in_one_order_and_goes_in_another(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch):
    exercise = all_exercises()["pp.6"]
    case = next(each for each in exercise.cases(SEED) if "4 ranks, 1F1B" in each["words"])
    seen = observed(sandbox, exercise, case, ALL_FORWARD_FIRST)
    results = {each.name: each.verdict for each in exercise.judge([seen]).checks}
    assert results.pop("order") == "fail"
    assert set(results.values()) == {"pass"}
    assert "in advance" in verdict(exercise, "order", seen)[1]
    monkeypatch.setattr(executor, "RTOL_SHOWN", np.inf)
    assert verdict(exercise, "order", seen)[0] == "pass"
