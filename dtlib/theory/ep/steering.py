"""How an uneven router is mended: a loss that pushes at its logits, or a bias that moves by the sign of a load.

Shapes: t tokens, e experts, k choices.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dtlib.theory.formula import formula
from dtlib.theory.valid import amount, whole

from .balance import largest_normal
from .routing import checked_scoring, choices, loads, matrix


def _shares(scores_te: ArrayLike, experts_tk: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """φ_e, the share of all choices that fell on an expert, and each token's scores as shares of their sum."""
    s, chosen = amount("scores_te", matrix("scores_te", scores_te)), np.asarray(experts_tk)
    if chosen.ndim != 2 or len(chosen) != len(s) or not chosen.size:
        raise ValueError(f"experts_tk must have a row for each of the {len(s)} tokens, not shape {chosen.shape}")
    total = s.sum(axis=1, keepdims=True)
    if not (total > 0).all():
        raise ValueError("scores_te must not be all 0 for a token")
    return loads(chosen, s.shape[1]) / chosen.size, s / total


@formula("ep.balance_loss", source="fedus2022", label="eq-ep-loss", equation=r"E \sum_i \varphi_i P_i")
def balance_loss(scores_te: ArrayLike, experts_tk: ArrayLike) -> float:
    """The auxiliary loss, without its coefficient.

    φ_i is the share of the choices that fell on expert i, P_i the mean over the tokens of its score, as a share of the
    token's scores: both add up to 1. Where φ or P is even it is 1, whatever the other. Where both rank the experts
    alike it is at least 1, where they rank them opposite at most 1 (Chebyshev's sum inequality), and E times the
    smallest φ is as low as P can make it: 1 is the least for φ = P alone. The mean of several ranks' own losses is that
    of their tokens together plus E times the sum of the covariances of φ_i and P_i over the ranks. ``ValueError`` for
    shapes that do not match.
    """
    f, p = _shares(scores_te, experts_tk)
    return float(f.size * f @ p.mean(axis=0))


@formula(
    "ep.balance_loss_gradient",
    source="derived here",
    label="eq-ep-loss",
    equation=r"\frac{E}{T}\, p_i \Bigl(\varphi_i - \sum_j \varphi_j p_j\Bigr)",
)
def balance_loss_gradient(scores_te: ArrayLike, experts_tk: ArrayLike, scoring: str = "softmax") -> NDArray[np.float64]:
    """The gradient of the auxiliary loss by the logits, (t, e).

    No gradient goes through φ, which counts. For a token whose scores have the shares p_i, an expert's logit is pushed
    down where its load φ_i is above the loads of the others as the token sees them, in proportion to p_i: an expert
    that a token does not care for is hardly touched. It vanishes where φ is even, and adds up to 0 for each token. A
    sigmoid's has a factor 1 − q_i beside p_i. Errors as `balance_loss`.
    """
    f, p = _shares(scores_te, experts_tk)
    pull = p * (f - p @ f[:, None]) * f.size / len(p)
    return np.asarray(pull if checked_scoring(scoring) == "softmax" else pull * (1 - np.asarray(scores_te)))


@formula(
    "ep.bias_step", source="wang2024balancing", equation=r"b_i + u \cdot \mathrm{sign}\Bigl(\frac{T k}{E} - n_i\Bigr)"
)
def bias_step(bias_e: ArrayLike, loads_e: ArrayLike, rate: float) -> NDArray[np.float64]:
    """The bias after a step: u (`rate`) up for an expert with less than the mean load n_i, u down for one with more.

    It decides who is chosen and not with what weight, so no gradient knows of it. ``ValueError`` for lengths that
    differ.
    """
    bias, load = np.asarray(bias_e, dtype=np.float64), _load(loads_e)
    if bias.shape != load.shape:
        raise ValueError(f"bias_e and loads_e must have one length, not {bias.shape} and {load.shape}")
    return bias + amount("rate", rate) * np.sign(load.mean() - load)


def max_violation(loads_e: ArrayLike) -> float:
    """MaxVio, by how much the largest load is above the mean, as a share of it; 0 where nothing was routed.

    Source: Wang et al. 2024, arXiv 2408.15664.
    """
    load = _load(loads_e)
    return float(load.max() / load.mean() - 1) if load.any() else 0.0


def _load(loads_e: ArrayLike) -> NDArray[np.float64]:
    load = np.asarray(amount("loads_e", loads_e), dtype=np.float64)
    if load.ndim != 1 or not load.size:
        raise ValueError(f"loads_e must have one number for each expert, not shape {load.shape}")
    return load


@formula(
    "ep.balanced_violation",
    source="derived here",
    label="eq-ep-busiest",
    equation=r"m_E \sqrt{\frac{E}{T k} \cdot \frac{E-k}{E-1}}",
    use="Of a perfectly even router a batch still shows this MaxVio.",
)
def balanced_violation(tokens: int, top_k: int, num_experts: int) -> float:
    """MaxVio of one batch of T `tokens` under uniform routing, in the mean: chance alone.

    The busiest of E experts has m_E deviations more than the mean (`busiest_rank_tokens`). Over many batches it
    averages out. ``ValueError`` for no tokens.
    """
    e, k = choices(num_experts, top_k)
    return largest_normal(e) * math.sqrt(e / (whole("tokens", tokens, 1) * k) * (e - k) / max(1, e - 1))


@formula(
    "ep.bias_steps",
    source="derived here",
    equation=r"\left\lceil \frac{\Delta}{2u} \right\rceil",
    use="With a smaller rate the bias takes longer to balance, and jitters less when it has.",
)
def bias_steps(spread: float, rate: float) -> int:
    """Steps that the bias takes at least to make up for a `spread` Δ.

    Where the scores of the favourite are Δ above those of an expert that nobody chooses, one bias falls by u (`rate`) a
    step while the other rises by u. Afterwards each moves to and fro by u. ``ValueError`` for a rate that is not
    positive.
    """
    return math.ceil(amount("spread", spread) / (2 * amount("rate", rate, positive=True)) - 1e-9)
