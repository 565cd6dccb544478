"""What the stages of a pipeline hold: how many layers of each kind, and how many parameters a rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from dtlib.theory.footprint import expert_layers, piece_layers, stage_parameters
from dtlib.theory.footprint.stages import FULL
from dtlib.theory.models import Architecture, last_has_experts, layer_of_rank, mtp_parameters

from .plan import Plan


@dataclass(frozen=True)
class StageSizes:
    """Layers by whether they have experts: of each of `stages` that may be the slowest, and of the `last`, whose
    modules of further tokens are among them. `experts` and `others` are the parameters of the rank with the most."""

    stages: tuple[Mapping[bool, int], ...]
    last: Mapping[bool, int]
    others: int
    experts: int

    def trained(self, model: Architecture, plan: Plan) -> StageSizes:
        """The sizes with the parameters alone that have gradients: those of adapters, of the rank with most layers."""
        if plan.adapters is None:
            return self
        layers = max(sum(counts.values()) for counts in (*self.stages, self.last))
        return replace(self, others=layers * plan.adapters.layer_parameters(model, plan.tp), experts=0)

    def has(self, with_experts: bool) -> bool:
        """Whether any stage has such a layer."""
        return any(counts[with_experts] for counts in (*self.stages, self.last))


@lru_cache(maxsize=4096)
def balanced_stages(model: Architecture, pp: int) -> tuple[int, int]:
    """Layers of the fullest stage, and of that with the head, where stages are filled by their products.

    A stage is full once its own and all before it have their share, or nearly (`FULL`); the head counts as so many
    layers as have its products.
    """
    of = layer_of_rank(model, 1, 1, with_experts=False)
    layer = of.total - of.norms
    costs = [layer] * model.num_layers + [model.vocab * model.hidden]
    held, stage, before = [0] * pp, 0, 0
    for cost in costs:
        held[stage] += 1
        before += cost
        if stage + 1 < pp and before * pp >= FULL * sum(costs) * (stage + 1):
            stage += 1
            head = stage - 1
        else:
            head = stage
    beside = held[head] - 1
    held[head] = beside
    return max(held), beside


@lru_cache(maxsize=4096)
def stage_sizes(model: Architecture, tp: int, pp: int, ep: int = 1) -> StageSizes:
    """The sizes of `pp` stages of one piece each."""
    counts = [(sum(pieces) - sum(sparse), sum(sparse)) for pieces, sparse in (
        (each, expert_layers(model, pp, stage)) for stage, each in enumerate(piece_layers(model.num_layers, pp))
    )]  # fmt: skip
    dense, sparse = counts[-1]
    further = last_has_experts(model)
    last = {False: dense + model.mtp_modules * (not further), True: sparse + model.mtp_modules * further}
    stages = {max(counts)} if model.experts is None else set(counts)
    where = {0, pp // 2, pp - 1} if model.experts is None else range(pp)
    held = []
    for stage in where:
        parameters = stage_parameters(model, tp, pp, stage, ep=ep)
        experts = parameters.experts
        if model.mtp_modules and stage == pp - 1:
            experts += model.mtp_modules * mtp_parameters(model, tp, ep).experts
        held.append((parameters.total, experts))
    total, experts = max(held)
    return StageSizes(tuple({False: d, True: s} for d, s in sorted(stages)), last, total - experts, experts)
