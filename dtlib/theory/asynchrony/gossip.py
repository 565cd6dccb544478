"""Averages with neighbours alone: matrices of weights, a row a rank, and how fast they make all alike."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from dtlib.theory.formula import formula
from dtlib.theory.valid import whole


def ring_matrix(n: int) -> NDArray[np.float64]:
    """What each of `n` ranks of a ring takes of each: a third of itself and of both neighbours (two ranks: ⅔ and ⅓)."""
    ranks = whole("n", n, 1)
    eye = np.eye(ranks)
    if ranks == 2:  # both neighbours are one rank
        return eye * 2 / 3 + eye[::-1] / 3
    return np.asarray((eye + np.roll(eye, 1, axis=0) + np.roll(eye, -1, axis=0)) / 3)


def exponential_matrix(n: int, round_number: int) -> NDArray[np.float64]:
    """What each of `n` ranks takes of each in a round i: half of itself, half of the one 2^(i mod ⌈log₂ N⌉) behind."""
    ranks, i = whole("n", n, 1), whole("round_number", round_number, 0)
    far = 2 ** (i % max(1, (ranks - 1).bit_length()))
    return np.asarray((np.eye(ranks) + np.roll(np.eye(ranks), far, axis=0)) / 2)


@formula(
    "asynchrony.spectral_gap_ring",
    source="derived here",
    label="eq-asynchrony-gap",
    equation=r"\frac23\left(1 - \cos\frac{2\pi}{N}\right)",
)
def spectral_gap_ring(n: int) -> float:
    """1 less the factor by which a round on a ring of `n` ranks shrinks what they have not in common, at the slowest.

    Waves along the ring are the eigenvectors of `ring_matrix`, ⅓(1 + 2 cos(2πj/N)) its eigenvalues; of j ≠ 0 the
    first is the largest in size for N ≥ 3. About 13/N². ``ValueError`` below 3 ranks.
    """
    return 2 / 3 * (1 - math.cos(2 * math.pi / whole("n", n, 3)))


@formula(
    "asynchrony.exponential_rounds",
    source="ying2021",
    label="eq-asynchrony-exponential-graph",
    equation=r"\log_2 N",
)
def exponential_rounds(n: int) -> int:
    """Rounds of `exponential_matrix` after which all `n` ranks have the mean exactly.

    After round i a rank has the mean of the 2^{i+1} behind it, itself among them. ``ValueError`` unless `n` is a power
    of two: else the mean is only approached.
    """
    ranks = whole("n", n, 1)
    if ranks & (ranks - 1):
        raise ValueError(f"n must be a power of two, not {ranks}: else no number of rounds gives the mean exactly")
    return ranks.bit_length() - 1
