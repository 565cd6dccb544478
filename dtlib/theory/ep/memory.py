"""What a rank keeps of a model with experts, and how many parameters a token meets."""

from __future__ import annotations

from dataclasses import dataclass

from dtlib.theory import zero
from dtlib.theory.breakdown import Breakdown, over
from dtlib.theory.formula import formula
from dtlib.theory.memory import Recipe
from dtlib.theory.valid import amount, flag, whole

from .routing import choices


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
