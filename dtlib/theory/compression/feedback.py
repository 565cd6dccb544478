"""Error feedback: what was not sent is added to the next gradient. In units of a gradient, one rank or their mean."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from dtlib.theory.formula import formula
from dtlib.theory.valid import number

from .vectors import Array, finite


def _contraction(delta: Any) -> float:
    share = number("delta", delta, positive=True)
    if share > 1:
        raise ValueError(f"delta must be above 0 and at most 1, not {delta!r}")
    return share


def feedback(gradients: Any, compress: Callable[[Array], Array]) -> tuple[Array, Array]:
    """What T steps send, and what each leaves behind: two arrays of the shape (T, n) of `gradients`.

    sent_t = C(g_t + e_t), e_{t+1} = g_t + e_t − sent_t, from e_0 = 0. Whatever C is, Σ sent = Σ g − e_T: the sum of
    what was sent follows the sum of what was meant, up to the last row of the second array.
    """
    gradients_tn = finite("gradients", gradients, 2)
    sent_tn, left_tn = np.zeros_like(gradients_tn), np.zeros_like(gradients_tn)
    left = np.zeros(gradients_tn.shape[1])
    for t, gradient in enumerate(gradients_tn):
        meant = gradient + left
        sent = np.asarray(compress(meant.copy()))
        if sent.shape != meant.shape:
            raise ValueError(f"compress must return the shape it was given, {meant.shape}, not {sent.shape}")
        sent_tn[t] = sent
        left_tn[t] = left = meant - sent_tn[t]
    return sent_tn, left_tn


@formula(
    "compression.feedback_error_bound",
    source="derived here",
    label="thm-compression-feedback",
    equation=r"\frac{\sqrt{1 - \delta}}{1 - \sqrt{1 - \delta}}\, G",
)
def feedback_error_bound(delta: float, gradient_norm: float) -> float:
    """Error feedback, what the norm of the residual stays below, however many steps.

    For a compressor that contracts every vector by `delta` δ and gradients of a norm of at most `gradient_norm` G:
    ‖e_{t+1}‖ ≤ √(1 − δ) (‖e_t‖ + G). Where δ holds in the mean over the compressor's dice, so does the bound for
    √E‖e‖². Approached by C(x) = (1 − √(1 − δ)) x and a constant gradient. The mean of N ranks' residuals obeys it too.
    """
    lost = math.sqrt(1 - _contraction(delta))
    # 1 − √(1 − δ) = δ/(1 + √(1 − δ)), which keeps its digits where δ is small
    return lost * (1 + lost) / delta * number("gradient_norm", gradient_norm)


@formula(
    "compression.feedback_rate",
    source="derived here",
    label="thm-compression-quadratic",
    equation=r"\min\left(\frac{1}{L}, \frac{\mu\,(1 - q)}{q L (L + \mu)}\right), \quad q = \sqrt{1 - \delta}",
    use="Below this learning rate gradient descent with error feedback converges on a quadratic.",
)
def feedback_rate(smoothness: float, convexity: float, delta: float) -> float:
    """Error feedback on a quadratic, the learning rate below which it converges to the optimum.

    For any compressor that contracts every vector by `delta` δ; eigenvalues from μ (`convexity`) to L (`smoothness`),
    exact gradients of the whole objective. Sufficient, not necessary. ``ValueError`` for μ above L.
    """
    most, least = number("smoothness", smoothness, positive=True), number("convexity", convexity, positive=True)
    if least > most:
        raise ValueError(f"convexity must be at most smoothness, {most}, not {least}")
    lost = math.sqrt(1 - _contraction(delta))
    if not lost:
        return 1 / most
    return min(1 / most, least * delta / (1 + lost) / (lost * most * (most + least)))
