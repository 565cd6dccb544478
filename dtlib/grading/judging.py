"""From what a sandbox brought back to a verdict on an exercise: the checks judge, and what they cannot is said here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from .exercise import Case, Exercise, Run, Trouble
from .result import CheckResult, Result

#: Kinds of trouble after which nothing of the exercise counts: what the other cases gave cannot be trusted or was not
#: earned within the rules. Everything else (raised, hung, died) costs the cases in which it happened.
WHOLE = ("tampered", "limit", "syntax", "missing")


class CodeCell(Protocol):
    """A code cell of a notebook, as `dtlib.grading.submissions.Cell`."""

    @property
    def id(self) -> str: ...  # noqa: D102
    @property
    def source(self) -> str: ...  # noqa: D102


class Handed(Protocol):
    """What a learner handed in, as `dtlib.grading.submissions.Submission`."""

    @property
    def notebooks(self) -> Sequence[Any]: ...  # noqa: D102
    def cells(self, stem: str) -> Sequence[Any]: ...  # noqa: D102
    def problem(self, stem: str) -> str: ...  # noqa: D102


class Outcome(Protocol):
    """What came out of one exercise, as `dtlib.grading.sandbox.Outcome`."""

    @property
    def runs(self) -> list[Run]: ...  # noqa: D102
    @property
    def printed(self) -> str: ...  # noqa: D102
    @property
    def peak_resident_bytes(self) -> int: ...  # noqa: D102
    @property
    def seconds(self) -> float: ...  # noqa: D102
    @property
    def metered(self) -> str: ...  # noqa: D102


class Runner(Protocol):
    """Runs submissions behind walls, as `dtlib.grading.sandbox.Sandbox`; `run` may be called by several threads."""

    @property
    def walls(self) -> Mapping[str, str]: ...  # noqa: D102
    def run(self, exercise: Exercise, cells: Sequence[Any], cases: Sequence[Case]) -> Outcome: ...  # noqa: D102


@dataclass(frozen=True)
class Graded:
    """The verdict on one exercise of one learner, and what was seen on the way to it.

    `reason` stands for the exercise as a whole where its checks do not say it all; `trouble` is the kind of the first
    trouble. `fault` says how the grader itself failed, "" where it did not. `stood_at` is the line at which a function
    stood when its time was up. `peak_resident_bytes` is memory as seen from outside, `peak_tensor_bytes` as the ranks
    counted it themselves, `metered` how traffic was counted.
    """

    result: Result
    printed: str = ""
    peak_resident_bytes: int = 0
    peak_tensor_bytes: int = 0
    seconds: float = 0.0
    reason: str = ""
    trouble: str = ""
    fault: str = ""
    stood_at: str = ""
    metered: str = ""

    @property
    def status(self) -> str:
        """The status of the result, or ``error`` where the grader failed."""
        return "error" if self.fault else self.result.status


def grade_exercise(sandbox: Runner, exercise: Exercise, submission: Handed, seed: int) -> Graded:
    """Run one exercise of a submission in `sandbox` on the cases of `seed`, and judge what comes back.

    Nothing of the submission runs in this process. Raises whatever `sandbox` raises, and ``RuntimeError`` where it
    brings back another number of runs than there are cases: faults of the grader, which `grade` keeps apart.
    """
    stem = exercise.id.partition(".")[0]
    if problem := submission.problem(stem):
        handed_in = any(notebook.stem in (stem, "") for notebook in submission.notebooks)
        return whole(exercise, "fail" if handed_in else "not attempted", _sentence(problem), "unreadable" * handed_in)
    cells = submission.cells(stem)
    cases = exercise.cases(seed)
    outcome = sandbox.run(exercise, cells, cases)
    if len(outcome.runs) != len(cases):
        raise RuntimeError(f"{len(outcome.runs)} runs came back for {len(cases)} cases")
    graded = _judge(exercise, cells, outcome)
    return replace(
        graded,
        printed=outcome.printed,
        peak_resident_bytes=outcome.peak_resident_bytes,
        peak_tensor_bytes=max((_tensor_bytes(run) for run in outcome.runs), default=0),
        seconds=outcome.seconds,
        metered=outcome.metered,
    )


def _tensor_bytes(run: Run) -> int:
    """What the tensors of all ranks of a case held at most, in their own words: no check relies on it."""
    told = [data.get("peak_tensor_bytes") for data in run.ranks if isinstance(data, dict)]
    return sum(each for each in told if isinstance(each, int) and 0 <= each < 2**50)


def whole(exercise: Exercise, status: Any, reason: str, trouble: str = "") -> Graded:
    """A verdict of zero points for all of an exercise, for one `reason`."""
    return Graded(Result(exercise.id, exercise.title, status, reason), reason=reason, trouble=trouble)


def fault(exercise: Exercise, error: BaseException) -> Graded:
    """What is recorded where the grader itself failed."""
    text = f"{type(error).__name__}: {error}".splitlines()[0][:500]
    reason = f"the grader itself failed, which is not the learner's fault: {text}"
    return replace(whole(exercise, "not attempted", reason), fault=text)


def _judge(exercise: Exercise, cells: Sequence[CodeCell], outcome: Outcome) -> Graded:
    troubles = [run.trouble for run in outcome.runs if run.trouble is not None]
    for kind in WHOLE:
        for trouble in troubles:
            if trouble.kind == kind and not trouble.text.startswith("not run"):  # the time of all cases was used up
                return _by_trouble(exercise, cells, trouble)
    with np.errstate(all="ignore"):  # numbers of learners overflow, and warnings of numpy help nobody here
        result = exercise.judge(outcome.runs, hidden=True)
    first = troubles[0].kind if troubles else ""
    if result.status == "not attempted":
        return Graded(result, reason=result.message, trouble=first)
    # Where an endless loop stood is a matter of chance, and the verdict is not: the two are kept apart.
    lines = list(dict.fromkeys(trouble.line for trouble in troubles if trouble.kind == "hung" and trouble.line))
    checks = tuple(replace(each, message=_without(each.message, lines)) for each in result.checks)
    result = replace(result, checks=checks, message=_without(result.message, lines))
    return Graded(result, reason=_same_reason(checks, troubles, outcome.runs), trouble=first, stood_at="; ".join(lines))


def _by_trouble(exercise: Exercise, cells: Sequence[CodeCell], trouble: Trouble) -> Graded:
    said = str(trouble)
    if trouble.kind == "missing":
        name = exercise.id.replace(".", "-")
        broken = any(cell.id == name and cell.source.strip() for cell in cells)
        return whole(exercise, "fail" if broken else "not attempted", _sentence(said), trouble.kind)
    lead = {
        "tampered": "This exercise earns nothing, because what its processes said is not what was seen from outside:",
        "limit": "This exercise earns nothing, because it went beyond what a submission may use:",
        "syntax": "",
    }[trouble.kind]
    return whole(exercise, "fail", _sentence(f"{lead} {said}"), trouble.kind)


def _same_reason(checks: Sequence[CheckResult], troubles: Sequence[Trouble], runs: Sequence[Run]) -> str:
    """The one reason where no case brought a result and no check knows more about it than the trouble says."""
    if len(troubles) < len(runs) or any(check.mistake for check in checks) or not troubles:
        return ""
    first = [each for each in troubles if each.kind != "skipped"]
    told = {each.text if each.kind == "hung" else str(each) for each in first}
    return _sentence(f"no result: {told.pop()}") if len(told) == 1 else ""


def _without(message: str, lines: Sequence[str]) -> str:
    for line in lines:
        message = message.replace(f" ({line})", "")
    return message


def _sentence(text: str) -> str:
    text = text.strip()
    if re.match(r"[a-z]+(?![\w./-])", text):  # a word, and no name of a file
        text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?", "…")) else f"{text}."
