"""The heads as a draft: tokens guessed by them, checked by the model in one pass."""

from __future__ import annotations

from itertools import accumulate
from operator import mul
from typing import Any

from dtlib.theory.formula import formula
from dtlib.theory.valid import amount, at_most, whole

MOST_DRAFTED = 10_000


@formula(
    "mtp.accepted_tokens",
    source="leviathan2023",
    label="thm-mtp-accepted",
    equation=r"\sum_{i=0}^{k} q^i = \frac{1-q^{k+1}}{1-q}",
)
def accepted_tokens(acceptance: float, drafted: int, *, correlation: float = 0) -> float:
    """Tokens that a checked draft earns.

    In the mean, of k drafted ones, the model's own next token among them: 1 + q + … + q^k. A draft counts up to its
    first wrong token, and the pass that finds it wrong gives the right one. Each token is taken to be right with
    probability q whatever came before; a chain, not a tree. k + 1 for q = 1, and 1 for q = 0.

    Where passes are easy or hard, a pass draws its own share from a beta distribution of mean q, and any two of its
    guesses have a `correlation` ρ: behind i right ones the next is right with (q (1 − ρ) + iρ)/(1 − ρ + iρ), derived
    here. That earns at least as much; 1 + kq with ρ = 1. ``ValueError`` unless both are from 0 to 1. Source: Leviathan
    et al. 2023, arXiv 2211.17192, equation 1.
    """
    q, k, rho = _share("acceptance", acceptance), whole("drafted", drafted, 0), _share("correlation", correlation)
    if rho == 0:
        return float(k + 1) if q == 1 else (1 - q ** (k + 1)) / (1 - q)
    right = ((q * (1 - rho) + i * rho) / (1 - rho + i * rho) if i else q for i in range(k))
    return 1.0 + sum(accumulate(right, mul))


@formula(
    "mtp.speedup",
    source="leviathan2023",
    label="thm-mtp-speedup",
    equation=r"\frac{1-q^{k+1}}{(1-q)(v + kc)}",
)
def speedup(acceptance: float, drafted: int, draft_cost: float, *, check_cost: float = 1.0) -> float:
    """How much faster a draft makes decoding.

    A drafted token costs c passes of the model over one token (`draft_cost`), the pass over k + 1 tokens that checks
    them v of these (`check_cost`, 1 where reading the weights is what takes the time). Below 1 it is slower.
    ``ValueError`` for an acceptance not from 0 to 1, or a check that costs nothing.
    """
    cost = amount("check_cost", check_cost, positive=True) + drafted_cost(drafted, draft_cost)
    return accepted_tokens(acceptance, drafted) / float(cost)


def drafted_cost(drafted: int, draft_cost: float) -> float:
    """Passes that k drafted tokens cost, k·c."""
    return whole("drafted", drafted, 0) * float(amount("draft_cost", draft_cost))


@formula(
    "mtp.break_even_acceptance",
    source="derived here",
    label="thm-mtp-speedup",
    equation=r"q^* = v - 1 + c",
    use="With a lower acceptance no draft of any length pays.",
)
def break_even_acceptance(draft_cost: float, *, check_cost: float = 1.0) -> float:
    """The acceptance from which on a draft of one token pays.

    1 + q = v + c. If v is 1 for every k, this decides about every length: where q is at most c, 1 + q + … + q^k is at
    most 1 + kc. With v above 1 a longer draft may pay where one token does not. ``ValueError`` for a check
    below 1.
    """
    check = float(amount("check_cost", check_cost, positive=True))
    if check < 1:
        raise ValueError(f"check_cost must be at least 1, a pass over one token, not {check:g}")
    return check - 1 + float(amount("draft_cost", draft_cost))


@formula(
    "mtp.best_draft",
    source="derived here",
    label="eq-mtp-best",
    equation=r"k^* = \min\{k : q^{k+1}(v + kc) \le c\,(1 + q + \dots + q^k)\}",
    use="A longer draft is slower.",
)
def best_draft(acceptance: float, draft_cost: float, *, check_cost: float = 1.0) -> int:
    """The length of draft that is fastest.

    The (k+1)-th token adds q^(k+1) tokens and c to the cost, so it pays while q^(k+1)/c is above the speed so far. That
    gain falls with k, so the first length that does not pay ends the search: the shortest of the fastest. 0: do not
    draft. With v above 1, the same for each length, the best may still be slower than a pass without a check (`speedup`
    below 1). Where tokens are always right, or drafting is free, no length is the best: ``ValueError``, as for a best
    length above 10,000.
    """
    q, c = _share("acceptance", acceptance), float(amount("draft_cost", draft_cost))
    v = float(amount("check_cost", check_cost, positive=True))
    if q == 1 or (c == 0 < q):
        raise ValueError(
            f"acceptance must be below 1 and draft_cost above 0, not {q:g} and {c:g}: longer is always faster"
        )
    k, tokens, gain = 0, 1.0, q
    while gain * (v + k * c) > c * tokens * (1 + 1e-12):
        k, tokens, gain = at_most("the best draft", k + 1, MOST_DRAFTED), tokens + gain, gain * q
    return k


def _share(name: str, value: Any) -> float:
    if not amount(name, value) <= 1:
        raise ValueError(f"{name} must be from 0 to 1, not {value!r}")
    return float(value)
