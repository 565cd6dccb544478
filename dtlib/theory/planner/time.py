"""The seconds of a step, term by term, of one plan or of many that share a mesh.

Letters: T tokens of a micro-batch on a rank, F operations and B bytes a second of a card. A product of (M, K) and (K,
N) takes 2MKN/F + c·2(MK + KN + MN)/B: its operations at the rate of large matrices, and its operands c times through
memory, since tiles are read more than once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtlib.theory import cluster, cp, pp, sp, tp
from dtlib.theory.activations import layer_activations
from dtlib.theory.breakdown import Breakdown
from dtlib.theory.footprint import piece_layers, stage_parameters
from dtlib.theory.formula import formula
from dtlib.theory.memory import recipe
from dtlib.theory.models import Architecture, checked_dense, layer_of_rank

from .constants import FITTED, Constants
from .plan import Machine, Plan
from .products import product_seconds

Column = NDArray[Any]
CHOICES = (
    "zero", "sequence_parallel", "keep_gathered", "micro_batch", "micro_batches", "chunks", "schedule", "recompute",
)  # fmt: skip
"""What may differ between plans of one mesh."""


@dataclass(frozen=True)
class StepTime(Breakdown):
    """Seconds of one step, of the slowest stage.

    What is computed: products of matrices, the core of attention, what is bound by memory, what is computed again, the
    update. What is waited for: kernels that the host has not launched yet, messages of each axis that nothing hides,
    and the pipeline's bubble.
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
    model = checked_dense(model, "the planner")
    plan.check(model)
    if plan.world_size != machine.gpus:
        raise ValueError(f"dp·tp·pp·cp must be gpus={machine.gpus}, not {plan.world_size}")
    found = step_terms(model, plan, {each: np.array([getattr(plan, each)]) for each in CHOICES}, machine, constants)
    return StepTime(**{name: float(column[0]) for name, column in found.items()})


def step_terms(
    model: Architecture, mesh: Plan, choices: Mapping[str, Column], machine: Machine, constants: Constants
) -> dict[str, Column]:
    """The terms of `StepTime` in seconds, one entry a choice: plans on the mesh of `mesh` that differ in `CHOICES`.

    `choices` has a column of equal length for each. Nothing is checked: `step_time` and `search` do.
    """
    c, k = SimpleNamespace(**choices), constants
    c.micro_batch, c.micro_batches = c.micro_batch.astype(float), c.micro_batches.astype(float)  # ints overflow
    layers, last, parameters = stage_sizes(model, mesh.tp, mesh.pp)
    full = c.recompute == "full"
    again = np.where(full, 1.0, 0.0)
    once = _layer(model, mesh, c.micro_batch, c.sequence_parallel, machine, k)
    matmuls, attention, elementwise = once["matmuls"], once["attention"], once["elementwise"]
    core_again = np.where(c.recompute == "none", 0.0, attention)
    forward = matmuls + attention + elementwise
    recomputed = np.where(full, forward - (once["last"] if mesh.early_stop else 0), core_again)
    tensor = _tensor_seconds(model, mesh, c, full, machine, k)
    context = _context_seconds(model, mesh, c.micro_batch, attention, machine, k) * (1 + again / 3)
    if mesh.tp_overlap:  # pieces of a product travel while others are computed; the last of eight is seen
        tensor = _seen(tensor, matmuls * (3 + again), tensor / 8, k)
    busy = matmuls * 3 + attention * 3.5 + elementwise * 3 + recomputed + tensor + context
    host = np.maximum(0, k.layer_host_seconds * (1 + again / 3) - busy)
    head = _head(model, mesh, c.micro_batch, machine, k) * 3
    # the last stage has the head, and fewer layers where they do not divide
    is_last = last * (busy + host) + head > layers * (busy + host)
    slow = np.where(is_last, last, layers)
    m = c.micro_batches
    micro = slow * (busy + host) + head * is_last
    messages = _pipeline_seconds(model, mesh, c, machine, k) if mesh.pp > 1 else 0 * m
    per_param = recipe(mesh.recipe)
    owned = parameters / np.where(c.zero > 0, mesh.dp * mesh.cp, 1)
    seconds = {
        "matmuls": m * slow * matmuls * 3,
        "attention": m * slow * attention * 3.5,
        "elementwise": m * slow * elementwise * 3,
        "recompute": m * slow * recomputed,
        "head": m * head * is_last,
        "optimizer": owned * 2 * per_param.bytes_per_param / machine.accelerator.memory_bytes_per_s
        + k.step_host_seconds,
        "host": m * slow * host,
        "tensor_parallel": m * slow * tensor,
        "context_parallel": m * slow * context,
        "pipeline_messages": m * messages,
        "data_parallel": _data_seconds(model, mesh, c.zero, m, micro, parameters, machine, k),
        "bubble": _bubble_units(mesh.pp, c) * (layers * (busy + host) + messages),  # the other stages' micro-batches
    }
    return {name: np.broadcast_to(np.asarray(value, float), m.shape) for name, value in seconds.items()}


@lru_cache(maxsize=4096)
def stage_sizes(model: Architecture, tp: int, pp: int) -> tuple[int, int, int]:
    """Layers of the largest stage and of the last, and the most parameters of a rank."""
    layers = [sum(pieces) for pieces in piece_layers(model.num_layers, pp)]
    parameters = max(stage_parameters(model, tp, pp, stage).total for stage in {0, pp // 2, pp - 1})
    return max(layers), layers[-1], parameters


@lru_cache(maxsize=4096)
def kept_bytes(
    model: Architecture, seq: int, tp: int, split: bool, attention: Any, dropout: bool, recompute: str = "none"
) -> float:
    """Bytes that a layer keeps of one sequence."""
    return layer_activations(
        model, 1, seq=seq, tp=tp, sequence_parallel=split, attention=attention, dropout=dropout, recompute=recompute
    ).total


def _rates(machine: Machine, k: Constants) -> tuple[float, float]:
    """Operations a second of large products, and bytes a second of memory.

    Where nobody has measured a card's products, 0.8 of its peak stands in, as on an H100.
    """
    card = machine.accelerator
    measured = card.measured_half_flop_per_s or 0.8 * card.half_flop_per_s
    return measured * k.matmul_share, card.memory_bytes_per_s


def _layer(
    model: Architecture, mesh: Plan, b: Column, split: Column, machine: Machine, k: Constants
) -> dict[str, Column]:
    """Seconds of one layer's forward pass on a rank."""
    rate, memory = _rates(machine, k)
    operands = memory / k.operand_passes
    s, t, h = mesh.tokens_of(model), mesh.tp, model.hidden
    tokens = b * s
    q, kv, f = model.query_width / t, max(model.kv_width / t, model.head_dim), model.ffn_hidden / t
    shapes = [(h, q + 2 * kv), (q, h), (h, f * (2 if model.gated else 1)), (f, h)]
    products = [product_seconds(tokens, rows, columns, rate, operands) for rows, columns in shapes]
    kept = {each: kept_bytes(model, s, t, each, mesh.attention, mesh.dropout) for each in (False, True)}
    elementwise = b * np.where(split, kept[True], kept[False]) * k.kept_passes / memory
    # a rank of a context group has s queries of s · cp keys, of which a causal mask leaves half, a window fewer
    scores = cp.forward_flops(1, s * s * mesh.cp, model.num_heads, model.head_dim) / t * b
    scores = scores * model.score_share(s * mesh.cp)
    if mesh.attention == "flash":
        attention = scores / 2 / (_rates(machine, k)[0] / k.matmul_share * k.attention_share)
    else:
        attention = b * model.num_heads / t * 2 * product_seconds(s, model.head_dim, s, rate, operands)
    return {"matmuls": sum(products), "last": products[-1], "attention": attention, "elementwise": elementwise}


def _head(model: Architecture, mesh: Plan, b: Column, machine: Machine, k: Constants) -> Column:
    """Seconds of the head and the loss, forward: the logits are written and read in fp32 as well."""
    rate, memory = _rates(machine, k)
    tokens, columns = b * mesh.tokens_of(model), model.vocab / mesh.tp
    product = product_seconds(tokens, model.hidden, columns, rate, memory / k.operand_passes)
    return np.asarray(product + 8 * tokens * columns * k.kept_passes / memory)


def _shares(k: Constants) -> tuple[float, float, float]:
    return k.inside_share, k.across_share, k.across_alpha_seconds


def _half(machine: Machine, mesh: Plan, axes: tuple[str, ...], full_bytes: Any, k: Constants, messages: int = 1) -> Any:
    """Seconds of half an all-reduce of `full_bytes` in so many equal messages, over a group of ranks."""
    if mesh.size(*axes) == 1:
        return 0 * full_bytes
    return messages * cluster.two_level(machine.group(mesh, axes, _shares(k)), full_bytes / messages, 1)


def _tensor_seconds(model: Architecture, mesh: Plan, c: Any, full: Column, machine: Machine, k: Constants) -> Column:
    """Seconds of a layer's messages between tensor ranks for a micro-batch, forward and backward."""
    if mesh.tp == 1:
        return 0.0 * c.micro_batch
    elements = c.micro_batch * tp.layer_elements(1, mesh.tokens_of(model), model.hidden) / 4
    split = np.where(c.keep_gathered, sp.phases("keep"), sp.phases("again"))
    phases = np.where(c.sequence_parallel, split, sp.phases("none")) + np.where(full, 4, 0)
    return np.asarray(phases * _half(machine, mesh, ("tp",), 2 * elements, k))


def _context_seconds(
    model: Architecture, mesh: Plan, b: Column, attention: Column, machine: Machine, k: Constants
) -> Column:
    """Seconds of a layer's keys and values on their way round that attention does not hide."""
    if mesh.cp == 1:
        return 0.0 * b
    sent = 2 * cp.ring_elements(1, mesh.seq_of(model), max(model.num_kv_heads // mesh.tp, 1), model.head_dim, mesh.cp)
    axis = machine.group(mesh, ("cp",), _shares(k))
    rate = axis.inside_bytes_per_s if axis.num_nodes == 1 else axis.across_bytes_per_s
    travel = b * sent / rate + 3 * (mesh.cp - 1) * axis.slowest_alpha_seconds
    return _seen(travel, 3.5 * attention, 0, k)


def _pipeline_seconds(model: Architecture, mesh: Plan, c: Any, machine: Machine, k: Constants) -> Column:
    """Seconds of a micro-batch's messages between stages on one rank: each tensor rank sends its part."""
    entries = c.micro_batch * mesh.tokens_of(model) * model.hidden / mesh.tp
    near = mesh.world_size <= machine.node
    link = machine.accelerator.link if near else machine.network
    rate = link.link_bytes_per_s * (k.inside_share if near else k.across_share)
    return np.asarray(2 * c.chunks * (2 * entries / rate + k.across_alpha_seconds))


def _data_seconds(
    model: Architecture, mesh: Plan, zero: Column, m: Column, micro: Column, parameters: int, machine: Machine,
    k: Constants,
) -> Column:  # fmt: skip
    """Seconds of weights and gradients between data-parallel ranks that nothing hides.

    Gradients travel behind the backward pass of the last micro-batch (stage 2: of each, since none keeps them whole),
    the weights of stages 1 and 2 behind the forward pass of the first; a layer's worth is seen. Stage 3: each layer
    behind its neighbours, in every micro-batch.
    """
    group, per_param = ("dp", "cp"), recipe(mesh.recipe).per_param
    if mesh.size(*group) == 1:
        return 0.0 * micro
    units = -(-model.num_layers // mesh.pp)
    gather = {u: _half(machine, mesh, group, parameters * per_param.weights, k, u) for u in (1, units)}
    scatter = {u: _half(machine, mesh, group, parameters * per_param.gradients, k, u) for u in (1, units)}
    reduce = np.where(zero == 0, 2 * scatter[1], scatter[1])
    seen = np.where(zero == 2, m, 1) * _seen(reduce, 2 / 3 * micro, scatter[1] / units, k)
    seen = seen + np.where(zero > 0, _seen(gather[1], micro / 3, gather[1] / units, k), 0)
    streamed = _seen(2 * gather[units] + scatter[units], micro, 0, k)
    first = _half(machine, mesh, group, layer_of_rank(model, mesh.tp).total * per_param.weights, k)
    return np.where(zero == 3, m * streamed + 2 * first, seen)


def _seen(travel: Any, behind: Column, least: Any, k: Constants) -> Column:
    """Seconds that messages add to the computation `behind` which they travel.

    At least `least` of them nothing hides. The rest is not free: whoever sends takes multiprocessors and memory from
    the products, `contention_share` of a second in each second.
    """
    open_seconds = np.maximum(travel - k.overlap_share * behind, least)
    return np.asarray(open_seconds + k.contention_share * (travel - open_seconds))


def _bubble_units(p: int, c: Any) -> Column:
    """Idle time of a rank in micro-batches, forward and backward."""

    def units(schedule: str, v: int, recompute: str) -> float:
        backward = 2.0 if recompute == "full" else 1.0
        return pp.idle_seconds(schedule, p, 1.0, backward, 1.0, v) / (2 + backward)

    keys = list(zip(c.schedule.tolist(), c.chunks.tolist(), c.recompute.tolist(), strict=True))
    known = {key: units(*key) for key in set(keys)}
    return np.array([known[key] for key in keys])
