"""Rounding to bf16, and what a training holds, in bytes a parameter."""

from collections.abc import Callable
from typing import Any

import numpy as np

from dtlib.grading.exercises import oracle
from dtlib.grading.exercises.kinds import held_at
from dtlib.grading.exercises.seen import Case, Observed
from dtlib.grading.exercises.signs import Sign, every

Array = np.ndarray[Any, Any]


def upper_half(bits: Array) -> Array:
    """The upper half of fp32 `bits` (uint64), rounded to nearest, ties to even; a NaN keeps its own, made quiet."""
    upper, lower = bits >> 16, bits & 0xFFFF
    is_up = (lower > 0x8000) | ((lower == 0x8000) & (upper % 2 == 1))
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, upper | 0x40, upper + is_up)


def rounded(values: Array) -> Array:
    """`values` rounded to bf16, by way of fp32, in double precision."""
    bits = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return (upper_half(bits) << 16).astype(np.uint32).view(np.float32).astype(np.float64)


def per(number: float, room: float = 0.0) -> Callable[[Case, int], float]:
    return lambda case, rank: number * sum(oracle.sizes(case)) + room


def names(case: Case) -> list[str]:
    return [f"weights after step {step + 1}" for step in range(case["steps"])]


at_rest = held_at("between steps")


def is_held(holds: Callable[[float, float], bool]) -> Sign:
    """``holds(between steps, at most)``, in bytes a parameter."""

    def does(each: Observed) -> bool:
        count = sum(oracle.sizes(each.case))
        return holds(at_rest(each.seen, 0) / count, each.seen.peak(0) / count)

    return every(does)


#: Somebody still has gradients after a step.
GRADIENTS_KEPT = every(lambda each: bool(each.said[0]["gradient_bytes"] > sum(oracle.sizes(each.case))))
