"""The memory of one rank of a real job: what `memory`, `zero` and `activations` say, put together.

``rank_memory(models.model("llama3-70b"), Setup(dp=64, zero=3))`` has the bytes of its fullest rank, part by part.

Arguments out of range raise ``ValueError``, which names the argument, its value and the rule.
"""

from .budget import fits, largest_micro_batch, largest_that
from .rank import RankMemory, host_states, memory_by_stage, rank_memory, rank_states, trained_parameters
from .setup import AXES, BALANCES, DEGREES, Setup, checked_pp
from .stages import (
    chunks_in_flight,
    cost_layers,
    embeddings_in_flight,
    expert_layers,
    piece_layers,
    stage_layers,
    stage_parameters,
)

__all__ = [
    "AXES",
    "BALANCES",
    "DEGREES",
    "RankMemory",
    "Setup",
    "checked_pp",
    "chunks_in_flight",
    "cost_layers",
    "embeddings_in_flight",
    "expert_layers",
    "fits",
    "host_states",
    "largest_micro_batch",
    "largest_that",
    "memory_by_stage",
    "piece_layers",
    "rank_memory",
    "rank_states",
    "stage_layers",
    "stage_parameters",
    "trained_parameters",
]
