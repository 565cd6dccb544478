"""Fewer elements: the k largest, or k by lot."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dtlib.theory.formula import formula
from dtlib.theory.valid import ranks, whole

from .vectors import Array, finite


def _kept(elements: Any, k: Any, least: int = 0) -> tuple[int, int]:
    n, kept = whole("elements", elements, 1), whole("k", k, least)
    if kept > n:
        raise ValueError(f"k must be at most the {n} elements there are, not {kept}")
    return n, kept


def top_k(x: Any, k: int) -> Array:
    """`x` with its k largest magnitudes, and zeros elsewhere; among equal ones the first stay."""
    x = finite("x", x)
    k = _kept(x.size, k)[1] if x.size or k else 0
    sent = np.zeros_like(x)
    stay = np.argsort(-np.abs(x), kind="stable")[:k]
    sent[stay] = x[stay]
    return sent


@formula(
    "compression.top_k_contraction",
    source="stich2018",
    label="thm-compression-top-k",
    equation=r"\delta = \frac{k}{n}",
)
def top_k_contraction(elements: int, k: int) -> float:
    """The k largest of n elements, the contraction that any vector has at least.

    The squares that are left out are the smallest, so their mean is at most the mean of all. Met by equal magnitudes; a
    vector with few large elements loses less. Source: Stich et al. 2018, arXiv 1809.07599, Lemma A.1.
    """
    n, k = _kept(elements, k)
    return k / n


@formula(
    "compression.random_k_error", source="stich2018", label="thm-compression-random-k", equation=r"1 - \frac{k}{n}"
)
def random_k_error(elements: int, k: int) -> float:
    """k of n elements by lot, the expected error: E‖x − C(x)‖² over ‖x‖², of any vector but zero, exactly.

    Each element stays with chance k/n, unscaled.
    """
    n, k = _kept(elements, k)
    return 1 - k / n


@formula(
    "compression.random_k_variance",
    source="derived here",
    label="thm-compression-random-k",
    equation=r"\frac{n}{k} - 1",
)
def random_k_variance(elements: int, k: int) -> float:
    """k of n elements by lot, times n/k: the variance E‖C(x) − x‖² over ‖x‖², of any vector but zero, exactly.

    Unbiased, and above 1 where fewer than half are kept: further from x than sending nothing.
    """
    n, k = _kept(elements, k, 1)
    return n / k - 1


@formula(
    "compression.sparse_bytes",
    source="derived here",
    label="eq-compression-payloads",
    equation=r"k\,(w + w_\text{index})",
)
def sparse_bytes(elements_kept: int, value_bytes: int = 4, index_bytes: int = 4) -> int:
    """k elements that may lie anywhere, bytes: a value and an index for each.

    `index_bytes` is 0 where all ranks keep the same places, from a common seed.
    """
    value, index = whole("value_bytes", value_bytes, 1), whole("index_bytes", index_bytes, 0)
    return whole("elements_kept", elements_kept, 0) * (value + index)


@formula(
    "compression.expected_support",
    source="derived here",
    label="thm-compression-rides",
    equation=r"n\left(1 - \left(1 - \frac{k}{n}\right)^N\right)",
)
def expected_support(elements: int, k: int, n: int) -> float:
    """k of the elements on each of N ranks, independent lots: elements that their sum has, in the mean.

    An element is missing from the sum where all N left it out. At most min(n, kN), whatever the lots; k where all ranks
    keep the same.
    """
    size, k = _kept(elements, k)
    return float(size) if k == size else -size * math.expm1(ranks(n) * math.log1p(-k / size))
