"""The fitted constants of the planner: one table, with what each means and what it was fitted on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

from dtlib.theory.units import GiB, ms, us
from dtlib.theory.valid import amount

_FIVE, _SWEEP = "the five tables of step times", "ultrascale_small"

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
        "runtime_bytes": ("what the runtime and the communication library take", "measured: bekman_taken_GiB"),
        "margin": ("the error of the memory, above and below, that nine of ten runs stay within", _SWEEP),
    }
)
"""Each constant: what it means, and what it was fitted on."""


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What no data sheet has, named and explained in `MEANING`; each is positive, else ``ValueError``.

    One set holds for every model, card and table: no row and no table has a constant of its own.
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

    def __post_init__(self) -> None:
        for each in fields(self):
            amount(each.name, getattr(self, each.name), positive=True)


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
