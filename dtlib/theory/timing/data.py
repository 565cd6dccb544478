"""The seconds of weights and gradients between data-parallel ranks, and what of any message nothing hides."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtlib.theory.memory import recipe
from dtlib.theory.models import Architecture, layer_of_rank
from dtlib.theory.units import MiB

from .constants import Constants
from .layer import half_all_reduce, link_shares
from .plan import Machine, Plan
from .stages import StageSizes

Column = NDArray[Any]


def data_seconds(
    model: Architecture, mesh: Plan, c: Any, micro: Column, sizes: StageSizes, trained: StageSizes, machine: Machine,
    k: Constants,
) -> Column:  # fmt: skip
    """Seconds of weights and gradients between data-parallel ranks that nothing hides, one entry a choice in `c`.

    Gradients travel behind the backward pass of the last micro-batch (stage 2: of each, since none keeps them whole),
    the weights of stages 1 and 2 behind the forward pass of the first; a layer's worth is seen. Stage 3: each layer
    behind its neighbours, in every micro-batch. What is `trained` has gradients and is gathered after the update; all
    `sizes` at stage 3. Where `c.shard` ranks share the states, not all (0), these send so, and
    each reduction is followed by an all-reduce of a rank's shard over the groups, as `zero.hybrid_traffic` counts.
    """
    if mesh.size("dp", "cp") == 1:
        return 0.0 * micro
    found = _shared_seconds(model, mesh, c, micro, sizes, trained, machine, k)
    for shard in np.unique(c.shard[c.shard > 0]):
        cut = mesh.changed(zero=3, shard=int(shard))
        found = np.where(c.shard == shard, _shared_seconds(model, cut, c, micro, sizes, trained, machine, k), found)
    return found


def _shared_seconds(
    model: Architecture, mesh: Plan, c: Any, micro: Column, sizes: StageSizes, trained: StageSizes, machine: Machine,
    k: Constants,
) -> Column:  # fmt: skip
    """`data_seconds` where `mesh.shards` ranks share the states."""
    zero, per_param, shares = c.zero, recipe(mesh.recipe).per_param, link_shares(k)
    behind = k.data_hiding * micro
    group, copies, others = machine.shards(mesh, shares), None, machine.shard_copies(mesh, shares)
    if sizes.experts:  # those of a rank are held by fewer
        copies = machine.expert_copies(mesh, shares)

    def travel(others: float, experts: float, width: float, messages: int = 1) -> Any:
        return half_all_reduce(group, others * width, messages) + half_all_reduce(copies, experts * width, messages)

    units = -(-model.num_layers // mesh.pp)
    messages = max(1, round(k.sharded_messages * units))
    gather, scatter = (
        {u: travel(trained.others, trained.experts, width, u) for u in {1, units, messages}}
        for width in (per_param.weights, per_param.gradients)
    )
    if others.world_size > 1:
        shard = per_param.gradients * (trained.others / mesh.shards + trained.experts / max(1, mesh.expert_copies))
        scatter = {u: each + 2 * half_all_reduce(others, shard, u) for u, each in scatter.items()}
    sharded = scatter[messages]
    reduce = np.where(zero == 0, 2 * scatter[1], sharded)
    least = np.where(zero == 0, scatter[1], sharded) / units
    seen = np.where(zero == 2, c.micro_batches, 1) * seen_seconds(reduce, 2 / 3 * behind, least, k)
    seen = seen + np.where(zero > 0, seen_seconds(gather[messages], behind / 3, gather[messages] / units, k), 0)
    whole = travel(sizes.others, sizes.experts, per_param.weights, units)
    streamed = seen_seconds(2 * whole + scatter[units], behind, 0, k)
    layer = layer_of_rank(model, mesh.tp, mesh.ep, with_experts=model.num_expert_layers > 0)
    first = travel(layer.total - layer.experts, layer.experts, per_param.weights)
    return np.where(zero == 3, c.micro_batches * streamed + 2 * first, seen)


def seen_seconds(travel: Any, behind: Column, least: Any, k: Constants) -> Column:
    """Seconds that messages add to the computation `behind` which they travel.

    At least `least` of them nothing hides. The rest is not free: whoever sends takes multiprocessors and memory from
    the products, `contention_share` of a second in each second.
    """
    open_seconds = np.maximum(travel - k.overlap_share * behind, least)
    return np.asarray(open_seconds + k.contention_share * (travel - open_seconds))


def wait_seconds(mesh: Plan, sizes: StageSizes, c: Any, k: Constants) -> dict[str, Any]:
    """Seconds for which a stalled job waits: each message between nodes that nothing hides takes `stall_seconds` more.

    An inner stage has four of each micro-batch, an outer one two; the first and the last of the slowest pass p - 3
    others each. Without a pipeline gradients are what waits, a message for each half of their sum, of which sharded
    states leave one until weights are wanted; gradients that are summed whole go round all ranks in buckets.
    """
    each, hop = (k.stall_seconds, k.stall_hop_seconds) if k.stalls(mesh) else (0.0, 0.0)
    if mesh.pp > 1:
        of_stage = (4 if mesh.pp > 2 else 2) * c.chunks * c.micro_batches
        return {"pipeline_messages": each * of_stage, "bubble": each * 2 * max(0, mesh.pp - 3), "data_parallel": 0.0}
    hops = mesh.size("dp", "cp") - 1
    buckets = recipe(mesh.recipe).per_param.gradients * (sizes.others + sizes.experts) / (25 * MiB)
    summed = np.where(c.zero > 0, each, 2 * (each + hop * hops * buckets)) if hops else 0.0
    return {"pipeline_messages": 0.0, "bubble": 0.0, "data_parallel": summed}
