"""Gradient descent with old gradients, along one direction of a quadratic: w ← w − a w(τ updates ago), a = ηλ."""

from __future__ import annotations

import math

from dtlib.theory.formula import formula
from dtlib.theory.valid import number, whole


@formula(
    "asynchrony.stable_rate",
    source="derived here",
    label="thm-asynchrony-stable",
    equation=r"\frac2\lambda \sin\frac{\pi}{4\tau + 2}",
    use="Above this rate old gradients make the steepest direction grow.",
)
def stable_rate(curvature: float, delay: int) -> float:
    """The learning rate below which w → 0 from every start, with a constant `delay` of τ updates.

    Where the first root of z^{τ+1} − z^τ + a = 0 leaves the unit circle. 2/λ without delay, 1/λ with one update, nearly
    π/((2τ + 1) λ) with many; λ is the largest curvature. For a momentum of 0.
    """
    return 2 * math.sin(math.pi / (4 * whole("delay", delay, 0) + 2)) / number("curvature", curvature, positive=True)


@formula(
    "asynchrony.fastest_rate",
    source="derived here",
    label="eq-asynchrony-fastest",
    equation=r"\frac{1}{\lambda}\, \frac{\tau^\tau}{(\tau+1)^{\tau+1}}",
)
def fastest_rate(curvature: float, delay: int) -> float:
    """The learning rate at which w shrinks fastest with a constant `delay`: by τ/(τ+1) an update, in the long run.

    There two roots of z^{τ+1} − z^τ + a = 0 meet. 1/λ without delay; with many updates 1/(e (τ + ½) λ), nearly.
    """
    tau = whole("delay", delay, 0)
    share = math.exp(-tau * math.log1p(1 / tau)) if tau else 1.0  # τ^τ/(τ+1)^τ, which does not overflow
    return share / (tau + 1) / number("curvature", curvature, positive=True)


@formula(
    "asynchrony.implicit_momentum",
    source="mitliagkas2016",
    label="eq-asynchrony-momentum",
    equation=r"1 - \frac1N",
)
def implicit_momentum(n: int) -> float:
    """The momentum that the mean of the weights has where ages are geometric with mean N − 1, drawn anew each update.

    E Δ_{t+1} = (1 − 1/N) E Δ_t − η/N · λ E w_t: momentum 1 − 1/N at an N-th of the rate.
    """
    return 1 - 1 / whole("n", n, 1)
