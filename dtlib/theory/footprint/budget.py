"""What fits, and the largest micro-batch that does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dtlib.theory.models import Architecture
from dtlib.theory.valid import amount

from .rank import rank_memory
from .setup import Setup

_NO_END = 2**40


def fits(model: Architecture | str, setup: Setup, memory_bytes: float) -> bool:
    """Whether the fullest rank needs at most `memory_bytes`; ``ValueError`` as `rank_memory`."""
    memory_bytes = amount("memory_bytes", memory_bytes)
    return rank_memory(model, setup).total <= memory_bytes


def largest_micro_batch(model: Architecture | str, setup: Setup, memory_bytes: float) -> int:
    """The most sequences of a micro-batch that fit on a device of `memory_bytes`; 0 if not even one does.

    The micro-batch of `setup` itself does not matter. ``ValueError`` as `rank_memory`.
    """
    return largest_that(lambda b: fits(model, replace(setup, micro_batch=b), memory_bytes))


def largest_that(works: Callable[[int], bool]) -> int:
    """The largest number from 1 for which `works`, which holds up to some number and not beyond; 0 if for none."""
    high = 1
    while high < _NO_END and works(high):
        high *= 2
    low = high // 2  # works, or is 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if works(middle) else (low, middle)
    return low
