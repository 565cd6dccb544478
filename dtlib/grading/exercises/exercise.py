"""Exercises and checks as data: what is drawn, what is handed out, and how what comes back is judged.

Three parts never mix. `Exercise.draw` makes fresh cases from a seed. The *harness*, named by a string and found in
`dtlib.grading.sandbox.harness`, runs the learner's function in a process (or in one process a rank), which is told what
`Exercise.handed_out` gives, piece by piece. `Exercise.judge` holds what was seen and said against theory, and never
runs, imports or unpickles anything of the learner's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np

from . import inputs
from .result import CheckResult, Result, Verdict
from .seen import Case, Observed

Kind = Literal["value", "gradient", "traffic", "memory", "overlap", "schedule"]
KINDS: tuple[str, ...] = get_args(Kind)
CHANGED = "writes into what it was given"
EARLY = "asked before it was due"


@dataclass(frozen=True)
class Finding:
    """What a check found wrong in one case: what was seen, what was expected ("" where nothing came), and where."""

    seen: str
    expected: str
    where: str = ""
    mistake: str = ""  # by which it is known, where it is one by itself

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


Fits = Callable[[Sequence[Observed], Sequence[Observed]], bool]


@dataclass(frozen=True)
class Mistake:
    """A wrong answer that people give: a short name, how to recognise it, and what a teacher would say.

    `fits(failing, passing)` looks at the cases that failed the check and those that passed it. `feedback`, from the
    exercise's bank, names what happened and asks what to think about; it does not give the answer away.
    """

    name: str
    fits: Fits
    feedback: str = ""


@dataclass(frozen=True)
class Check:
    """One thing that is judged, with its points: `inspect` returns None for a case that is as it should be.

    `applies` selects the cases that the check looks at. A check that is not `visible` is judged by the grader alone.
    Where a `gate` finds something wrong, no other check of the exercise earns points; it may be worth none itself.
    Where `inputs_stay`, a call that changed what it was given fails it too, in whatever case.
    `is_told` says that it rests on what the submission's own processes tell. `agrees(observed, theory)` is whether what
    was observed is what a theory gives for the case: `inspect` asks it of the right one, mistakes of wrong ones.
    """

    name: str
    kind: Kind
    points: int
    description: str
    inspect: Callable[[Observed], Finding | None]
    mistakes: tuple[Mistake, ...] = ()
    visible: bool = True
    gate: bool = False
    is_told: bool = False
    inputs_stay: bool = False
    applies: Callable[[Case], bool] = lambda case: True
    agrees: Callable[[Observed, Any], bool] | None = None

    def __post_init__(self) -> None:
        """Refuse a kind that does not exist, and points that are not positive (a gate may have none)."""
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {self.kind!r}")
        if self.points < (0 if self.gate else 1):
            raise ValueError(f"points must be at least {0 if self.gate else 1}, not {self.points!r}")

    def judge(self, cases: Sequence[Observed]) -> CheckResult:
        """The verdict on all cases to which the check applies; one with trouble fails, unless nobody knows about it.

        A gate looks at the cases that came back: what one that did not come back would have done, nobody knows.
        """
        looked_at = [each for each in cases if self.applies(each.case) and (each.has_come or not self.gate)]
        unknown = [each.trouble for each in looked_at if _is_unknown(each)]
        found = [(each, self._look(each)) for each in looked_at if not _is_unknown(each)]
        failing = [(each, finding) for each, finding in found if finding is not None]
        if self.inputs_stay and not failing:
            others = [each for each in cases if each.has_come and not self.applies(each.case)]
            failing = [(each, finding) for each in others if (finding := _safely(_changed, each))]
        passing = [each for each, finding in found if finding is None]
        if not failing and unknown:
            return self.result("not known", message=str(Finding(f"no result: {unknown[0]}", "")))
        if not failing:
            return self.result("pass" if passing else "not looked at")
        failed = [each for each, _ in failing]
        by_itself = {finding.mistake for _, finding in failing}
        alone = by_itself.pop() if len(by_itself) == 1 else ""
        known = next(
            (each for each in self.mistakes if (each.name == alone if alone else _fits(each, failed, passing))), None
        )
        # A wrong result says more than none; among equals, the first and easiest case says most.
        told = min(failing, key=lambda pair: not pair[0].has_come)[1]
        if known is None:
            return self.result("fail", message=str(told))
        return self.result("fail", mistake=known.name, message=f"{told} {known.feedback}")

    def _look(self, observed: Observed) -> Finding | None:
        if observed.trouble is not None:
            return Finding(f"no result: {observed.trouble}", "", observed.words)
        return _safely(self.inspect, observed) or (_safely(_changed, observed) if self.inputs_stay else None)

    def result(self, verdict: Verdict, *, mistake: str = "", message: str = "") -> CheckResult:
        """A verdict on this check."""
        return CheckResult(
            name=self.name,
            kind=self.kind,
            description=self.description,
            points=self.points if verdict == "pass" else 0,
            max_points=self.points,
            verdict=verdict,
            mistake=mistake,
            message=message,
            is_told=self.is_told,
        )


@dataclass(frozen=True)
class Exercise:
    """One exercise: where it stands, the function it asks for, and everything that is needed to judge it.

    `harness` names a function of `sandbox.harness`; `draw(rng)` returns the cases in the order in which they run,
    easiest first. ``handed_out(case, rank)`` gives the pieces that a rank is told one after the other, as (label,
    piece), ``named(case, rank)`` those that it may ask for by name, as often as it likes. ``holds(case)`` lists
    ``(rank, piece, other, until)``: that piece is kept back until rank `other` has asked for its piece `until`, or, if
    `other` is -1, until nothing else moves. A case that is ``"weighed"`` has its memory read from outside, in processes
    of its own.
    """

    id: str
    function: str
    title: str
    harness: str
    draw: Callable[[np.random.Generator], list[dict[str, Any]]]
    checks: tuple[Check, ...]
    handed_out: Callable[[Case, int], inputs.Pieces] = inputs.arguments
    named: Callable[[Case, int], dict[str, Any]] = field(default=lambda case, rank: {})
    holds: Callable[[Case], Sequence[tuple[int, int, int, int]]] = field(default=lambda case: ())

    def __post_init__(self) -> None:
        """The first check of what is answered also fails where a call changed what it was given."""
        seen_outside = () if self.harness.startswith("paper.") else ("traffic", "memory")
        first = next((each for each in self.checks if not each.gate and each.kind not in seen_outside), None)
        changed = tuple(_guarding(check) if check is first else check for check in self.checks)
        object.__setattr__(self, "checks", changed)

    @property
    def points(self) -> int:
        """What the exercise is worth: the points of all its checks."""
        return sum(check.points for check in self.checks)

    @property
    def blank(self) -> str:
        """What is said of a function that is as it was handed out."""
        return f"`{self.function}` still raises NotImplementedError: replace that line by your answer."

    def cases(self, seed: int) -> list[dict[str, Any]]:
        """Fresh cases; the same for the same `seed`."""
        return self.draw(np.random.default_rng([int(seed), *self.id.encode()]))

    def judge(self, cases: Sequence[Observed], *, hidden: bool = True) -> Result:
        """The verdict on `cases`; checks that are not visible only with `hidden`."""
        if any(each.trouble and each.trouble.kind == "blank" for each in cases):
            return self.not_attempted(self.blank)
        shown = [check for check in self.checks if check.visible or hidden]
        results = tuple(self._counted(check, check.judge(cases), cases) for check in shown)
        if any(check.gate and result.verdict == "fail" for check, result in zip(shown, results, strict=True)):
            results = tuple(_uncounted(check, result) for check, result in zip(shown, results, strict=True))
        return Result.of(self.id, self.title, results, self.points - sum(each.max_points for each in results))

    def _counted(self, check: Check, result: CheckResult, cases: Sequence[Observed]) -> CheckResult:
        """The result, unless it praises how little was held by who computed nothing: values come first."""
        if check.kind != "memory" or result.verdict != "pass":
            return result
        looked_at = [each for each in cases if check.applies(each.case)]
        values = [other for other in self.checks if other.kind in ("value", "gradient")]
        if all(other.judge(looked_at).verdict != "fail" for other in values):
            return result
        message = "What is held counts once the values are right."
        return replace(result, points=0, verdict="not counted", message=message)

    def not_attempted(self, message: str) -> Result:
        """The result of an exercise that nobody has begun: `message` says what to do first."""
        checks = tuple(check.result("not looked at") for check in self.checks if check.visible)
        return Result(self.id, self.title, "not attempted", message, checks)


def _guarding(check: Check) -> Check:
    names = {mistake.name for mistake in check.mistakes}
    own = () if CHANGED in names else (Mistake(CHANGED, lambda failing, passing: False),)
    return replace(check, inputs_stay=True, mistakes=(*check.mistakes, *own))


def _safely(look: Callable[[Observed], Finding | None], observed: Observed) -> Finding | None:
    """What `look` finds. Data of an unexpected form is a finding, and never the judge's crash."""
    try:
        return look(observed)
    except FormError as error:
        return Finding(error.seen, error.expected, observed.words)
    except Exception as error:
        seen = f"a result of another form ({type(error).__name__}: {str(error)[:200]})"
        return Finding(seen, "the form that the task asks for", observed.words)


def _changed(observed: Observed) -> Finding | None:
    """What a call changed of what it was given, by the names of its arguments; None where a harness does not look."""
    for rank, said in enumerate(observed.said):
        if names := said.get("changed"):
            told = ", ".join(f"`{str(name)[:40]}`" for name in names[:4])
            where = f"on rank {rank}; {observed.words}" if len(observed.said) > 1 else observed.words
            return Finding(f"{told} changed by the call", "what a function is given stays as it was", where, CHANGED)
    return None


def _is_unknown(observed: Observed) -> bool:
    return observed.trouble is not None and observed.trouble.kind == "not known"


def _fits(mistake: Mistake, failing: Sequence[Observed], passing: Sequence[Observed]) -> bool:
    try:
        return bool(mistake.fits(failing, passing))
    except Exception:  # data of an unexpected form: then it is not this mistake
        return False


def _uncounted(check: Check, result: CheckResult) -> CheckResult:
    """The result beside a gate that failed: no points, and nothing said that would distract from the gate."""
    if check.gate:
        return replace(result, points=0)
    return replace(result, points=0, verdict="not counted", mistake="", message="")
