"""What fits: the largest micro-batch, the deepest model, the published models."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from dtlib.theory.models import MODELS, Architecture, checked_model
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
    return _largest(lambda b: fits(model, replace(setup, micro_batch=b), memory_bytes))


def most_layers(model: Architecture | str, setup: Setup, memory_bytes: float) -> int:
    """The most layers of the width of `model` that fit on devices of `memory_bytes`; 0 if not even one a stage does.

    The largest model that fits, when it grows in depth alone. With several stages or interleaved chunks the layers are
    a multiple of their number. ``ValueError`` as `rank_memory`.
    """
    unit, model = setup.pp * setup.chunks, checked_model(model)
    return unit * _largest(lambda each: fits(replace(model, num_layers=each * unit), setup, memory_bytes))


def fitting_models(
    setup: Setup, memory_bytes: float, models: Iterable[Architecture] = tuple(MODELS.values())
) -> list[Architecture]:
    """Those of `models` (default: all published ones) that fit, in their order; models that cannot be cut as `setup`
    says are left out."""
    memory_bytes = amount("memory_bytes", memory_bytes)
    found = []
    for model in models:
        try:
            setup.check(model)
        except ValueError:
            continue
        if fits(model, setup, memory_bytes):
            found.append(model)
    return found


def _largest(works: Callable[[int], bool]) -> int:
    """The largest number from 1 for which `works`, which holds up to some number and not beyond; 0 if for none."""
    high = 1
    while high < _NO_END and works(high):
        high *= 2
    low = high // 2  # works, or is 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if works(middle) else (low, middle)
    return low
