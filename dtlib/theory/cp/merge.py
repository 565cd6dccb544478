"""Softmax in pieces: what a block of keys gives, and how the results of two blocks become one."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Partial = tuple[NDArray[np.float64], NDArray[np.float64]]
"""What some keys give each of n queries: the weighted values (n, d), and the logarithm (n,) of what divided them."""


def partial(scores: ArrayLike, values: ArrayLike) -> Partial:
    """Softmax over some keys alone: `scores` (n, k) of n queries with k keys, −∞ where masked, and `values` (k, d).

    L = log Σ exp(x), o = Σ exp(x − L) v. Where everything is masked L is −∞ and o is 0. ``ValueError`` for shapes that
    do not fit.
    """
    x, v = np.asarray(scores, dtype=float), np.asarray(values, dtype=float)
    if x.ndim != 2 or v.ndim != 2 or x.shape[1] != len(v):
        raise ValueError(f"scores and values must be of shapes (n, k) and (k, d), not {x.shape} and {v.shape}")
    largest = x.max(axis=1, initial=-np.inf)
    finite = np.where(np.isneginf(largest), 0.0, largest)
    weights = np.exp(x - finite[:, None])
    total = weights.sum(axis=1)
    with np.errstate(divide="ignore"):
        return (weights @ v) / np.where(total, total, 1)[:, None], finite + np.log(total)


def merge(first: Partial, second: Partial) -> Partial:
    """The softmax over the keys of both: L = log(exp L₁ + exp L₂), o = exp(L₁ − L) o₁ + exp(L₂ − L) o₂.

    The larger L is taken out first, so no exponent is above 0 and nothing overflows; −∞ has weight 0.
    """
    total = np.logaddexp(first[1], second[1])
    finite = np.where(np.isneginf(total), 0.0, total)
    merged = sum(np.exp(each[1] - finite)[:, None] * each[0] for each in (first, second))
    return np.asarray(merged), total
