"""The learning rate at another batch. Rules, each with the regime in which it follows from something."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from dtlib.theory.formula import formula
from dtlib.theory.valid import amount

from .given import counted


def _times(batch: ArrayLike, new_batch: ArrayLike) -> Any:
    return amount("new_batch", new_batch, positive=True) / amount("batch", batch, positive=True)


@formula(
    "batch.linear_rate",
    source="goyal2017",
    label="eq-batch-linear-rate",
    equation=r"\eta\, \frac{B'}{B}",
)
def linear_rate(rate: ArrayLike, batch: ArrayLike, new_batch: ArrayLike) -> Any:
    """Linear scaling of the learning rate, for descent with or without momentum.

    Over the same examples, E/B steps, it keeps the way that they go, Eη/B · G, and the variance that they gather,
    Eη²/B² · σ². Where B' is well below the noise scale (`sgd_rate` says how far), η'λ well below 2 in each direction.
    """
    return amount("rate", rate) * _times(batch, new_batch)


@formula(
    "batch.sqrt_rate",
    source="malladi2022",
    label="eq-batch-sqrt-rate",
    equation=r"\eta\, \sqrt{\frac{B'}{B}}",
)
def sqrt_rate(rate: ArrayLike, batch: ArrayLike, new_batch: ArrayLike) -> Any:
    """Square-root scaling of the learning rate, for Adam and others that divide by the size of the gradient.

    Far below the noise scale what they divide by is noise, √(σ²/B): a step's mean is ηG√B/σ, its variance η². Over the
    same examples, E/B steps, this keeps both the way and the variance. For plain descent it keeps the variance of
    one step alone. The same rule as `best_rate` has below 1/L, for another reason: there T is given, not E.
    """
    return amount("rate", rate) * np.sqrt(_times(batch, new_batch))


@formula(
    "batch.sgd_rate",
    source="mccandlish2018",
    label="eq-batch-sgd-rate",
    equation=r"\eta\, \frac{1 + \mathcal{B}/B}{1 + \mathcal{B}/B'}",
    use="Linear scaling below the noise scale; above it the best rate hardly grows.",
)
def sgd_rate(rate: ArrayLike, batch: ArrayLike, new_batch: ArrayLike, noise_scale: ArrayLike) -> Any:
    """The best learning rate of plain descent at another batch, from the best at this one.

    For the greatest gain of a step on a quadratic it is η_max/(1 + 𝓑/B), as `improvement` derives: linear where both
    batches are far below 𝓑, constant far above. Source: McCandlish et al. 2018, section 2.
    """
    now, then = amount("batch", batch, positive=True), amount("new_batch", new_batch, positive=True)
    scale = amount("noise_scale", noise_scale)
    return amount("rate", rate) * (1 + scale / now) / (1 + scale / then)


@formula(
    "batch.adam_rate",
    source="derived here",
    label="eq-batch-adam-rate",
    equation=r"\eta\, \sqrt{\frac{1 + \mathcal{B}/B}{1 + \mathcal{B}/B'}}",
    use="Square-root scaling below the noise scale; above it the best rate hardly grows.",
)
def adam_rate(rate: ArrayLike, batch: ArrayLike, new_batch: ArrayLike, noise_scale: ArrayLike) -> Any:
    """The best learning rate of Adam at another batch, from the best at this one.

    For steps g/√v with v = E g² = G² + σ²/B, a long average (β₁ = 0, β₂ near 1, slow changes): in each direction
    E u = G/√v and E u² = 1, so the gain of a step, ηΣG_i E u_i − ½η²ΣH_ii, is greatest at an η ∝ 1/√(1 + 𝓑/B).
    H diagonal, 𝓑 the same in each direction. The sign of the gradient (β₂ = 0 too) has erf(√(B/2𝓑)) instead, also √B
    below 𝓑 and flat above; from far below to above it grows by up to a third more.
    """
    return np.sqrt(sgd_rate(1.0, batch, new_batch, noise_scale)) * amount("rate", rate)


def warmup(step: ArrayLike, steps: int, rate: float, start: float = 0.0) -> Any:
    """The learning rate at a step, counted from 0, of a linear warm-up over `steps` steps.

    `start` at step 0, `rate` from step `steps` on. With a start of 0 the first step moves nothing. Its reason: at first
    gradients are large and curvature is high, so the scaled rate may lie above 2/λ; `start` is a rate known to be safe.
    """
    low, high = amount("start", start), amount("rate", rate)
    share = np.minimum(counted("step", step, 0) / np.maximum(counted("steps", steps, 0), 1), 1.0)
    return low + (high - low) * np.where(np.asarray(steps) == 0, 1.0, share)[()]
