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


def own_formula(function: str) -> Check:
    """The check that the function computes its answer itself: worth nothing, and nothing else counts until it holds."""

    def inspect(run: Run) -> Finding | None:
        data = run.ranks[0]
        if data["library"]:
            return Finding(f"a call of dtlib.{data['library'][0]}", "your own formula")
        if not data["watched"]:
            return Finding("the watch over the calls of your function switched off", "it to be left on")
        return None

    return Check(
        name="own formula",
        kind="value",
        points=0,
        description=f"`{function}` computes its answer itself",
        inspect=inspect,
        gate=True,
        mistakes=(
            mistake(
                "library called",
                some_rank(lambda data, case: bool(data["library"])),
                "The course's own function answers the question for you. Write the formula yourself; compare with the "
                "library afterwards.",
            ),
            mistake(
                "watch switched off",
                some_rank(lambda data, case: not data["watched"]),
                "Your function calls `sys.setprofile`, or starts a profiler, and then nobody sees what else it calls. "
                "Profile it outside of the answer.",
            ),
        ),
    )
