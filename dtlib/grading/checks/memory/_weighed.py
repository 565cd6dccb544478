"""What a training holds, in bytes a parameter."""

from __future__ import annotations

from collections.abc import Callable

from dtlib.grading import oracle
from dtlib.grading.kinds import Sign, every
from dtlib.grading.seen import Case, Observed, Seen

ROOM = 6 * 2**20  # what libraries keep, and an imprecise scale


def per(number: float, room: float = 0.0) -> Callable[[Case, int], float]:
    """So many bytes a parameter."""
    return lambda case, rank: number * sum(oracle.sizes(case)) + room


def at_rest(seen: Seen, rank: int) -> float:
    """What was held between steps."""
    return seen.held(rank, "between steps")


def is_held(holds: Callable[[float, float], bool]) -> Sign:
    """``holds(between steps, at most)``, in bytes a parameter."""

    def does(each: Observed) -> bool:
        count = sum(oracle.sizes(each.case))
        return holds(at_rest(each.seen, 0) / count, each.seen.peak(0) / count)

    return every(does)


def of_weighed(sign: Sign) -> Sign:
    """The sign, looked for in the case that is weighed, whatever the check said to it."""
    return Sign(lambda failing, passing: sign.fits([one for one in (*failing, *passing) if one.case["weighed"]], ()))


#: Somebody still has gradients after a step.
GRADIENTS_KEPT = every(lambda each: bool(each.said[0]["gradient_bytes"] > sum(oracle.sizes(each.case))))
