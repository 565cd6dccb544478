"""Which law each term of a plan's time and memory is from, and what that law says of the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from dtlib.theory import cp, ep, pp, tp, zero
from dtlib.theory.activations import layer_activations, recompute_factor
from dtlib.theory.breakdown import Breakdown
from dtlib.theory.formula import formulas
from dtlib.theory.memory import recipe, training_flops_per_token
from dtlib.theory.models import Architecture, active_parameters
from dtlib.theory.timing import CAST_BYTES, Plan, host_bytes
from dtlib.theory.units import TFLOP, format_bytes

Number = Callable[[Architecture, Plan], str]


@dataclass(frozen=True)
class Law:
    """What a term is, the name of its formula in the ledger, and what this formula says of a plan, in words."""

    meaning: str
    formula: str
    number: Number


@dataclass(frozen=True)
class Term:
    """A term of a plan: its `value` in seconds or bytes and share of the total, its law, and the law's `number`.

    `chapter` is the stem of the chapter that derives the law.
    """

    name: str
    value: float
    share: float
    meaning: str
    formula: str
    chapter: str
    number: str


def _flops(model: Architecture, plan: Plan) -> str:
    tokens = plan.sequences * plan.seq_of(model)
    done = training_flops_per_token(active_parameters(model).total, model.num_layers, model.query_width, 1).dense
    return f"{done * plan.passes / 3 * tokens / plan.world_size / TFLOP:,.1f} TFLOP a card in a step"


def _scores(model: Architecture, plan: Plan) -> str:
    tokens, keys = plan.tokens_of(model), plan.seq_of(model)
    flops = cp.forward_flops(plan.micro_batch, tokens * keys, model.num_heads, model.head_dim) / plan.tp
    return f"{flops * model.score_share(keys) / 2 / TFLOP:,.3g} TFLOP a layer and micro-batch forward, causal"


def _moved(model: Architecture, plan: Plan) -> str:
    return _kept(model, plan.changed(recompute="none", recompute_layers=None))


def recompute_of(plan: Plan) -> str:
    """What a plan computes again: none, selective, full, or so many layers of each piece."""
    layers = plan.recompute_layers
    return plan.recompute if layers is None else f"{layers} layer{'s' * (layers > 1)}"


def _again(model: Architecture, plan: Plan) -> str:
    factor = recompute_factor(plan.seq_of(model), model.hidden, plan.recompute)
    return f"{factor:.3g} times the operations of a layer, recompute {recompute_of(plan)}"


def _kept(model: Architecture, plan: Plan) -> str:
    kept = layer_activations(
        model, plan.micro_batch, seq=plan.tokens_of(model), tp=plan.tp, sequence_parallel=plan.sequence_parallel,
        attention=plan.attention, dropout=plan.dropout, recompute=plan.recompute, imbalance=plan.imbalance,
        with_experts=model.num_expert_layers > 0, adapters=plan.adapters,
    )  # fmt: skip
    said = f"{format_bytes(kept.total)} a layer and micro-batch, recompute {recompute_of(plan)}"
    return said if plan.recompute_layers is None else f"{said}; of the others {_moved(model, plan)}"


def _tensor(model: Architecture, plan: Plan) -> str:
    sizes = plan.micro_batch, plan.tokens_of(model), model.hidden
    others = "" if plan.recompute_layers is None else f", {tp.layer_elements(*sizes):,} of those not computed again"
    return f"{tp.layer_elements(*sizes, recompute=plan.recompute):,} elements a layer and micro-batch{others}"


def _ring(model: Architecture, plan: Plan) -> str:
    heads = max(model.num_kv_heads // plan.tp, 1)
    sent = cp.ring_elements(plan.micro_batch, plan.seq_of(model), heads, model.head_dim, plan.cp)
    return f"{sent:,.0f} elements a layer and micro-batch forward"


def _boundary(model: Architecture, plan: Plan) -> str:
    sizes = plan.micro_batches, plan.micro_batch, plan.tokens_of(model), model.hidden
    return f"{pp.boundary_elements(plan.pp, *sizes, plan.chunks):,} elements over all cuts of a pipeline in a step"


def _traffic(model: Architecture, plan: Plan) -> str:
    ranks, width = plan.size("dp", "cp"), recipe(plan.recipe).per_param
    groups = 1 if plan.shard is None else ranks // plan.shard
    among = f"{groups} groups of {plan.shard}, ZeRO {plan.zero}" if groups > 1 else f"{ranks} ranks, ZeRO {plan.zero}"
    if plan.adapters:
        return f"gradients of adapters{' and all weights' if plan.zero == 3 else ' alone'}, {among}"
    if plan.shard is not None:
        of = zero.hybrid_traffic(width.gradients, ranks, plan.shard, plan.zero, width.weights)
        return f"{of.within_node:.3g} bytes a parameter of a rank in its group, {of.across_nodes:.3g} across, {among}"
    sent = zero.traffic(width.gradients, ranks, plan.zero, width.weights).total
    return f"{sent:.3g} bytes a parameter of a rank, {among}"


def _idle(model: Architecture, plan: Plan) -> str:
    again = 1.0 if plan.recompute == "full" else 0.0  # in units of a forward pass of a micro-batch
    if plan.recompute_layers is not None:
        again = min(1.0, plan.recompute_layers * plan.chunks * plan.pp / model.num_layers)
    own = plan.passes - 2  # for the gradient of the weights
    idle = pp.idle_seconds(plan.schedule, plan.pp, 1, 1 + again, own, plan.chunks) / (2 + again + own)
    return f"as long idle as {idle:.3g} of {plan.micro_batches} micro-batches take"


def _states(_: Architecture, plan: Plan) -> str:
    ranks = plan.shards
    each = zero.states(1, ranks, plan.zero, plan.least_recipe).total
    of = ", all states of adapters" if plan.adapters else ""
    return f"{each:.4g} bytes a parameter of a rank{of}, {ranks} ranks, ZeRO {plan.zero}"


def _experts(model: Architecture, plan: Plan) -> str:
    if model.experts is None:
        return "no experts"
    of, tokens = model.experts, plan.micro_batch * plan.tokens_of(model)
    sent = ep.dispatch_elements(tokens, model.hidden, of.num_experts, of.top_k, plan.ep)
    return f"{sent:,.0f} elements a layer and micro-batch there"


def _buffers(model: Architecture, plan: Plan) -> str:
    entries = plan.micro_batch * plan.tokens_of(model) * model.hidden
    return f"{entries // (plan.tp if plan.sequence_parallel else 1):,} elements in and as many back, each twice"


def _modules(_: Architecture, plan: Plan) -> str:
    gathered = f"weights of {1 + plan.prefetched} modules and " if plan.zero == 3 else ""
    return f"{gathered}gradients of one"


def _logits(model: Architecture, plan: Plan) -> str:
    scores = plan.micro_batch * plan.tokens_of(model) * (model.vocab // plan.tp)
    return f"{scores:,} scores of a micro-batch on the last stage"


def _adapters(model: Architecture, plan: Plan) -> str:
    of = plan.adapters
    return "none" if of is None else f"rank {of.rank}: {of.layer_parameters(model, plan.tp):,} parameters a layer"


def _host(which: int, words: str) -> Number:
    return lambda _, plan: f"{host_bytes(plan)[which]:.3g} bytes a parameter {words}, nothing hidden"


def _fixed(words: str) -> Number:
    return lambda _, __: words


_TIMED = "planner.step_time"
OF_TIME: Mapping[str, Law] = MappingProxyType(
    {
        "matmuls": Law("products of matrices, forward and backward", "memory.training_flops_per_token", _flops),
        "attention": Law("scores and their sums, forward and backward", "memory.forward_flops_per_token", _scores),
        "elementwise": Law("all that is no product moves what is kept", "activations.layer_activations", _moved),
        "recompute": Law("what is computed again", "activations.recompute_factor", _again),
        "head": Law("the scores and the loss, where the last stage is the slowest", "planner.product_share", _logits),
        "optimizer": Law("states through memory, and the host between steps", "zero.bytes_per_param", _states),
        "host": Law("kernels that the host has not launched yet", _TIMED, _fixed("the constant layer_host_seconds")),
        "tensor_parallel": Law("messages between ranks of tp", "tp.layer_elements", _tensor),
        "context_parallel": Law("keys and values that attention does not hide", "cp.ring_elements", _ring),
        "pipeline_messages": Law("messages between stages", "pp.boundary_elements", _boundary),
        "data_parallel": Law("weights and gradients that nothing hides", "zero.traffic", _traffic),
        "bubble": Law("waiting for other stages", "pp.idle_seconds", _idle),
        "casts": Law(
            "casts to fp8, with transposed copies", _TIMED, _fixed(f"{CAST_BYTES} bytes an entry of each matrix")
        ),
        "adapters": Law("products of adapters, forward and backward", "planner.product_share", _adapters),
        "host_link": Law("gradients to the host, weights back", "zero.traffic", _host(0, "travel")),
        "host_update": Law("the update in the host's memory", "zero.bytes_per_param", _host(1, "are read or written")),
        "expert_parallel": Law("tokens to their experts and back", "ep.dispatch_elements", _experts),
    }
)
"""The law of each term of `StepTime`."""

_PLANNED = "planner.plan_memory"
OF_MEMORY: Mapping[str, Law] = MappingProxyType(
    {
        "states": Law("weights, gradients, optimizer", "zero.bytes_per_param", _states),
        "activations": Law("what layers keep for backward", "activations.layer_activations", _kept),
        "logits": Law("scores and their gradient, with copies", _PLANNED, _logits),
        "gathered": Law("modules that are whole for a moment", "zero.gathered_bytes", _modules),
        "pipeline_buffers": Law("inputs and gradients under way between stages", _PLANNED, _buffers),
        "fixed": Law("runtime, libraries", _PLANNED, _fixed("the constant runtime_bytes")),
        "fp8_copies": Law("weights of layers in fp8, and transposed", _PLANNED, _fixed("2 bytes a weight")),
        "all_to_all": Law("copies of tokens under way to experts", "ep.dispatch_elements", _experts),
    }
)
"""The law of each term of `PlanMemory`."""


def explained(parts: Breakdown, model: Architecture, plan: Plan, laws: Mapping[str, Law]) -> list[Term]:
    """The terms of `parts` that are not 0, each with its law: their values add up to the total, in this order."""
    known, total = formulas(), parts.total
    hybrid = {"zero.traffic": "zero.hybrid_traffic"} if plan.shard is not None else {}
    laws = {name: replace(law, formula=hybrid.get(law.formula, law.formula)) for name, law in laws.items()}
    found = ((name, value, laws[name]) for name, value in parts.parts.items() if value)
    return [
        Term(
            name.replace("_", " "), value, value / total, law.meaning, law.formula, known[law.formula].chapter,
            law.number(model, plan),
        )
        for name, value, law in found
    ]  # fmt: skip
