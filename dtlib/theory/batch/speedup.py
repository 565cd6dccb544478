"""The linear speed-up of synchronous descent: a bound for smooth losses that need not be convex, and where it ends.

Assumed throughout: |∇f(x) − ∇f(y)| ≤ L|x − y| (`smoothness`); f is nowhere below f(x_0) − `gap`; gradients are
unbiased, with a variance of at most σ²/B (`variance` over `global_batch`) at each x. What is bounded is the mean of
E|∇f|² over the T points (`steps`) at which gradients are taken. Bounds, not predictions: a run may be faster.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from dtlib.theory.formula import formula
from dtlib.theory.valid import amount


@formula(
    "batch.nonconvex_bound",
    source="ghadimi2013",
    label="thm-batch-speedup",
    equation=r"\frac{2\Delta}{\eta T} + \frac{\eta L \sigma^2}{B}",
)
def nonconvex_bound(
    gap: ArrayLike,
    smoothness: ArrayLike,
    variance: ArrayLike,
    global_batch: ArrayLike,
    steps: ArrayLike,
    rate: ArrayLike,
) -> Any:
    """Descent on a smooth loss, what the mean over steps of E|∇f|² stays below.

    Δ (`gap`). Smoothness gives E f(x') ≤ f − η(1 − ηL/2)|∇f|² + ½η²Lσ²/B ≤ f − ½η|∇f|² + ½η²Lσ²/B for η ≤ 1/L, and
    T of these add up to at most Δ. ``ValueError`` for a `rate` η above 1/L. Source: Ghadimi and Lan 2013, arXiv
    1309.5549, Theorem 2.1.
    """
    bend, eta = amount("smoothness", smoothness, positive=True), amount("rate", rate, positive=True)
    if np.any(np.asarray(eta) * np.asarray(bend) > 1 + 1e-12):
        raise ValueError(f"rate must be at most 1/smoothness, not {rate!r} where smoothness is {smoothness!r}")
    noise = amount("variance", variance) / amount("global_batch", global_batch, positive=True)
    return 2 * amount("gap", gap) / (eta * amount("steps", steps, positive=True)) + eta * bend * noise


@formula(
    "batch.best_rate",
    source="derived here",
    label="eq-batch-best-rate",
    equation=r"\min\left(\frac{1}{L}, \sqrt{\frac{2 \Delta B}{L \sigma^2 T}}\right)",
)
def best_rate(
    gap: ArrayLike, smoothness: ArrayLike, variance: ArrayLike, global_batch: ArrayLike, steps: ArrayLike
) -> Any:
    """The learning rate with the lowest bound after so many steps.

    a/η + cη is least at √(a/c): η ∝ √B, until 1/L. The bound is then 2√(2ΔLσ²/(BT)), which with N ranks for one is
    the same after an N-th of the steps. Held at 1/L it is 2ΔL/T + σ²/B.
    """
    bend, noise = amount("smoothness", smoothness, positive=True), amount("variance", variance)
    spent = noise * amount("steps", steps, positive=True)
    earned = 2 * amount("gap", gap, positive=True) * amount("global_batch", global_batch, positive=True)
    with np.errstate(divide="ignore"):
        return np.minimum(1 / bend, np.sqrt(np.divide(earned, bend * spent)))


@formula(
    "batch.linear_until",
    source="derived here",
    label="eq-batch-saturation",
    equation=r"\frac{\sigma^2 T}{2 \Delta L}",
    use="In runs of so many steps a larger batch no longer lets the learning rate grow.",
)
def linear_until(gap: ArrayLike, smoothness: ArrayLike, variance: ArrayLike, steps: ArrayLike) -> Any:
    """The batch up to which the best rate after T steps stays below 1/L, in samples.

    Below it the bound falls as 1/√B, above only its part σ²/B, which is by then at most half.
    """
    spent = amount("variance", variance) * amount("steps", steps, positive=True)
    return spent / (2 * amount("gap", gap, positive=True) * amount("smoothness", smoothness, positive=True))


@formula(
    "batch.linear_batch",
    source="derived here",
    label="eq-batch-linear-batch",
    equation=r"\frac{2 \sigma^2}{\varepsilon}",
    use="Up to this batch the bound needs half the steps for twice the batch.",
)
def linear_batch(variance: ArrayLike, goal: ArrayLike) -> Any:
    """The batch up to which steps to a goal fall as 1/B, in samples.

    `goal` ε is what the mean of E|∇f|² is to reach. `linear_until` at the steps that the goal takes: neither the gap
    nor L is left, and it is twice the noise scale of a gradient of |G|² = ε. There steps are twice their least, 2ΔL/ε.
    """
    return 2 * amount("variance", variance) / amount("goal", goal, positive=True)


@formula(
    "batch.steps_for",
    source="derived here",
    label="eq-batch-steps-for",
    equation=r"\begin{cases} 8 \Delta L \sigma^2 / (B \varepsilon^2) & B \le 2\sigma^2/\varepsilon \\"
    r" 2 \Delta L / (\varepsilon - \sigma^2/B) & \text{above} \end{cases}",
)
def steps_for(
    gap: ArrayLike, smoothness: ArrayLike, variance: ArrayLike, global_batch: ArrayLike, goal: ArrayLike
) -> Any:
    """Steps until the bound at its best rate is at most a goal, a real number: round up.

    ε (`goal`). Below `linear_batch` from 2√(2ΔLσ²/(BT)) = ε, above from 2ΔL/T + σ²/B = ε; both give 4ΔL/ε there.
    However large the batch, not below 2ΔL/ε.
    """
    work = 2 * amount("gap", gap, positive=True) * amount("smoothness", smoothness, positive=True)
    aim, samples = amount("goal", goal, positive=True), amount("global_batch", global_batch, positive=True)
    noise = amount("variance", variance) / samples
    few = np.asarray(noise) * 2 >= aim
    return np.where(few, 4 * work * noise / aim**2, work / np.where(few, aim / 2, aim - noise))[()]
