"""Who holds the others up, and why: from the seconds that each rank spends on input, compute, waiting and its link."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtlib.theory.valid import amount

Seconds = NDArray[np.float64]


@dataclass(frozen=True)
class Straggler:
    """The rank that holds the others up, why, and by how much: ``rank`` and ``cause`` are None where nobody does.

    `cause` is ``"card"``, ``"input"`` or ``"link"``; `lost_seconds` is what a step would be shorter by if the rank were
    like the others in this one thing, and no other thing took its place.
    """

    rank: int | None = None
    cause: str | None = None
    lost_seconds: float = 0.0


def straggler(
    compute_seconds: Any,
    waiting_seconds: Any,
    transfer_seconds: Any,
    input_seconds: Any,
    *,
    least_share: float = 0.1,
) -> Straggler:
    """The straggler of N ranks, from arrays of one row a step and one column a rank.

    Of a rank's step `input_seconds` is what it stands still for until its batch is there, `compute_seconds` its own
    work, `waiting_seconds` from its arrival at a collective until the last rank's, and `transfer_seconds` how long its
    own link then took. In a collective all ranks end together, so its length tells of a slow link but not whose: time
    the messages of each link (zero in all steps where a rank has none: with it no link is compared).

    A rank is compared with the median of the others, step by step, and the median over steps is taken: a hiccup of one
    step moves neither. It counts where it is above `least_share` of a step, in four steps of five as well: on a machine
    that is busy with other things a message takes a moment or a turn of the core, and by chance a rank has more of them
    in half of the steps. And it must be above noise: several standard errors of that median, or in every one of so many
    steps that coins would not fall alike. What is slow in input or compute must be waited for too: a slow rank that
    nobody waits for, as its input is ready early, costs nothing. Of several the one that costs most is named.

    Holds while fewer than half of the others are slow in the same thing, and for what lasts: not where all are slow,
    nor for a part that is slow in less than four fifths of the steps. Of one rank, or none, nobody is slow, and no
    link where there is one alone. ``ValueError`` for arrays of other shapes, fewer than three steps, negative seconds
    or a share outside (0, 1).
    """
    given = {
        "compute_seconds": compute_seconds,
        "waiting_seconds": waiting_seconds,
        "transfer_seconds": transfer_seconds,
        "input_seconds": input_seconds,
    }
    arrays = {name: np.asarray(amount(name, value), dtype=np.float64) for name, value in given.items()}
    shape = arrays["compute_seconds"].shape
    for name, array in arrays.items():
        if array.ndim != 2 or array.shape != shape:
            raise ValueError(f"{name} must have a row a step and a column a rank, as the others, not {array.shape}")
    if shape[0] < 3:
        raise ValueError(f"compute_seconds must have at least 3 steps, not {shape[0]}: a median of two is no median")
    if not 0 < amount("least_share", least_share) < 1:
        raise ValueError(f"least_share must be between 0 and 1, not {least_share}")
    compute, waiting, transfer, loading = arrays.values()
    step_seconds = float(np.median(sum(arrays.values())))
    least, everybody = least_share * step_seconds, np.arange(shape[1])
    linked = np.flatnonzero(transfer.any(axis=0))
    found, causes = [Straggler()], ("card", "input", "link")
    for cause, seconds, ranks in zip(causes, (compute, loading, transfer), (everybody, everybody, linked), strict=True):
        if len(ranks) < 2:
            continue
        beyond = _beyond_others(seconds[:, ranks])
        lost = np.median(beyond, axis=0)
        if cause != "link":  # how much longer the others wait than this rank does
            lost = np.minimum(lost, np.median(-_beyond_others(waiting), axis=0))
        ordered = np.sort(beyond, axis=0)
        lasts = (ordered[shape[0] // 5] > least) & (lost > least)
        always = (ordered[0] > least) & (3 * shape[1] / 2 ** shape[0] < 0.01)  # one of 3N coins: at most 1 %
        sure = lasts & (always | (lost > _noise(beyond)))
        found += [Straggler(int(ranks[at]), cause, float(lost[at])) for at in np.flatnonzero(sure)]
    return max(found, key=lambda each: each.lost_seconds)


def _beyond_others(seconds: Seconds) -> Seconds:
    """By how much each rank is above the median of the others, in each step.

    The median of a sorted row without one entry is found in the row: everything past that entry moves up by one.
    """
    order = np.sort(seconds, axis=1)
    place = np.argsort(np.argsort(seconds, axis=1, kind="stable"), axis=1)
    low, high = (seconds.shape[1] - 2) // 2, (seconds.shape[1] - 1) // 2
    below = np.take_along_axis(order, low + (place <= low), axis=1)
    above = np.take_along_axis(order, high + (place <= high), axis=1)
    return seconds - (below + above) / 2


def _noise(beyond: Seconds) -> Seconds:
    """What the median over steps may come to by chance, for the luckiest of N ranks in three things.

    The standard error of a median is √(π/2) σ/√steps; σ is taken from the median distance from the median, which a few
    wild steps do not move, and is at least that of half of all ranks: whom chance has held up shows less of it. The
    largest of 3N normal numbers is about √(2 ln 3N) of them.
    """
    steps, n = beyond.shape
    sigma = 1.4826 * np.median(abs(beyond - np.median(beyond, axis=0)), axis=0)
    sigma = np.maximum(sigma, np.median(sigma))
    return np.asarray((2 + math.sqrt(2 * math.log(3 * n))) * math.sqrt(math.pi / 2 / steps) * sigma)
