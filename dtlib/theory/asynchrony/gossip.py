"""Averages with neighbours alone: how fast they make all alike."""

from __future__ import annotations

import math

from dtlib.theory.formula import formula
from dtlib.theory.valid import whole


@formula(
    "asynchrony.spectral_gap_ring",
    source="derived here",
    label="eq-asynchrony-gap",
    equation=r"\frac23\left(1 - \cos\frac{2\pi}{N}\right)",
)
def spectral_gap_ring(n: int) -> float:
    """1 less the factor by which a round on a ring of `n` ranks shrinks what they have not in common, at the slowest.

    Each takes a third of itself and of both neighbours. Waves along the ring are the eigenvectors of that,
    ⅓(1 + 2 cos(2πj/N)) the eigenvalues; of j ≠ 0 the first is the largest in size for N ≥ 3. About 13/N².
    ``ValueError`` below 3 ranks.
    """
    return 2 / 3 * (1 - math.cos(2 * math.pi / whole("n", n, 3)))


@formula(
    "asynchrony.exponential_rounds",
    source="ying2021",
    label="eq-asynchrony-exponential-graph",
    equation=r"\log_2 N",
)
def exponential_rounds(n: int) -> int:
    """Rounds after which all `n` ranks have the mean exactly, where each takes half of the one 2^i behind in round i.

    After round i a rank has the mean of the 2^{i+1} behind it, itself among them. ``ValueError`` unless `n` is a power
    of two: else the mean is only approached.
    """
    ranks = whole("n", n, 1)
    if ranks & (ranks - 1):
        raise ValueError(f"n must be a power of two, not {ranks}: else no number of rounds gives the mean exactly")
    return ranks.bit_length() - 1
