"""What rounding hides in each element, and many elements together show: in bfloat16 a gradient is off by a few percent
of itself, and a factor of 1.1 in none of its elements beyond doubt, but in all of them together.

An explanation is a direction: from what is right to what it predicts. How far along it a result lies is one number,
0 where it is right and 1 where the explanation is true, and perturbed runs of the reference say how far rounding moves
this number: a matched filter, with the noise measured. What rounding does to 10,000 elements it does in directions of
its own, so the number stands still where none of the elements does.
"""

from __future__ import annotations

from itertools import chain

import numpy as np

from .case import Case, Kind, Predict
from .expected import COARSE
from .linear import multiples, weighted
from .norms import of_norms
from .placed import of_steps
from .terms import of_logarithms, too_late

_MOST = 1 << 14
"""Elements that are looked at, evenly spaced: more of them would say the same."""


def hidden(case: Case) -> list[Kind]:
    """The explanations on whose side a result lies beyond rounding, and as well as the best of them; in their order."""
    if case.expected.eps < COARSE or not case.right.any():
        return []
    sums = (multiples(case), of_logarithms(case), of_steps(case), weighted(case), too_late(case))
    for explanations in (of_norms(case), chain.from_iterable(sums)):
        told = [each for each in explanations if is_told(case, lambda rank: case.right, each[1])]
        fits = [(misfit, *each) for each in told if (misfit := case.misfit(each[1])) <= case.near]
        if fits:
            _, _, best = min(fits, key=lambda each: each[0])
            return [kind for _, kind, predict in fits if predict is best or not is_told(case, predict, best)]
    return []


def seems_hidden(case: Case) -> bool:
    """Whether all elements together are further off than in perturbed runs, which are off by more than rounding is."""
    off = np.zeros(case.right.size)
    for h in case.held:
        off[h.index] = np.maximum(off[h.index], np.abs(h.values - case.right[h.index]))
    return bool(off @ off > (case.expected.perturbed[case.name] ** 2).sum(1).max())


def is_told(case: Case, first: Predict, second: Predict) -> bool:
    """Whether what is held is nearer to the second of two predictions, by more than rounding can move it."""
    noise = case.expected.perturbed[case.name]
    moved = np.zeros(len(noise))
    length = along = size = 0.0
    for h in case.held:
        every = slice(None, None, 1 + h.index.size * len(case.held) // _MOST)
        index, values = h.index[every], h.values[every]
        start, end = first(h.rank)[index], second(h.rank)[index]
        way = end - start
        length, along = length + float(way @ way), along + float(way @ (values - start))
        size += max(float(start @ start), float(end @ end))
        moved += noise[:, index] @ way
    if length <= 1e-12 * size:
        return False
    due = sum(float(np.sum(case.right[h.index] ** 2)) for h in case.held)
    spread = np.sqrt(np.mean(moved**2)) * max(1.0, np.sqrt(size / due) if due else 1.0)
    # Half of the way must be so many spreads that Student's t is beyond them once in 10⁷ (Wallace's approximation).
    times = np.sqrt(len(noise) * np.expm1(31 / len(noise)))
    # A rounding that all elements share, of a mean's divisor for one, is at most half of the dtype's spacing: six.
    shared = 3 * case.expected.eps * np.sqrt(size * length)
    return bool(max(times * spread, shared) < 0.5 * length < along < 1.5 * length)
