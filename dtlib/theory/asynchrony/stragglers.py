"""How long N workers take that wait for each other, and how many gradients come when they do not."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dtlib.theory.formula import formula
from dtlib.theory.valid import number, row, whole


@formula(
    "asynchrony.expected_slowest",
    source="derived here",
    label="thm-asynchrony-exponential",
    equation=r"\mu \sum_{i=1}^{N} \frac1i",
)
def expected_slowest(mean: float, n: int) -> float:
    """Mean time of the slowest of `n` workers with independent exponential times, in the unit of `mean`.

    An exponential time has no memory: while i workers run, the next one ends after μ/i. For many
    about μ (ln N + 0.577).
    """
    return expected_kth(mean, n, n)


@formula(
    "asynchrony.expected_kth",
    source="derived here",
    label="eq-asynchrony-backup",
    equation=r"\mu \sum_{i=N-k+1}^{N} \frac1i",
)
def expected_kth(mean: float, n: int, kth: int) -> float:
    """Mean time until `kth` of `n` workers with independent exponential times are done.

    With b backup workers a step takes the N-th of N + b: ``expected_kth(mean, N + b, N)``. ``ValueError`` for a `kth`
    above `n`.
    """
    workers, k = whole("n", n, 1), whole("kth", kth, 1)
    if k > workers:
        raise ValueError(f"kth must be at most n={workers}, not {k}")
    return number("mean", mean) * float((1 / np.arange(workers - k + 1, workers + 1)).sum())


@formula(
    "asynchrony.expected_slowest_normal",
    source="derived here",
    label="eq-asynchrony-normal",
    equation=r"\mu + \sigma \int x\, N \varphi(x)\, \Phi(x)^{N-1}\, \mathrm{d}x",
)
def expected_slowest_normal(mean: float, deviation: float, n: int) -> float:
    """Mean time of the slowest of `n` workers with independent normal times; at most μ + σ √(2 ln N).

    N φ Φ^{N−1} is the density of the largest. Simpson's rule on [−40, 40] deviations, to some 1e-9 of σ
    up to 10⁸ workers.
    """
    workers = whole("n", n, 1)
    x = np.linspace(-40, 40, 40_001)
    below = np.array([math.erfc(-each / math.sqrt(2)) / 2 for each in x])
    density = workers * np.exp(-x * x / 2) / math.sqrt(2 * math.pi) * below ** (workers - 1)
    weights = np.where(np.arange(x.size) % 2, 4.0, 2.0)
    weights[[0, -1]] = 1
    return number("mean", mean) + number("deviation", deviation) * float(
        (weights * x * density).sum() * 80 / 40_000 / 3
    )


@formula(
    "asynchrony.expected_slowest_of",
    source="derived here",
    label="eq-asynchrony-empirical",
    equation=r"\sum_{i=1}^m x_i \left[\left(\tfrac im\right)^N - \left(\tfrac{i-1}m\right)^N\right]",
)
def expected_slowest_of(samples: Any, n: int) -> float:
    """Mean time of the slowest of `n` workers that each draw one of the measured times `samples`, with replacement.

    x_1 ≤ … ≤ x_m: all draw at most x_i with the chance (i/m)^N. Times of one worker after another must be independent,
    and those of different workers too: what slows all at once is not seen as waiting.
    """
    workers, times = whole("n", n, 1), np.sort(row("samples", samples))
    chances = (np.arange(times.size + 1) / times.size) ** workers
    return float((times * np.diff(chances)).sum())


@formula(
    "asynchrony.sync_rate",
    source="derived here",
    label="eq-asynchrony-rates",
    equation=r"\frac{N}{\max_r t_r}",
)
def sync_rate(times: Any) -> float:
    """Gradients a second of workers that wait for each other and take constant `times` in seconds."""
    each = row("times", times, positive=True)
    return float(each.size / each.max())


@formula(
    "asynchrony.async_rate",
    source="derived here",
    label="eq-asynchrony-rates",
    equation=r"\sum_r \frac{1}{t_r}",
)
def async_rate(times: Any) -> float:
    """Gradients a second of workers that do not wait, and take `times` in seconds in the mean."""
    return float((1 / row("times", times, positive=True)).sum())
