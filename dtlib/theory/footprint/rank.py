"""The memory of one rank, part by part: states, activations, and what is whole for a moment."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from dtlib.theory.activations import layer_activations
from dtlib.theory.breakdown import Breakdown, over
from dtlib.theory.memory import ModelStates, recipe
from dtlib.theory.models import (
    Architecture,
    LayerParameters,
    ModelParameters,
    checked_model,
    last_has_experts,
    layer_of_rank,
    mtp_parameters,
    norm_parameters,
)
from dtlib.theory.zero import states

from .setup import Setup
from .stages import chunks_in_flight, embeddings_in_flight, expert_layers, stage_parameters


@dataclass(frozen=True)
class RankMemory(Breakdown):
    """Bytes on one rank at the fullest moment of a step.

    The model states as `ModelStates` names them. `layer_activations` is what all layers keep, `recomputed_layer` what
    the one that is computed again adds, `embedding_activations` the dropout mask behind the embedding,
    `head_activations` the inputs of the last norm and of the head, and `logits` the scores in fp32. `gathered_weights`
    and `unsharded_gradients` are the modules that stages 2 and 3 hold whole for a moment, `logits_gradient` is what the
    loss hands back, and `all_to_all` what one exchange of tokens between experts sends and receives, with a copy of a
    token for each of its experts: an upper bound where, as in `ranks.ep`, one copy goes to a rank that holds several
    (`theory.ep.expected_visits`). Modules that predict further tokens count among the layers, with logits of their own.

    `fp8_copies` are the weights of layers in 8 bits, and once more transposed: of all that a rank holds, at stage 3 of
    what is gathered. Libraries that make them for each product, or keep inputs in 8 bits, need less.

    Not counted: buffers of the communication library, the allocator's gaps, the runtime's own memory.
    """

    weights: float
    gradients: float
    master_weights: float
    main_gradients: float
    first_moment: float
    second_moment: float
    moment_scales: float
    layer_activations: float
    recomputed_layer: float
    embedding_activations: float
    head_activations: float
    logits: float
    gathered_weights: float
    unsharded_gradients: float
    logits_gradient: float
    all_to_all: float = 0
    fp8_copies: float = 0

    @property
    def states(self) -> float:
        """Bytes of weights, gradients and optimizer that stay from step to step."""
        return sum(self.parts[field.name] for field in fields(ModelStates))

    @property
    def activations(self) -> float:
        """Bytes of everything kept for the backward pass."""
        kept = self.layer_activations + self.recomputed_layer
        return kept + self.embedding_activations + self.head_activations + self.logits

    @property
    def transient(self) -> float:
        """Bytes that are there for a moment: whole modules, the gradient of the logits, tokens under way."""
        return (
            self.gathered_weights + self.unsharded_gradients + self.logits_gradient + self.all_to_all + self.fp8_copies
        )


def rank_memory(model: Architecture | str, setup: Setup, stage: int | None = None) -> RankMemory:
    """Bytes on a rank of pipeline stage `stage` (default: the fullest one) when `model` is trained as `setup` says.

    All parts are upper bounds of the same moment: full states, every activation, the largest modules gathered.
    ``ValueError`` that lists what is possible where the model cannot be cut like that.
    """
    model = checked_model(model)
    if stage is None:
        return max(memory_by_stage(model, setup), key=lambda memory: memory.total)
    setup.check(model)
    kept = rank_states(model, setup, stage)
    return RankMemory(**kept.parts, **_activations(model, setup, stage), **_whole_modules(model, setup, stage))


def memory_by_stage(model: Architecture | str, setup: Setup) -> list[RankMemory]:
    """`rank_memory` of every pipeline stage, the first stage first."""
    model = checked_model(model)
    setup.check(model)
    return [rank_memory(model, setup, stage) for stage in range(setup.pp)]


def rank_states(model: Architecture, setup: Setup, stage: int) -> ModelStates:
    """Bytes of the states on a rank of `stage`, which ZeRO shards: over dp · cp ranks (or `setup.shard` of them), but
    over as many/ep those of experts."""
    whole = _held(model, setup, stage)
    experts = whole.experts
    if model.mtp_modules and stage == setup.pp - 1:
        experts += model.mtp_modules * mtp_parameters(model, setup.tp, setup.ep).experts
    ranks = setup.shards
    kept = states(whole.total - experts, ranks, setup.zero, setup.least_recipe)
    if setup.adapters is not None:
        return kept + states(trained_parameters(model, setup, stage), ranks, setup.zero, setup.trained_recipe)
    return kept + states(experts, setup.expert_copies, setup.zero, setup.trained_recipe) if experts else kept


def host_states(model: Architecture | str, setup: Setup) -> float:
    """Bytes that the host keeps for the rank with the most, and as many for each other card of a node: the optimizer's
    states with `Setup.offload`, else nothing."""
    model = checked_model(model)
    setup.check(model)
    plain = replace(setup, offload=False)
    return max(
        rank_states(model, plain, each).total - rank_states(model, setup, each).total for each in range(setup.pp)
    )


def trained_parameters(model: Architecture, setup: Setup, stage: int) -> int:
    """Parameters on a rank of `stage` that have gradients: all, or those of adapters."""
    if setup.adapters is None:
        return _held(model, setup, stage).total
    return sum(setup.pieces(model)[stage]) * setup.adapters.layer_parameters(model, setup.tp)


def _held(model: Architecture, setup: Setup, stage: int) -> ModelParameters:
    """Parameters on a rank of `stage`."""
    pieces = setup.pieces(model)
    return stage_parameters(model, setup.tp, setup.pp, stage, setup.chunks, setup.ep, pieces=pieces)


def _activations(model: Architecture, setup: Setup, stage: int) -> dict[str, float]:
    def layer(recompute: str, with_experts: bool) -> float:
        return layer_activations(
            model,
            setup.micro_batch,
            seq=setup.tokens_of(model),
            tp=setup.tp,
            sequence_parallel=setup.sequence_parallel,
            recompute=recompute,
            attention=setup.attention,
            dropout=setup.dropout,
            with_experts=with_experts,
            imbalance=setup.imbalance,
            adapters=setup.adapters,
        ).total

    p, m, v, n = setup.pp, setup.num_micro_batches, setup.chunks, model.mtp_modules
    first, last = stage == 0, stage == p - 1
    outside = setup.tp if setup.sequence_parallel else 1
    entries = over(setup.micro_batch * setup.tokens_of(model) * model.hidden, outside)
    pieces = setup.pieces(model)[stage]
    of_experts = [0] * len(pieces) if model.experts is None else expert_layers(model, p, stage, v)
    counts = [(layers - sparse, sparse) for layers, sparse in zip(pieces, of_experts, strict=True)]
    if last and n:
        dense, sparse = counts.pop()
        counts.append((dense, sparse + n) if last_has_experts(model) else (dense + n, sparse))
    kinds = [kind for kind in (False, True) if any(count[kind] for count in counts)]
    kept = {kind: layer(setup.recompute, kind) for kind in kinds}
    plain = {kind: layer("none", kind) if setup.recompute != "none" else kept[kind] for kind in kinds}
    firsts = counts
    if setup.recompute_layers is not None:
        most = setup.recompute_layers
        experts = [0] * len(pieces) if model.experts is None else expert_layers(model, p, stage, v, most)
        firsts = [(min(most, layers) - sparse, sparse) for layers, sparse in zip(pieces, experts, strict=True)]
    beside = [sum((count[kind] - first[kind]) * plain[kind] for kind in kinds)
              for count, first in zip(counts, firsts, strict=True)]  # fmt: skip
    pieces_kept = [sum(first[kind] * kept[kind] for kind in kinds) + rest
                   for first, rest in zip(firsts, beside, strict=True)]  # fmt: skip
    if last:
        pieces_kept[-1] += 2 * 4 * n * entries  # a module's inputs: of two norms, and of the matrix from 2h
    # the first layers of a piece are computed again when its others are freed
    again = [plain[kind] - kept[kind] - rest for first, rest in zip(firsts, beside, strict=True)
             for kind in kinds if first[kind]]  # fmt: skip
    scores = setup.micro_batch * setup.tokens_of(model) * -(-model.vocab // setup.tp)
    return {
        "layer_activations": max(pieces_kept) * chunks_in_flight(p, stage, m, v),
        "recomputed_layer": max([0, *again]),
        "embedding_activations": entries * embeddings_in_flight(p, m, v) if first and setup.dropout else 0,
        "head_activations": (1 + n) * (2 if setup.adapters else 4) * entries if last else 0,  # of norm, of matrix
        "logits": (1 + n) * 4 * scores if last else 0,
        "logits_gradient": 4 * scores if last else 0,
        "all_to_all": _exchanged(model, setup, entries) if True in kinds else 0,
    }


def _exchanged(model: Architecture, setup: Setup, entries: float) -> float:
    """Bytes of the copies that a rank sends to experts, one each, and of those that it gets, in two bytes an entry."""
    if setup.ep == 1 or model.experts is None:
        return 0
    return 2 * entries * model.experts.top_k * (1 + setup.imbalance)


def _whole_modules(model: Architecture, setup: Setup, stage: int) -> dict[str, float]:
    """Bytes of the largest modules, whole: layers, the embedding with the positions, the head with the norm."""
    per_param = recipe(setup.recipe).per_param
    sizes = _module_sizes(model, setup, stage) if setup.zero >= 2 and setup.shards > 1 else [0]
    gathered = sum(sizes[: 1 + setup.prefetched]) if setup.zero >= 3 else 0
    held = _held(model, setup, stage)
    most = setup.adapters.layer_parameters(model, setup.tp) if setup.adapters and sizes[0] else 0
    copied = gathered or held.total - held.embedding - held.positions - held.head - held.norms
    return {
        "fp8_copies": 2 * copied if setup.precision == "fp8" else 0,
        "gathered_weights": gathered * per_param.weights,
        "unsharded_gradients": (most if setup.adapters else sizes[0]) * per_param.gradients,
    }


def _module_sizes(model: Architecture, setup: Setup, stage: int) -> list[int]:
    """Parameters of each module of a rank that are shared, the largest first: no experts that one rank alone holds."""

    def shared(found: LayerParameters) -> int:
        return found.total - (found.experts if setup.expert_copies == 1 else 0)

    parameters, num_layers = _held(model, setup, stage), sum(setup.pieces(model)[stage])
    sparse = sum(expert_layers(model, setup.pp, stage, setup.chunks))
    first, last = stage == 0, stage == setup.pp - 1
    sizes = (
        [shared(mtp_parameters(model, setup.tp, setup.ep))] * model.mtp_modules if last and model.mtp_modules else []
    )
    for kind, count in ((False, num_layers - sparse), (True, sparse)):
        if count:
            sizes += [shared(layer_of_rank(model, setup.tp, setup.ep, with_experts=kind))] * count
    before = parameters.embedding + parameters.positions + first * model.embedding_norm * norm_parameters(model)
    behind = parameters.head + last * norm_parameters(model)
    return sorted([*sizes, *(end for end in (before, behind) if end)], reverse=True) or [0]
