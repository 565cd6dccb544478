"""Ranks that take H steps alone between two averages of their weights: what they send, and where they end."""

from __future__ import annotations

from typing import Any

import numpy as np

from dtlib.theory.formula import formula
from dtlib.theory.valid import amount, number, row, whole


@formula(
    "asynchrony.local_bytes",
    source="derived here",
    label="eq-asynchrony-local-bytes",
    equation=r"2\,\frac{N-1}N\, D \left\lfloor \frac KH \right\rfloor",
)
def local_bytes(full_bytes: float, n: int, steps: int, local_steps: int = 1) -> Any:
    """Bytes that each of `n` ranks sends in K `steps`, with an all-reduce of D bytes after every H `local_steps`.

    By a ring, or whatever meets its bound; steps behind the last whole H are not averaged.
    """
    ranks = whole("n", n, 1)
    rounds = whole("steps", steps, 0) // whole("local_steps", local_steps, 1)
    return 2 * (ranks - 1) / ranks * amount("full_bytes", full_bytes) * rounds


@formula(
    "asynchrony.drift_noise",
    source="derived here",
    label="thm-asynchrony-drift",
    equation=r"\frac{N-1}{N}\,\eta^2\sigma^2\,\frac{1 - q^{2k}}{1 - q^2}, \quad q = 1 - \eta\lambda",
)
def drift_noise(rate: float, curvature: float, variance: float, local_steps: int, n: int) -> float:
    """E (x_r − x̄)², how far ranks are from their mean after k `local_steps` from a common start, by noise alone.

    On a quadratic of one curvature and optimum for all, with independent noise of `variance` σ² in each gradient. Along
    several directions the sum of theirs. It grows by (N−1)/N · η²σ² in the first step, and ends at
    (N−1)/N · η²σ²/(1 − q²) where |q| < 1.
    """
    eta, ranks, k = number("rate", rate), whole("n", n, 1), whole("local_steps", local_steps, 0)
    square = (1 - eta * number("curvature", curvature)) ** 2
    steps = float((square ** np.arange(k)).sum())  # the closed form loses its digits near q² = 1
    return (ranks - 1) / ranks * eta**2 * number("variance", variance) * steps


@formula(
    "asynchrony.local_fixed_point",
    source="derived here",
    label="thm-asynchrony-fixed-point",
    equation=r"\frac{\sum_r w_r (1 - q_r^H)\, x_r^*}{\sum_r w_r (1 - q_r^H)}, \quad q_r = 1 - \eta\lambda_r",
)
def local_fixed_point(curvatures: Any, optima: Any, weights: Any, rate: float, local_steps: int) -> float:
    """Where the average of ranks ends that take H `local_steps` alone, each on a quadratic of its own, without noise.

    Rank r has curvature λ_r, optimum x_r* and weight w_r, of any scale. H = 1 gives the optimum of all, Σ w λ x*/Σ w λ,
    large H the mean of the optima. ``ValueError`` unless 0 < ηλ_r < 2 for all.
    """
    steep = row("curvatures", curvatures, positive=True)
    shares = row("weights", weights, positive=True)
    eta = number("rate", rate, positive=True)
    goals = np.asarray(optima, dtype=np.float64)
    if not steep.shape == shares.shape == goals.shape:
        raise ValueError(
            f"curvatures, optima and weights must be of one length, not {steep.size}, {goals.size} and {shares.size}"
        )
    if not np.isfinite(goals).all():
        raise ValueError(f"optima must be finite, not {optima!r}")
    if eta * steep.max() >= 2:
        raise ValueError(f"rate must be below 2 over the largest of curvatures, {2 / steep.max():g}, not {eta}")
    pulls = shares * (1 - (1 - eta * steep) ** whole("local_steps", local_steps, 1))
    return float((pulls * goals).sum() / pulls.sum())
