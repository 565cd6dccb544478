"""Which experts a token goes to, and with what weights: the scores, the choice, the groups that limit it.

Shapes: t tokens, e experts, k choices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dtlib.theory.valid import amount, flag, whole

SCORINGS = ("softmax", "sigmoid")
"""How a router's logits become scores."""


def scores(logits_te: ArrayLike, scoring: str = "softmax") -> NDArray[np.float64]:
    """Scores q_te of a token's experts: softmax, which adds up to 1 for a token, or sigmoid, each for itself.

    ``ValueError`` for logits that are not finite or have no two dimensions, or another `scoring`.
    """
    z = matrix("logits_te", logits_te)
    if checked_scoring(scoring) == "sigmoid":
        return np.asarray(np.exp(-np.logaddexp(0, -z)))
    weights = np.exp(z - z.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


@dataclass(frozen=True)
class Routing:
    """The `experts_tk` that each token chose, the best first, and the `weights_tk` of their outputs in its sum."""

    experts_tk: NDArray[np.int64]
    weights_tk: NDArray[np.float64]


def route(
    scores_te: ArrayLike,
    top_k: int,
    *,
    bias_e: ArrayLike | None = None,
    groups: int = 1,
    top_groups: int | None = None,
    group_score: int = 2,
    normalised: bool = True,
    scale: float = 1.0,
) -> Routing:
    """The k experts of each token with the largest score + bias, weighted by their scores alone.

    A tie goes to the lower index. With `groups` G, experts lie in G groups of E/G, and only those of the `top_groups` M
    best groups can be chosen: a group is as good as the sum of its `group_score` best scores + bias (2 in DeepSeek-V3,
    1 in V2). Weights are divided by their sum where `normalised`, then multiplied by `scale`. ``ValueError`` for scores
    below 0, a bias of another length, groups that do not divide E, or more choices than the groups have experts.
    """
    s = amount("scores_te", matrix("scores_te", scores_te))
    t, e = s.shape
    k, g = whole("top_k", top_k, 1), groups_of(e, groups)
    m = allowed_groups(e, k, g, top_groups)
    bias = np.zeros(e) if bias_e is None else np.asarray(bias_e, dtype=np.float64)
    if bias.shape != (e,) or not np.isfinite(bias).all():
        raise ValueError(f"bias_e must be {e} finite numbers, one for each expert, not shape {bias.shape}")
    best = min(whole("group_score", group_score, 1), e // g)
    choice = s + bias
    if m < g:
        by_group = np.sort(choice.reshape(t, g, e // g), axis=2)[:, :, -best:].sum(axis=2)
        allowed = np.zeros((t, g), dtype=bool)
        np.put_along_axis(allowed, np.argsort(-by_group, axis=1, kind="stable")[:, :m], True, axis=1)
        choice = np.where(np.repeat(allowed, e // g, axis=1), choice, -np.inf)
    experts = np.argsort(-choice, axis=1, kind="stable")[:, :k]
    weights = np.take_along_axis(s, experts, axis=1)
    if flag("normalised", normalised):
        weights = weights / np.maximum(weights.sum(axis=1, keepdims=True), np.finfo(np.float64).tiny)
    return Routing(experts, weights * amount("scale", scale))


def loads(experts_tk: ArrayLike, num_experts: int) -> NDArray[np.int64]:
    """How many tokens each of the E experts got; ``ValueError`` for an expert that is none of 0 … E − 1."""
    chosen, e = np.asarray(experts_tk), whole("num_experts", num_experts, 1)
    if chosen.size and (chosen.dtype.kind not in "iu" or chosen.min() < 0 or chosen.max() >= e):
        raise ValueError(f"experts_tk must be whole numbers from 0 to {e - 1}")
    return np.bincount(chosen.reshape(-1).astype(np.int64), minlength=e)


def matrix(name: str, value: Any) -> NDArray[np.float64]:
    """`value` as tokens × experts of finite numbers, or ``ValueError``."""
    array = np.asarray(value, dtype=np.float64)
    if array.ndim != 2 or not array.shape[1]:
        raise ValueError(f"{name} must have two dimensions, tokens and experts, not shape {array.shape}")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} must be finite")
    return array


def checked_scoring(scoring: Any) -> str:
    """`scoring`, or ``ValueError`` unless it is one of `SCORINGS`."""
    if scoring not in SCORINGS:
        raise ValueError(f"scoring must be one of {', '.join(SCORINGS)}, not {scoring!r}")
    return str(scoring)


def checked_routing(
    num_experts: int, top_k: int, scoring: str, normalised: bool, groups: int, top_groups: int | None
) -> int:
    """M, the groups that a token may use; ``ValueError`` unless a router can be made of these."""
    checked_scoring(scoring)
    flag("normalised", normalised)
    e, k = choices(num_experts, top_k)
    return allowed_groups(e, k, groups_of(e, groups), top_groups)


def choices(num_experts: Any, top_k: Any) -> tuple[int, int]:
    """E and k as ints: at least 1 and no more choices than experts, else ``ValueError``."""
    e, k = whole("num_experts", num_experts, 1), whole("top_k", top_k, 1)
    if k > e:
        raise ValueError(f"top_k must be at most num_experts={e}, not {k}")
    return e, k


def groups_of(num_experts: int, groups: Any, name: str = "groups") -> int:
    """`groups` as an int that divides the number of experts, else ``ValueError``."""
    g = whole(name, groups, 1)
    if num_experts % g:
        raise ValueError(f"{name} must divide num_experts={num_experts}; {g} does not")
    return g


def allowed_groups(num_experts: int, top_k: int, groups: int, top_groups: Any) -> int:
    """M of the G groups, all by default; ``ValueError`` where they have fewer experts than a token chooses."""
    m = groups if top_groups is None else whole("top_groups", top_groups, 1)
    if m > groups:
        raise ValueError(f"top_groups must be at most groups={groups}, not {m}")
    if top_k > m * (num_experts // groups):
        raise ValueError(f"top_k must be at most the {m * (num_experts // groups)} experts of {m} groups, not {top_k}")
    return m
