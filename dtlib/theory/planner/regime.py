"""What the margin of the memory was seen on, and what of a job lies outside of it."""

from __future__ import annotations

from collections.abc import Callable

from dtlib.theory.hardware import Accelerator
from dtlib.theory.memory import recipe
from dtlib.theory.models import Architecture, model_parameters
from dtlib.theory.timing import Plan

# The extremes of the runs whose memory was printed and on which the margin holds: those of `ultrascale_small` and
# `ultrascale_half` with no pipeline and at most eight ranks of tensor parallelism. A test takes them from the rows.
CARD = "H100-80GB-SXM"
NUM_PARAMS = (1_342_244_864, 8_858_636_288)
SEQ = 4096
RECIPE = "18-byte"
MICRO_BATCH = 16
RANKS = 512

_SIZES = "{:.1f} to {:.1f} billion parameters".format(*(each / 1e9 for each in NUM_PARAMS))

SEEN = f"runs of one framework on {CARD}, of models of {_SIZES} and sequences of {SEQ:,} tokens, without a pipeline"
"""The runs whose memory was printed and on which the margin holds, in words."""

_PLAN: tuple[tuple[str, Callable[[Plan], bool]], ...] = (
    ("a pipeline", lambda plan: plan.pp > 1),
    ("context parallelism", lambda plan: plan.cp > 1),
    ("tensor parallelism over more than 8 ranks", lambda plan: plan.tp > 8),
    ("tensor parallelism alone", lambda plan: plan.tp > 1 and not plan.sequence_parallel),
    (
        "gathered inputs that are not kept",
        lambda plan: plan.tp > 1 and plan.sequence_parallel and not plan.keep_gathered,
    ),
    ("another recipe of states", lambda plan: recipe(plan.recipe) != recipe(RECIPE)),
    ("ZeRO 2 or 3", lambda plan: plan.zero > 1 and plan.dp * plan.cp > 1),
    ("recompute", lambda plan: plan.recompute != "none"),
    ("attention as a matrix", lambda plan: plan.attention == "matrix"),
    ("dropout", lambda plan: plan.dropout),
    (f"micro-batches of more than {MICRO_BATCH} sequences", lambda plan: plan.micro_batch > MICRO_BATCH),
    (f"more than {RANKS} ranks", lambda plan: plan.dp * plan.tp * plan.pp * plan.cp > RANKS),
)


def outside(plan: Plan, model: Architecture, card: Accelerator | None = None) -> tuple[str, ...]:
    """What a job has and none of the runs of `SEEN` had: the error of its memory is unknown. Empty for none.

    Without a `card` none is asked for. Vocabulary and heads are not looked at: what they add is counted, not estimated.
    """
    least, most = NUM_PARAMS
    job = (
        ("experts", model.experts is not None),
        ("latent attention", model.latent is not None),
        ("modules for further tokens", model.mtp_modules > 0),
        ("a model of another size", not least <= model_parameters(model).total <= most),
        ("sequences of another length", plan.seq_of(model) != SEQ),
        ("another card", card is not None and card.name != CARD),
    )
    return (*(name for name, has in _PLAN if has(plan)), *(name for name, has in job if has))
