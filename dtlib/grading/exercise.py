"""Exercises and checks as data: what is drawn, how it is run, and how the plain data that come back are judged.

Three parts never mix. `Exercise.draw` makes fresh cases from a seed. The *harness*, named by a string and found in
`dtlib.grading.harness`, runs the learner's function on one case in a process (or in one process a rank) and returns
plain data. `Exercise.judge` holds those data against theory and never runs, imports or unpickles anything of the
learner's. So one object serves `grading.check` in a notebook and a grader that runs submissions behind walls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from .result import CheckResult, Result

Kind = Literal["value", "gradient", "traffic", "memory", "overlap", "schedule"]
KINDS: tuple[str, ...] = get_args(Kind)
Case = Mapping[str, Any]


@dataclass(frozen=True)
class Trouble:
    """Why a case brought no result.

    `kind` is ``raised``, ``blank`` (a ``NotImplementedError`` of the learner's own), ``hung``, ``died``, ``not sent``
    or ``skipped`` (an earlier case hung); `text` says it in words, `line` shows the learner's line if one is known.
    """

    kind: str
    text: str
    line: str = ""

    def __str__(self) -> str:
        if not self.line:
            return self.text
        return f"{self.text} ({self.line})" if self.kind == "hung" else f"{self.text}, in {self.line}"


@dataclass(frozen=True)
class Run:
    """One case and what came back: plain data for each rank, or the trouble that prevented it.

    `wire_bytes` is what all ranks together put on the network as the kernel counted it, `peak_resident_bytes` what
    their processes held at most beyond what they started with; None where it was not metered.
    """

    case: Case
    ranks: tuple[Any, ...] = ()
    wire_bytes: int | None = None
    peak_resident_bytes: int | None = None
    trouble: Trouble | None = None


@dataclass(frozen=True)
class Finding:
    """What a check found wrong in one run: what was seen, what was expected ("" where nothing came), in which case."""

    seen: str
    expected: str
    where: str = ""

    def __str__(self) -> str:
        where = f" ({self.where})" if self.where else ""
        if not self.expected:
            return f"{self.seen[:1].upper()}{self.seen[1:]}{where}."
        return f"Saw {self.seen}; expected {self.expected}{where}."


class FormError(ValueError):
    """Raised while inspecting an answer of another form than the task asks for: what was seen, what was expected."""

    def __init__(self, seen: str, expected: str) -> None:
        super().__init__(f"{seen} instead of {expected}")
        self.seen = seen
        self.expected = expected


Fits = Callable[[Sequence[Run], Sequence[Run]], bool]


@dataclass(frozen=True)
class Mistake:
    """A wrong answer that people give: a short name, how to recognise it, and what a teacher would say.

    `fits(failing, passing)` looks at the runs that failed the check and those that passed it. `feedback` names what
    happened and asks what to think about; it does not give the answer away.
    """

    name: str
    fits: Fits
    feedback: str


@dataclass(frozen=True)
class Check:
    """One thing that is judged, with its points: `inspect` returns None for a run that is as it should be.

    `applies` selects the cases that the check looks at. A check that is not `visible` is judged by the grader alone.
    Where a `gate` finds something wrong, no other check of the exercise earns points; it may be worth none itself.
    """

    name: str
    kind: Kind
    points: int
    description: str
    inspect: Callable[[Run], Finding | None]
    mistakes: tuple[Mistake, ...] = ()
    visible: bool = True
    gate: bool = False
    applies: Callable[[Case], bool] = lambda case: True

    def __post_init__(self) -> None:
        """Refuse a kind that does not exist, and points that are not positive (a gate may have none)."""
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {self.kind!r}")
        if self.points < (0 if self.gate else 1):
            raise ValueError(f"points must be at least {0 if self.gate else 1}, not {self.points!r}")

    def judge(self, runs: Sequence[Run]) -> CheckResult:
        """The verdict on all runs whose case the check applies to; a run with trouble fails.

        A gate looks at the runs that came back: what a run that did not come back would have done, nobody knows.
        """
        failing: list[tuple[Run, Finding]] = []
        passing: list[Run] = []
        for run in runs:
            if not self.applies(run.case) or (self.gate and run.trouble is not None):
                continue
            finding = self._look(run)
            if finding is None:
                passing.append(run)
            else:
                failing.append((run, finding))
        if not failing:
            return self._result(passed=bool(passing))
        runs_that_failed = [run for run, _ in failing]
        known = next((mistake for mistake in self.mistakes if _fits(mistake, runs_that_failed, passing)), None)
        # A wrong result says more than none; among equals, the first and easiest case says most.
        told = min(failing, key=lambda pair: pair[0].trouble is not None)[1]
        return self._result(
            passed=False,
            mistake=known.name if known else "",
            message=f"{told} {known.feedback}" if known else str(told),
        )

    def _look(self, run: Run) -> Finding | None:
        if run.trouble is not None:
            return Finding(f"no result: {run.trouble}", "", describe_case(run.case))
        try:
            return self.inspect(run)
        except FormError as error:
            return Finding(error.seen, error.expected, describe_case(run.case))
        except Exception as error:  # data of an unexpected form came back: never the judge's crash
            return Finding(
                f"a result of another form ({type(error).__name__}: {error})",
                "the form that the task asks for",
                describe_case(run.case),
            )

    def _result(self, *, passed: bool, mistake: str = "", message: str = "") -> CheckResult:
        return CheckResult(
            name=self.name,
            kind=self.kind,
            description=self.description,
            points=self.points if passed else 0,
            max_points=self.points,
            passed=passed,
            mistake=mistake,
            message=message,
        )


@dataclass(frozen=True)
class Exercise:
    """One exercise: where it stands, the function it asks for, and everything that is needed to judge it.

    `harness` names a function of `dtlib.grading.harness`; `draw(rng)` returns the cases in the order in which they run,
    easiest first. `timeout_s` bounds each case.
    """

    id: str
    function: str
    title: str
    harness: str
    draw: Callable[[np.random.Generator], list[dict[str, Any]]]
    checks: tuple[Check, ...]
    timeout_s: float = 10.0

    @property
    def points(self) -> int:
        """What the exercise is worth: the points of all its checks."""
        return sum(check.points for check in self.checks)

    def cases(self, seed: int) -> list[dict[str, Any]]:
        """Fresh cases; the same for the same `seed`."""
        return self.draw(np.random.default_rng([int(seed), *self.id.encode()]))

    def judge(self, runs: Sequence[Run], *, hidden: bool = True) -> Result:
        """The verdict on `runs`, one for each case; checks that are not visible only with `hidden`."""
        if any(run.trouble and run.trouble.kind == "blank" for run in runs):
            return self.not_attempted(
                f"`{self.function}` still raises NotImplementedError: replace that line by your answer."
            )
        shown = [check for check in self.checks if check.visible or hidden]
        results = tuple(check.judge(runs) for check in shown)
        if any(check.gate and result.message for check, result in zip(shown, results, strict=True)):
            results = tuple(_uncounted(check, result) for check, result in zip(shown, results, strict=True))
        failed = [each for each in results if not each.passed]
        message = _once(each.message for each in failed) if failed else "All checks passed."
        return Result(
            exercise=self.id,
            title=self.title,
            status="fail" if failed else "pass",
            message=message,
            checks=results,
            withheld_points=self.points - sum(each.max_points for each in results),
        )

    def not_attempted(self, message: str) -> Result:
        """The result of an exercise that nobody has begun: `message` says what to do first."""
        return Result(
            exercise=self.id,
            title=self.title,
            status="not attempted",
            message=message,
            checks=tuple(check._result(passed=False) for check in self.checks if check.visible),
        )


def describe_case(case: Case) -> str:
    """The case in words, for a message; a drawn case may bring its own under ``"words"``."""
    return str(case.get("words", ""))


def _fits(mistake: Mistake, failing: Sequence[Run], passing: Sequence[Run]) -> bool:
    try:
        return bool(mistake.fits(failing, passing))
    except Exception:  # data of an unexpected form: then it is not this mistake
        return False


def _uncounted(check: Check, result: CheckResult) -> CheckResult:
    """The result beside a gate that failed: no points, and nothing said that would distract from the gate."""
    return replace(result, points=0) if check.gate else replace(result, points=0, counted=False, mistake="", message="")


def _once(messages: Any) -> str:
    return "\n".join(dict.fromkeys(message for message in messages if message))
