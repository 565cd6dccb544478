"""The seconds of a step, term by term, of one plan or of many that share a mesh.

Letters: T tokens of a micro-batch on a rank, F operations and B bytes a second of a card. A product of (M, K) and (K,
N) takes 2MKN/F + c·2(MK + KN + MN)/B: its operations at the rate of large matrices, and its operands c times through
memory, since tiles are read more than once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtlib.theory import cp, pp, sp, tp
from dtlib.theory.breakdown import Breakdown
from dtlib.theory.formula import formula
from dtlib.theory.memory import recipe
from dtlib.theory.models import Architecture, checked_model

from .constants import FITTED, Constants
from .data import data_seconds, seen_seconds, wait_seconds
from .host import host_seconds
from .layer import exchange_seconds, half_all_reduce, layer_seconds, link_shares, rates
from .plan import Machine, Plan
from .products import product_seconds
from .stages import balanced_stages, stage_sizes

Column = NDArray[Any]
CHOICES = (
    "zero", "shard", "sequence_parallel", "keep_gathered", "micro_batch", "micro_batches", "chunks", "schedule",
    "recompute", "recompute_layers",
)  # fmt: skip
"""What may differ between plans of one mesh; a `shard` or `recompute_layers` of 0 is None."""


@dataclass(frozen=True)
class StepTime(Breakdown):
    """Seconds of one step, of the slowest stage.

    What is computed: products of matrices, the core of attention, what is bound by memory, what is computed again, the
    update, casts to fp8. What is waited for: kernels that the host has not launched yet, messages of each axis that
    nothing hides (no tokens on their way to experts and back are hidden), and the pipeline's bubble.
    """

    matmuls: float
    attention: float
    elementwise: float
    recompute: float
    head: float
    optimizer: float
    host: float
    tensor_parallel: float
    context_parallel: float
    pipeline_messages: float
    data_parallel: float
    bubble: float
    expert_parallel: float = 0
    casts: float = 0
    adapters: float = 0
    host_link: float = 0
    host_update: float = 0


@formula(
    "planner.step_time",
    source="derived here",
    label="eq-planner-step",
    equation=r"T = \left(m + u\right)\frac{l}{p}\left(T_\text{computed} + T_\text{tp} + T_\text{cp}\right) "
    r"+ m\,T_\text{pp} + T_\text{dp} + T_\text{update}",
)
def step_time(model: Architecture | str, plan: Plan, machine: Machine, constants: Constants = FITTED) -> StepTime:
    """Seconds of a step, term by term.

    Of the slowest stage under `plan`, as the module explains. ``ValueError`` where model, plan and machine do not go
    together.
    """
    model = checked_model(model)
    plan.check(model)
    if plan.world_size != machine.gpus:
        raise ValueError(f"dp·tp·pp·cp must be gpus={machine.gpus}, not {plan.world_size}")
    found = step_terms(model, plan, {each: np.array([_column(plan, each)]) for each in CHOICES}, machine, constants)
    return StepTime(**{name: float(column[0]) for name, column in found.items()})


def _column(plan: Plan, choice: str) -> Any:
    value = getattr(plan, choice)
    return 0 if value is None else value


def step_terms(
    model: Architecture, mesh: Plan, choices: Mapping[str, Column], machine: Machine, constants: Constants
) -> dict[str, Column]:
    """The terms of `StepTime` in seconds, one entry a choice: plans on the mesh of `mesh` that differ in `CHOICES`.

    `choices` has a column of equal length for each. Nothing is checked: `step_time` and `search` do.
    """
    c, k = SimpleNamespace(**choices), constants
    c.micro_batch, c.micro_batches = c.micro_batch.astype(float), c.micro_batches.astype(float)  # ints overflow
    sizes, m, passes = stage_sizes(model, mesh.tp, mesh.pp, mesh.ep), c.micro_batches, mesh.passes
    trained = sizes.trained(model, mesh)
    again = np.where(c.recompute == "full", 1.0, 0.0)
    kinds = {kind: _layer(model, mesh, c, again, machine, k, kind) for kind in (False, True) if sizes.has(kind)}
    partly = c.recompute_layers > 0
    plain = {kind: _layer(model, mesh, c, 0 * again, machine, k, kind) for kind in kinds} if partly.any() else kinds

    def part_again(layers: Any) -> Column:
        """Of the layers of a stage, the part that is computed again, where a part is."""
        return np.where(partly, np.minimum(1, c.recompute_layers * c.chunks / np.maximum(layers, 1)), 1.0)

    def term_of(kind: bool, term: str, layers: Any) -> Any:
        whole = kinds[kind][term]
        if plain is kinds:
            return whole
        part = part_again(layers)
        return np.where(partly, part * whole + (1 - part) * plain[kind][term], whole)

    def seconds_of(counts: Mapping[bool, Any], term: str, times: float = 1) -> Any:
        return sum(m * counts[kind] * term_of(kind, term, sum(counts.values())) * times for kind in kinds)

    def micro_batch(counts: Mapping[bool, Any], layers: Any = None) -> Any:
        layers = sum(counts.values()) if layers is None else layers
        return sum(counts[kind] * (term_of(kind, "busy", layers) + term_of(kind, "host", layers)) for kind in kinds)

    head = _head(model, mesh, c.micro_batch, machine, k)
    # the last stage has the head, and fewer layers where they do not divide
    inner = np.array([np.broadcast_to(micro_batch(counts), m.shape) for counts in sizes.stages])
    fullest = inner.argmax(axis=0)
    is_last = micro_batch(sizes.last) + head > inner.max(axis=0)
    slow = {kind: np.where(is_last, sizes.last[kind], np.array([each[kind] for each in sizes.stages])[fullest])
            for kind in kinds}  # fmt: skip
    if k.head_balance and mesh.pp > 1:
        part = {True: model.num_expert_layers / model.num_layers}
        part[False] = 1 - part[True]
        most, beside = balanced_stages(model, mesh.pp)
        of_kinds = {kind: part[kind] for kind in kinds}
        one, usual, least = (micro_batch(of_kinds, each) for each in (most, model.num_layers / mesh.pp, beside))
        is_last = beside * least + head > most * one
        slow = {kind: np.where(is_last, beside, most) * part[kind] for kind in kinds}
        fullest_seconds = np.maximum(beside * least + head, most * one)
        inner = np.array([(model.num_layers * usual + head - fullest_seconds) / (mesh.pp - 1)])
    micro = micro_batch(slow) + head * is_last
    messages = _pipeline_seconds(model, mesh, c, machine, k) if mesh.pp > 1 else 0 * m
    waits = wait_seconds(mesh, trained, c, k)
    summed = k.accumulated_bytes * (trained.others + trained.experts) / machine.accelerator.memory_bytes_per_s
    shards = np.where(c.shard > 0, c.shard, mesh.size("dp", "cp"))
    owned = trained.others / np.where(c.zero > 0, shards, 1)
    owned = owned + trained.experts / np.where(c.zero > 0, shards // mesh.ep, 1)
    updated = 0.0 if mesh.offload else owned * 2 * recipe(mesh.recipe).bytes_per_param
    share = again if plain is kinds else again * part_again(model.num_layers / mesh.pp)
    seconds = {
        "matmuls": seconds_of(slow, "matmuls", passes),
        "attention": seconds_of(slow, "attention", 3.5),
        "elementwise": seconds_of(slow, "elementwise", 3) + m * summed,
        "recompute": seconds_of(slow, "recompute"),
        "head": m * head * is_last,
        "optimizer": updated / machine.accelerator.memory_bytes_per_s + k.step_host_seconds,
        "host": seconds_of(slow, "host"),
        "tensor_parallel": seconds_of(slow, "tensor"),
        "context_parallel": seconds_of(slow, "context"),
        "pipeline_messages": m * messages + waits["pipeline_messages"],
        "data_parallel": data_seconds(model, mesh, c, micro, sizes, trained, machine, k) + waits["data_parallel"],
        "bubble": _bubble_units(mesh, c, share) * (inner.max(axis=0) + messages) + waits["bubble"],  # of other stages
        "expert_parallel": seconds_of(slow, "exchange"),
        "casts": seconds_of(slow, "casts", passes) if mesh.precision == "fp8" else 0.0,
        "adapters": seconds_of(slow, "adapters", 3) if mesh.adapters else 0.0,
        **host_seconds(mesh, owned, machine),
    }
    return {name: np.broadcast_to(np.asarray(value, float), m.shape) for name, value in seconds.items()}


def _layer(
    model: Architecture, mesh: Plan, c: Any, again: Column, machine: Machine, k: Constants, with_experts: bool
) -> dict[str, Any]:
    """Seconds of a layer for a micro-batch: `busy` is all, forward and backward, but what the host is behind."""
    full = again > 0
    once = layer_seconds(model, mesh, c.micro_batch, c.sequence_parallel, machine, k, with_experts)
    matmuls, attention, elementwise = once["matmuls"], once["attention"], once["elementwise"]
    casts, adapters = once["casts"], once["adapters"]
    selected = k.selective_products * (matmuls + casts) + elementwise if k.selective_products else attention
    core_again = np.where(c.recompute == "selective", selected, 0.0)
    forward = matmuls + attention + elementwise + (casts + adapters)
    recomputed = np.where(full, forward - (once["last"] if mesh.early_stop else 0), core_again)
    tensor = _tensor_seconds(model, mesh, c, full, machine, k)
    context = _context_seconds(model, mesh, c.micro_batch, attention, machine, k) * (1 + again / 3)
    if mesh.tp_overlap:  # pieces of a product travel while others are computed; the last of eight is seen
        tensor = seen_seconds(tensor, matmuls * (mesh.passes + again), tensor / 8, k)
    busy = matmuls * mesh.passes + attention * 3.5 + elementwise * 3 + recomputed + tensor + context
    busy = busy + (casts * mesh.passes + adapters * 3)
    exchange: Any = 0.0
    if with_experts:  # the gradients travel as the tokens did
        exchange = exchange_seconds(model, mesh, c.micro_batch, c.sequence_parallel, machine, k) * (2 + again)
        busy = busy + exchange
    slow = (mesh.world_size > machine.node) & ((mesh.pp > 1) | (c.sequence_parallel & ~c.keep_gathered))
    behind = busy - np.where(slow, 0, tensor)
    return {
        "matmuls": matmuls, "casts": casts, "adapters": adapters, "attention": attention, "elementwise": elementwise,
        "recompute": recomputed,
        "tensor": tensor, "context": context, "exchange": exchange, "busy": busy,
        "host": np.maximum(0, _host_seconds(mesh, slow, machine.node, k) * (1 + again / 3) - behind),
    }  # fmt: skip


def _host_seconds(mesh: Plan, slow: Column, node: int, k: Constants) -> Column:
    """Seconds that the host takes to launch a layer: once, or for each tensor rank that it meets where that is more.

    Where it is slow it waits for each rank; in a pipeline once the layer is launched, and less for those of its node.
    """
    far, quick = mesh.tp * k.far_rank_host_seconds, max(k.layer_host_seconds, mesh.tp * k.rank_host_seconds)
    if mesh.pp > 1 and far:
        less = k.far_rank_host_seconds - k.staged_rank_host_seconds
        far += k.layer_host_seconds - min(mesh.tp, node) * less
    return np.where(slow, max(far, k.layer_host_seconds), quick)


def _head(model: Architecture, mesh: Plan, b: Column, machine: Machine, k: Constants) -> Column:
    """Seconds of the head and the loss, forward and backward: the logits are written and read in fp32 as well.

    A module that predicts a further token has them once more, and a matrix from 2h to h; its layer counts as one.
    """
    rate, memory = rates(machine, k)
    operands, n, h = memory / k.operand_passes, model.mtp_modules, model.hidden
    tokens, columns = b * mesh.tokens_of(model), model.vocab / mesh.tp
    product = product_seconds(tokens, h, columns, rate, operands) * (mesh.passes / 3)
    once = np.asarray(product + 8 * tokens * columns * (k.logit_passes or k.kept_passes) / memory) * 3
    return (1 + n) * once + 3 * n * product_seconds(tokens, 2 * h, h / mesh.tp, rate, operands) if n else once


def _tensor_seconds(model: Architecture, mesh: Plan, c: Any, full: Column, machine: Machine, k: Constants) -> Column:
    """Seconds of a layer's messages between tensor ranks for a micro-batch, forward and backward."""
    if mesh.tp == 1:
        return 0.0 * c.micro_batch
    elements = c.micro_batch * tp.layer_elements(1, mesh.tokens_of(model), model.hidden) / 4
    split = np.where(c.keep_gathered, sp.phases("keep"), sp.phases("again"))
    phases = np.where(c.sequence_parallel, split, sp.phases("none")) + np.where(full, 4, 0)
    return np.asarray(phases * half_all_reduce(machine.group(mesh, ("tp",), link_shares(k)), 2 * elements))


def _context_seconds(
    model: Architecture, mesh: Plan, b: Column, attention: Column, machine: Machine, k: Constants
) -> Column:
    """Seconds of a layer's keys and values on their way round that attention does not hide."""
    if mesh.cp == 1:
        return 0.0 * b
    sent = 2 * cp.ring_elements(1, mesh.seq_of(model), max(model.num_kv_heads // mesh.tp, 1), model.head_dim, mesh.cp)
    if model.latent is not None:
        sent *= (1 + model.latent.value_dim / model.head_dim) / 2
    axis = machine.group(mesh, ("cp",), link_shares(k))
    rate = axis.inside_bytes_per_s if axis.num_nodes == 1 else axis.across_bytes_per_s
    travel = b * sent / rate + 3 * (mesh.cp - 1) * axis.slowest_alpha_seconds
    return seen_seconds(travel, 3.5 * attention, 0, k)


def _pipeline_seconds(model: Architecture, mesh: Plan, c: Any, machine: Machine, k: Constants) -> Column:
    """Seconds of a micro-batch's messages between stages on one rank: each tensor rank sends its part."""
    entries = c.micro_batch * mesh.tokens_of(model) * model.hidden / mesh.tp
    near = mesh.world_size <= machine.node
    link = machine.accelerator.link if near else machine.network
    rate = link.link_bytes_per_s * (k.inside_share if near else k.across_share)
    return np.asarray(2 * c.chunks * (2 * entries / rate + k.across_alpha_seconds))


def _bubble_units(mesh: Plan, c: Any, again: Column) -> Column:
    """Idle time of a rank in micro-batches, forward and backward, which computes `again` of a forward pass."""

    def units(schedule: str, v: int, again: float) -> float:
        weights = mesh.passes - 2.0
        return pp.idle_seconds(schedule, mesh.pp, 1.0, 1 + again, weights, v) / (2 + again + weights)

    keys = list(zip(c.schedule.tolist(), c.chunks.tolist(), again.tolist(), strict=True))
    known = {key: units(*key) for key in set(keys)}
    return np.array([known[key] for key in keys])
