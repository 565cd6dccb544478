"""What an uneven router costs: the busiest rank, tokens dropped, slots left empty. Under uniform routing.

Each token draws its k experts from E without replacement, all sets alike, independent of other tokens. A trained router
is less even, so these are what no balancing goes below.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache
from math import comb

import numpy as np
from numpy.typing import NDArray

from dtlib.theory.formula import formula
from dtlib.theory.valid import amount, at_most, whole

from .routing import choices, groups_of

_MOST = 10**7


@lru_cache
def largest_normal(n: int) -> float:
    """m_N, the mean of the largest of N independent standard normal numbers: 0.56 for 2, 1.42 for 8, 2.34 for 64."""
    n = whole("n", n, 1)
    x = np.linspace(0, 12, 4801)
    above = np.array([math.erfc(each / math.sqrt(2)) / 2 for each in x])
    right, left = -np.expm1(n * np.log1p(-above)), above**n  # P(largest > x), P(largest < −x)
    return float(np.trapezoid(right - left, x))


def _moments(e: int, k: int, n: int, copies: str) -> tuple[float, float]:
    """Of one token: the copies that a rank gets in the mean, and their variance less the covariance of two ranks."""
    if copies == "expert":
        return k / n, (k / n) * (e - k) / (e - 1) if e > 1 else 0.0
    if copies == "rank":
        one, two = (comb(e - many * e // n, k) / comb(e, k) if many <= n else 0.0 for many in (1, 2))
        return 1 - one, one - two
    raise ValueError(f"copies must be one of expert, rank, not {copies!r}")


@formula(
    "ep.busiest_rank_tokens",
    source="derived here",
    label="eq-ep-busiest",
    equation=r"t\,k + m_N \sqrt{t\,k\,\frac{E-k}{E-1}}",
)
def busiest_rank_tokens(tokens: int, num_experts: int, top_k: int, ep: int, copies: str = "expert") -> float:
    """Copies that the busiest of N ranks gets, in the mean, of t `tokens` a rank.

    Of a token a rank gets a hypergeometric number of its k choices, with variance v = (k/N)(1 − 1/N)(E − k)/(E − 1),
    less than independent ones would have. The N counts add up to Ntk, so two covary by −v/(N − 1) a token. Sums over
    many tokens are normal, and covary as N independent normal numbers of variance v + v/(N − 1) a token less their
    mean, which is 0 in the mean: the largest is m_N (`largest_normal`) such deviations above the mean. ``"rank"``
    counts a token once however many of its experts lie there: with q_j the chance to miss j ranks, 1 − q₁ for k/N and
    q₁ − q₂ for v + v/(N − 1). N = E is the busiest expert.

    With few tokens it is off by less than one copy on up to 64 ranks. ``ValueError`` where N does not divide E.
    """
    e, k = choices(num_experts, top_k)
    t, n = whole("tokens", tokens, 0), groups_of(e, ep, "ep")
    mean, spread = _moments(e, k, n, copies)
    return t * n * mean + largest_normal(n) * math.sqrt(max(0.0, t * n * spread))


@formula(
    "ep.capacity",
    source="fedus2022",
    label="thm-ep-dropped",
    equation=r"\min\Bigl(T, \Bigl\lceil c\,\frac{T k}{E} \Bigr\rceil\Bigr)",
)
def capacity(tokens: int, top_k: int, num_experts: int, capacity_factor: float) -> int:
    """Slots that an expert has for T `tokens`: c times its even share, rounded up, and never more than T.

    The factor is read as the decimal that it is printed as, so that 1.1 of 10 is 11. ``ValueError`` for a factor that
    is not positive.
    """
    e, k = choices(num_experts, top_k)
    t, c = whole("tokens", tokens, 0), float(amount("capacity_factor", capacity_factor, positive=True))
    return min(t, math.ceil(Fraction(repr(c)) * t * k / e))


def _binomial(trials: int, chance: float) -> NDArray[np.float64]:
    """The chances of 0 … `trials` hits: ratios of neighbours multiplied up, and divided by their sum."""
    if chance >= 1:
        return np.eye(1, trials + 1, trials)[0]
    hits = np.arange(at_most("tokens", trials, _MOST))
    logs = np.concatenate([[0.0], np.cumsum(np.log((trials - hits) / (hits + 1) * (chance / (1 - chance))))])
    weights = np.exp(logs - logs.max())
    return np.asarray(weights / weights.sum())


@formula(
    "ep.dropped_share",
    source="derived here",
    label="thm-ep-dropped",
    equation=r"\frac{E}{T k} \sum_{n > C} (n - C) \binom{T}{n} \Bigl(\frac kE\Bigr)^n \Bigl(1 - \frac kE\Bigr)^{T-n}",
)
def dropped_share(tokens: int, top_k: int, num_experts: int, capacity_factor: float) -> float:
    """Share of the choices that find their expert full, in the mean.

    A token chooses k distinct experts, so an expert is chosen by each of T `tokens` or not, with chance k/E: a binomial
    number of them, exactly, and what is above its C slots (`capacity`) is dropped. That the experts' numbers depend on
    each other does not matter for a mean. `tokens` are those among which a capacity is counted. ``ValueError`` as
    `capacity`.
    """
    slots = capacity(tokens, top_k, num_experts, capacity_factor)
    if tokens == 0:
        return 0.0
    chances = _binomial(tokens, top_k / num_experts)[slots + 1 :]
    return float(chances @ np.arange(1, len(chances) + 1)) * num_experts / (tokens * top_k)


@formula(
    "ep.padded_share", source="derived here", label="thm-ep-dropped", equation=r"1 - \frac{T k\,(1 - \delta)}{E\,C}"
)
def padded_share(tokens: int, top_k: int, num_experts: int, capacity_factor: float) -> float:
    """Share of the experts' slots that stay empty, in the mean: computed, and sent, for nothing.

    Of EC slots Tk(1 − δ) are filled, δ the `dropped_share`. ``ValueError`` as `capacity`.
    """
    slots = capacity(tokens, top_k, num_experts, capacity_factor)
    if tokens == 0:
        return 0.0
    kept = tokens * top_k * (1 - dropped_share(tokens, top_k, num_experts, capacity_factor))
    return max(0.0, 1 - kept / (num_experts * slots))
