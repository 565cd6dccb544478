"""The fitted constants of the planner: one table, with what each means and what it was fitted on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING

from dtlib.theory.units import GiB, ms, us
from dtlib.theory.valid import amount

if TYPE_CHECKING:
    from .plan import Plan

_FIVE, _SWEEP = "the five tables of step times", "ultrascale_small"
_PROFILES = "a framework's habit: see `profiles`"
_PIPES = "the pipelines of ultrascale_half"

MEANING: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "matmul_share": ("rate of large products in training, of the best that the card has shown", _FIVE),
        "operand_passes": ("times that the operands of a product pass through memory, less what is hidden", _FIVE),
        "attention_share": ("rate of flash attention, of the best product that the card has shown", _FIVE),
        "kept_passes": ("times that a pass moves what a layer keeps, for all that is no product", _FIVE),
        "inside_share": ("what collectives reach of a link's rate inside a node", _FIVE),
        "across_share": ("what collectives reach of a port's rate across nodes", _FIVE),
        "overlap_share": ("part of the computation behind which messages are hidden where they may be", _FIVE),
        "contention_share": ("part of a second that a second of hidden messages takes from the computation", _FIVE),
        "across_alpha_seconds": ("seconds before the first byte arrives from another node", "not fitted: usual order"),
        "layer_host_seconds": ("seconds that the host takes to launch a layer, forward and backward", _SWEEP),
        "step_host_seconds": (
            "seconds that the host takes between two steps: norm, update, next batch",
            "not fitted: usual order",
        ),
        "activation_factor": ("what a layer keeps, over what its formula counts: rotations, casts, gaps", _SWEEP),
        "logit_factor": ("bytes a logit, over the 8 of scores and gradient in fp32: copies in 16 bits", _SWEEP),
        "attention_flop_per_s": ("most that the attention kernel reaches on any card; 0 for no such bound", _PROFILES),
        "data_hiding": ("part of `overlap_share` that messages of data parallelism have", _PROFILES),
        "sharded_messages": ("messages a layer for gradients or weights at ZeRO 1 and 2; 0: one for all", _PROFILES),
        "accumulated_bytes": ("bytes a parameter that a micro-batch moves to add its gradient to the sum", _PROFILES),
        "rank_host_seconds": ("seconds that the host takes for a layer, for each tensor rank that it meets", _PROFILES),
        "staged_rank_host_seconds": (
            "seconds that the host waits, after a layer's launch, for each tensor rank of its own node: pipelines over "
            "several nodes; the longer counts, the wait or the layer's work",
            _PROFILES,
        ),
        "far_rank_host_seconds": (
            "the same for each tensor rank of another node; without a pipeline, where inputs are gathered again, for "
            "each tensor rank",
            _PROFILES,
        ),
        "head_balance": ("1 where stages are filled by their products, the head's among them, 0 by layers", _PROFILES),
        "stall_seconds": ("seconds more that a message between nodes takes where a job stalls", _PROFILES),
        "stall_hop_seconds": ("seconds more that a bucket of gradients takes from rank to rank there", _PROFILES),
        "stall_cards": ("cards from which on nearly every job stalls; fewer may", _PROFILES),
        "stall_ranks": ("tensor ranks from which on each pipeline stalls, fewer may; 0 for no such number", _PROFILES),
        "logit_passes": ("times that a pass moves the logits; 0: `kept_passes`", _PROFILES),
        "selective_products": ("share of products that selective recompute repeats, in place of attention", _PROFILES),
        "staged_activation_factor": ("`activation_factor` where there is a pipeline", _PIPES),
        "staged_kept_share": ("part of its kept gathered inputs that a stage of a pipeline holds", _PIPES),
        "whole_inputs": ("inputs of a layer that are whole on each tensor rank for a moment", _PIPES),
        "runtime_bytes": ("what the runtime and the communication library take", "measured: bekman_taken_GiB"),
        "margin": ("the error of the memory, above and below, that nine of ten runs stay within", _SWEEP),
    }
)
"""Each constant: what it means, and what it was fitted on."""


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What no data sheet has, named and explained in `MEANING`; each is positive, else ``ValueError``.

    One set holds for every model, card and table of a framework: no row and no table has a constant of its own. Those
    with a default are habits that a framework may have (`profiles`); they may be 0.
    """

    matmul_share: float
    operand_passes: float
    attention_share: float
    kept_passes: float
    inside_share: float
    across_share: float
    overlap_share: float
    contention_share: float
    across_alpha_seconds: float
    layer_host_seconds: float
    step_host_seconds: float
    activation_factor: float
    logit_factor: float
    runtime_bytes: float
    margin: float
    attention_flop_per_s: float = 0
    data_hiding: float = 1
    sharded_messages: float = 0
    accumulated_bytes: float = 0
    rank_host_seconds: float = 0
    staged_rank_host_seconds: float = 0
    far_rank_host_seconds: float = 0
    head_balance: float = 0
    logit_passes: float = 0
    stall_seconds: float = 0
    stall_hop_seconds: float = 0
    stall_cards: float = 0
    stall_ranks: float = 0
    selective_products: float = 0
    staged_activation_factor: float = 1.2
    staged_kept_share: float = 0.6
    whole_inputs: float = 4

    def __post_init__(self) -> None:
        for each in fields(self):
            amount(each.name, getattr(self, each.name), positive=each.default is MISSING)

    def stalls(self, plan: Plan) -> bool:
        """Whether every job of such a plan stalls, where jobs do."""
        may = max(self.stall_seconds, self.stall_hop_seconds) > 0
        return may and (plan.world_size >= self.stall_cards or (plan.pp > 1 and 0 < self.stall_ranks <= plan.tp))


FITTED = Constants(
    matmul_share=0.84,  # the fit's 0.849 rounded down: the mean error is the same, the worst row's smaller
    operand_passes=0.93,
    attention_share=0.38,
    kept_passes=1.7,
    inside_share=0.88,
    across_share=0.82,
    overlap_share=0.7,
    contention_share=0.2,
    across_alpha_seconds=20 * us,
    layer_host_seconds=4 * ms,
    step_host_seconds=20 * ms,
    activation_factor=1.1,
    logit_factor=1.75,
    runtime_bytes=2.0 * GiB,
    margin=0.21,
)
"""The constants that the planner works with: what `fitting.fitted` finds from `fitting.NEUTRAL`, rounded to
numbers whose mean error is no larger."""
