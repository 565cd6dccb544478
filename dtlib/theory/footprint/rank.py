"""The memory of one rank, part by part: states, activations, and what is whole for a moment."""

from __future__ import annotations

from dataclasses import dataclass, fields

from dtlib.theory.activations import layer_activations
from dtlib.theory.breakdown import Breakdown, over
from dtlib.theory.memory import ModelStates, recipe
from dtlib.theory.models import Architecture, checked_model, layer_of_rank, norm_parameters
from dtlib.theory.zero import states

from .setup import Setup
from .stages import chunks_in_flight, embeddings_in_flight, piece_layers, stage_parameters


@dataclass(frozen=True)
class RankMemory(Breakdown):
    """Bytes on one rank at the fullest moment of a step.

    The model states as `ModelStates` names them. `layer_activations` is what all layers keep, `recomputed_layer` what
    the one that is computed again adds, `embedding_activations` the dropout mask behind the embedding,
    `head_activations` the inputs of the last norm and of the head, and `logits` the scores in fp32.
    `gathered_weights` and `unsharded_gradients` are the modules that stages 2 and 3 hold whole for a moment, and
    `logits_gradient` is what the loss hands back.

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
        """Bytes that are there for a moment: whole modules, and the gradient of the logits."""
        return self.gathered_weights + self.unsharded_gradients + self.logits_gradient


def rank_memory(model: Architecture | str, setup: Setup, stage: int | None = None) -> RankMemory:
    """Bytes on a rank of pipeline stage `stage` (default: the fullest one) when `model` is trained as `setup` says.

    All parts are upper bounds of the same moment: full states, every activation, the largest modules gathered.
    ``ValueError`` that lists what is possible where the model cannot be cut like that.
    """
    model = checked_model(model)
    if stage is None:
        return max(memory_by_stage(model, setup), key=lambda memory: memory.total)
    setup.check(model)
    parameters = stage_parameters(model, setup.tp, setup.pp, stage, setup.chunks)
    kept = states(parameters.total, setup.size("dp", "cp"), setup.zero, setup.recipe)
    return RankMemory(**kept.parts, **_activations(model, setup, stage), **_whole_modules(model, setup, stage))


def memory_by_stage(model: Architecture | str, setup: Setup) -> list[RankMemory]:
    """`rank_memory` of every pipeline stage, the first stage first."""
    model = checked_model(model)
    setup.check(model)
    return [rank_memory(model, setup, stage) for stage in range(setup.pp)]


def _activations(model: Architecture, setup: Setup, stage: int) -> dict[str, float]:
    def layer(recompute: str) -> float:
        return layer_activations(
            model,
            setup.micro_batch,
            seq=setup.tokens_of(model),
            tp=setup.tp,
            sequence_parallel=setup.sequence_parallel,
            recompute=recompute,
            attention=setup.attention,
            dropout=setup.dropout,
        ).total

    p, m, v = setup.pp, setup.num_micro_batches, setup.chunks
    largest_piece = max(piece_layers(model.num_layers, p, v)[stage])
    kept = layer(setup.recompute)
    outside = setup.tp if setup.sequence_parallel else 1
    entries = over(setup.micro_batch * setup.tokens_of(model) * model.hidden, outside)
    scores = setup.micro_batch * setup.tokens_of(model) * -(-model.vocab // setup.tp)
    first, last = stage == 0, stage == p - 1
    return {
        "layer_activations": kept * largest_piece * chunks_in_flight(p, stage, m, v),
        "recomputed_layer": 0 if setup.recompute == "none" else layer("none") - kept,
        "embedding_activations": entries * embeddings_in_flight(p, m, v) if first and setup.dropout else 0,
        "head_activations": 4 * entries if last else 0,  # two inputs of two bytes
        "logits": 4 * scores if last else 0,
        "logits_gradient": 4 * scores if last else 0,
    }


def _whole_modules(model: Architecture, setup: Setup, stage: int) -> dict[str, float]:
    """Bytes of the largest modules, whole: layers, the embedding with the positions, the head with the norm."""
    per_param = recipe(setup.recipe).per_param
    sizes = _module_sizes(model, setup, stage)
    shared = setup.size("dp", "cp") > 1
    gathered = sum(sizes[: 1 + setup.prefetched]) if shared and setup.zero >= 3 else 0
    unsharded = sizes[0] if shared and setup.zero >= 2 else 0
    return {
        "gathered_weights": gathered * per_param.weights,
        "unsharded_gradients": unsharded * per_param.gradients,
    }


def _module_sizes(model: Architecture, setup: Setup, stage: int) -> list[int]:
    """Parameters of each module of a rank, the largest first."""
    parameters = stage_parameters(model, setup.tp, setup.pp, stage, setup.chunks)
    num_layers = sum(piece_layers(model.num_layers, setup.pp, setup.chunks)[stage])
    layer = layer_of_rank(model, setup.tp)
    first, last = stage == 0, stage == setup.pp - 1
    before = parameters.embedding + parameters.positions + first * model.embedding_norm * norm_parameters(model)
    behind = parameters.head + last * norm_parameters(model)
    return sorted([*[layer.total] * num_layers, *(end for end in (before, behind) if end)], reverse=True)
