"""What a rank keeps of a model with experts, from step to step and for backward, and what parameters a token meets."""

from __future__ import annotations

from dataclasses import dataclass

from dtlib.theory import zero
from dtlib.theory.breakdown import Breakdown, over
from dtlib.theory.formula import formula
from dtlib.theory.memory import Recipe
from dtlib.theory.valid import amount, flag, whole

from .routing import choices
from .traffic import expected_visits


@dataclass(frozen=True)
class LayerParameters(Breakdown):
    """Parameters of a layer of experts: the `router`, the `routed` experts, the `shared` ones that all tokens meet."""

    router: int
    routed: int
    shared: int


@formula(
    "ep.layer_parameters",
    source="derived here",
    equation=r"E h + 3(E + S)\,h f \text{ in total}, \quad E h + 3(k + S)\,h f \text{ active}",
)
def layer_parameters(
    hidden: int,
    expert_hidden: int,
    num_experts: int,
    *,
    top_k: int | None = None,
    num_shared: int = 0,
    gated: bool = True,
) -> LayerParameters:
    """Parameters of a layer of experts, in total or, with `top_k`, those that one token meets.

    A router of Eh, E experts, or k of them, and S `num_shared` ones: 3hf each, 2hf where they are not `gated`; no
    biases. ``ValueError`` for sizes below 1 or more choices than experts.
    """
    h, f = whole("hidden", hidden, 1), whole("expert_hidden", expert_hidden, 1)
    e, k = choices(num_experts, num_experts if top_k is None else top_k)
    each = (3 if flag("gated", gated) else 2) * h * f
    return LayerParameters(e * h, k * each, whole("num_shared", num_shared, 0) * each)


@dataclass(frozen=True)
class StateBytes(Breakdown):
    """Bytes of model states of a rank: for its `experts`, and for all `others`."""

    experts: float
    others: float


@formula(
    "ep.state_bytes",
    source="derived here",
    equation=(
        r"\frac{\Psi_E}{N}\Bigl(w + g + \frac{o}{d/N}\Bigr) + (\Psi - \Psi_E)\Bigl(w + g + \frac{o}{d}\Bigr)"
        r"\quad \text{(ZeRO 1)}"
    ),
)
def state_bytes(
    expert_params: float, other_params: float, *, dp: int, ep: int, stage: int = 0, recipe: str | Recipe = "16-byte"
) -> StateBytes:
    """Model states of a rank, bytes.

    Of d = `dp` ranks that share a batch N = `ep` share the experts, so an expert is held by d/N of them, and ZeRO
    splits its part among so few; all else is held by d. What ZeRO splits of the experts is Ψ_E/d whatever N is: at
    stage 3 more expert parallelism saves nothing at rest. Ψ_E `expert_params` are the routed experts of the whole
    model. ``ValueError`` where `ep` does not divide `dp`, or as `zero.states`.
    """
    d, n = whole("dp", dp, 1), whole("ep", ep, 1)
    if d % n:
        raise ValueError(f"ep must divide dp, {d}; {n} does not")
    experts, others = amount("expert_params", expert_params), amount("other_params", other_params)
    return StateBytes(
        experts=zero.states(over(experts, n), d // n, stage, recipe).total,
        others=zero.states(others, d, stage, recipe).total,
    )


_INDEX_BYTES, _WIDE_BYTES = 8, 4
"""What points to a row is int64, and a router computes in float32 at least."""


@dataclass(frozen=True)
class KeptBytes(Breakdown):
    """Bytes that a rank keeps of a layer of experts, its input apart.

    `router` are all scores, and input and matrix in float32 where they are narrower; `choices` what says of each
    choice, sent and arrived, its row and its weight; `rows` the tokens that came from all ranks, this one too; `hidden`
    what the experts' first matrices put out; `shared` the same of the shared ones, with their rows.
    """

    router: float
    choices: float
    rows: float
    hidden: float
    shared: float


@formula("ep.kept_bytes", source="derived here", equation=r"4\,(tE + th + hE) + t\,((Vh + 2(k + S)f)\,w + z)")
def kept_bytes(
    tokens: int,
    hidden: int,
    expert_hidden: int,
    num_experts: int,
    top_k: int,
    ep: int = 1,
    tp: int = 1,
    *,
    gated: bool = True,
    shared_hidden: int = 0,
    normalised: bool = True,
    imbalance: float = 1,
    element_bytes: float = 2,
) -> KeptBytes:
    """Bytes that a rank keeps of a layer of experts for its backward pass, beside the layer's input.

    Of t tokens a rank with k choices each, in float32: the scores of all E experts and, where w `element_bytes` are
    fewer than its 4, the router's input and matrix; a row for each of the V ranks that a token visits (with `ep` 1 that
    is the input); what the first matrices of k and of S shared experts (`shared_hidden` is S f) put out, 2f entries (f
    where not `gated`) over `tp` ranks that split the width; z bytes a token that say where its choices go, with which
    weights. What lies behind is computed again. The busiest rank gets `imbalance` times the mean. Written out plainly a
    layer keeps more (`activations.layer_activations`).

    Uniform routing. ``ValueError`` for sizes below 1 or more choices than experts.
    """
    t, h, f = whole("tokens", tokens, 0), whole("hidden", hidden, 1), whole("expert_hidden", expert_hidden, 1)
    n, parts, gates = whole("ep", ep, 1), whole("tp", tp, 1), 2 if flag("gated", gated) else 1
    visits, w = expected_visits(num_experts, top_k, n), amount("element_bytes", element_bytes, positive=True)
    wide, more = max(w, _WIDE_BYTES), amount("imbalance", imbalance)
    chosen = t * (2 * _INDEX_BYTES * top_k + (wide * (top_k + 2) if flag("normalised", normalised) else 0))
    arrived = more * t * top_k * ((1 if n == 1 else 2) * _INDEX_BYTES + wide)
    s = whole("shared_hidden", shared_hidden, 0)
    return KeptBytes(
        router=wide * (t * num_experts + (h * (t + num_experts) if w < wide else 0)),
        choices=chosen + arrived + (_INDEX_BYTES * t * visits if n > 1 else 0),
        rows=more * t * visits * h * w if n > 1 else 0,
        hidden=more * t * top_k * gates * f / parts * w,
        shared=t * (gates * s / parts * w + _INDEX_BYTES + w) if s else 0,
    )
