"""From what a sandbox observed of an answer to its entry in a record: checks judge, and what they cannot is said."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from dtlib.grading.exercises.exercise import Exercise
from dtlib.grading.exercises.seen import Case, Trouble
from dtlib.grading.sandbox.runner import WHOLE, Answer, Cell, Outcome

from .report.record import TIMES, Record, entry_of

if TYPE_CHECKING:
    from dtlib.grading.sandbox.runner import Sandbox

    from .intake import Submission

_LEAD = {
    "tampered": "This exercise earns nothing, because what its processes said is not what was seen from outside: ",
    "limit": "This exercise earns nothing, because it went beyond what a submission may use: ",
}


def grade_exercise(
    sandbox: Sandbox | None,
    exercise: Exercise,
    submission: Submission,
    seed: int,
    tell: Callable[[int, str], None] = lambda done, words: None,
) -> Record:
    """Run one exercise of a submission in `sandbox` on the cases of `seed`, and judge what comes back.

    What is not run at all, since nobody has begun it or it cannot be read, needs none. Nothing of the submission runs
    in this process. Does not raise: a fault of the grader itself becomes the entry, with the status ``error`` and how
    it failed as the reason.
    """
    began = time.thread_time()
    try:
        if submission.fault is not None:
            raise submission.fault
        stem = exercise.id.partition(".")[0]
        problem, came_in = submission.problem(stem)
        if problem:
            status = "fail" if came_in else "not attempted"
            return entry_of(exercise, status, reason=_sentence(problem), trouble="unreadable" * came_in)
        if exercise.id in submission.untouched:
            return entry_of(exercise, "not attempted", reason=exercise.blank, trouble="blank")
        assert sandbox is not None
        cells, cases = submission.cells(stem), _cases(exercise, seed)
        outcome = sandbox.run(exercise, Answer(cells), cases, tell)
        if len(outcome.observed) != len(cases):
            raise RuntimeError(f"{len(outcome.observed)} of {len(cases)} cases came back")
        with np.errstate(all="ignore"):  # numbers of learners overflow, and warnings of numpy help nobody
            return _judged(exercise, cells, outcome, began)
    except Exception as error:
        return entry_of(exercise, "error", reason=said(error))


@lru_cache(maxsize=64)
def _cases(exercise: Exercise, seed: int) -> Sequence[Case]:
    """The same for everybody, so that theories are computed once a class."""
    return exercise.cases(seed)


def said(error: BaseException) -> str:
    """An error in one line of at most 500 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def _judged(exercise: Exercise, cells: Sequence[Cell], outcome: Outcome, began: float) -> Record:
    observed = outcome.observed
    troubles = [each.trouble for each in observed if each.trouble is not None]
    first = troubles[0].kind if troubles else ""
    # Where an endless loop stood is a matter of chance, and the verdict is not: the two are kept apart.
    lines = list(dict.fromkeys(each.line for each in troubles if each.kind == "hung" and each.line))
    measured: dict[str, Any] = {name: getattr(outcome, name) for name in TIMES[:-1]} | {
        "peak_bytes": max((sum(each.seen.peak_at_end) for each in observed), default=0),
        "printed": outcome.printed,
        "stood_at": "; ".join(lines),
    }

    def entry(status: str, reason: str, trouble: str = first, **more: Any) -> Record:
        measured["grader_seconds"] = time.thread_time() - began
        return entry_of(exercise, status, reason=_sentence(reason), trouble=trouble, measured=measured, **more)

    for trouble in troubles:
        if trouble.kind in WHOLE and trouble.kind != "blank":
            return entry(_status(exercise, cells, trouble), f"{_LEAD.get(trouble.kind, '')}{trouble}", trouble.kind)
    result = exercise.judge(observed, hidden=True)
    if result.status == "not attempted":
        return entry(result.status, result.message)
    if result.status == "not known":
        why = next((str(each) for each in troubles if each.kind == "not known"), result.message)
        return entry(result.status, f"what this earns is not known: {why}. It has to be run again", "not known")
    came = [each for each in observed if each.has_come]
    fell = {each.name for each in exercise.checks if troubles and each.judge(came).verdict != "fail"}
    no_result = [each.name for each in result.checks if each.verdict == "fail" and each.name in fell]
    checks = [replace(each, message=_without(each.message, lines)) for each in result.checks]
    reasons = {each.text if each.kind == "hung" else str(each) for each in troubles if each.kind != "skipped"}
    is_whole = len(troubles) == len(observed) and not result.mistakes and len(reasons) == 1
    reason = f"no result: {reasons.pop()}" if is_whole else ""
    return entry(result.status, reason, results=checks, no_result=no_result)


def _status(exercise: Exercise, cells: Sequence[Cell], trouble: Trouble) -> str:
    """Where a function is missing, nobody tried, unless something else stands in its cell."""
    name = exercise.id.replace(".", "-")
    is_broken = any(cell.id == name and cell.source.strip() for cell in cells)
    return "fail" if trouble.kind != "missing" or is_broken else "not attempted"


def _without(message: str, lines: Sequence[str]) -> str:
    for line in lines:
        message = message.replace(f" ({line})", "")
    return message


def _sentence(text: str) -> str:
    text = text.strip()
    if re.match(r"[a-z]++(?![\w./-])", text):  # a word, and no name of a file
        text = text[:1].upper() + text[1:]
    return text if not text or text.endswith((".", "!", "?", "…")) else f"{text}."
