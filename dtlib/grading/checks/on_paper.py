"""What the exercises on paper have in common: a function of numbers is called, and one part of its answer is judged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dtlib.grading.compare import answer, compare, gives, show, some_rank
from dtlib.grading.exercise import Case, Check, Finding, FormError, Mistake, Run, describe_case

Part = str | int | None


def part_of(run: Run, part: Part, names: str) -> Any:
    """The part of the learner's answer that a check judges: an item of a pair, or all of it where `part` is None."""
    value = answer(run)
    if part is None:
        return value
    if isinstance(value, np.ndarray) and value.ndim:  # a pair may come as an array
        value = value.tolist() if value.ndim == 1 else list(value)
    if isinstance(part, int) and (not isinstance(value, list) or len(value) != len(names.split(","))):
        raise FormError(show(value), f"a tuple ({names})")
    return value[part]


def inspect_part(
    expected: Callable[[Case], Any], part: Part = None, names: str = "", rtol: float = 1e-6
) -> Callable[[Run], Finding | None]:
    """A check that a part of the answer is what ``expected(case)`` says."""

    def inspect(run: Run) -> Finding | None:
        return compare(part_of(run, part, names), expected(run.case), describe_case(run.case), rtol)

    return inspect


def gives_part(wrong: Callable[[Case], Any], part: Part = None, names: str = "") -> Any:
    """Recognise a mistake by the part of the answer that it would give, in runs that passed as well."""
    return gives(lambda run: part_of(run, part, names), wrong, always=True)


def factor_off(expected: Callable[[Case], float], factor: float, part: Part = None, names: str = "") -> Any:
    """Recognise an answer that is `factor` times what it should be."""
    return gives_part(lambda case: factor * expected(case), part, names)


def mistake(name: str, fits: Any, *feedback: str) -> Mistake:
    """A `Mistake`, its feedback in pieces."""
    return Mistake(name, fits, " ".join(feedback))


_LIBRARY_CALLED = mistake(
    "library called",
    some_rank(lambda data, case: bool(data["library"])),
    "The course's own code answers the question for you. Write it yourself; compare with the library afterwards.",
)
_OUT_OF_SIGHT = mistake(
    "out of sight",
    some_rank(lambda data, case: bool(data.get("escaped"))),
    "Nobody sees what is called there, so nobody can tell that it is your own work. No exercise needs a process or a "
    "profiler of its own: do it outside of the answer.",
)
NOT_YOUR_OWN = (_LIBRARY_CALLED, _OUT_OF_SIGHT)


def called_library(data: Any, wanted: str, where: str = "") -> Finding | None:
    """That a process called nothing of the library, and nothing out of sight; else what it called."""
    if data["library"]:
        return Finding(f"a call of dtlib.{data['library'][0]}{where}", wanted)
    if data.get("escaped"):
        return Finding(f"{data['escaped'][0]} used{where}", "calls that can be seen")
    return None


def own_formula(function: str) -> Check:
    """The check that the function computes its answer itself: worth nothing, and nothing else counts until it holds."""

    def inspect(run: Run) -> Finding | None:
        return called_library(run.ranks[0], "your own formula")

    return Check(
        name="own formula",
        kind="value",
        points=0,
        description=f"`{function}` computes its answer itself",
        inspect=inspect,
        gate=True,
        mistakes=NOT_YOUR_OWN,
    )
