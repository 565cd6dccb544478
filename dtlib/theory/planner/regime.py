"""What the margins of the memory were seen on, by regime, and what of a job lies outside of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from dtlib.theory.hardware import Accelerator
from dtlib.theory.memory import recipe
from dtlib.theory.models import Architecture, model_parameters
from dtlib.theory.timing import FITTED, Plan

# The extremes of the runs whose memory was printed: those of `ultrascale_small` and `ultrascale_half`. A test takes
# them from the rows.
CARD = "H100-80GB-SXM"
NUM_PARAMS = (1_342_244_864, 8_858_636_288)
SEQ = 4096
RECIPE = "18-byte"
MICRO_BATCH = 128
STAGES = 32
RANKS = 512

_SIZES = "{:.1f} to {:.1f} billion parameters".format(*(each / 1e9 for each in NUM_PARAMS))

SEEN = f"runs of one framework on {CARD}, of models of {_SIZES} and sequences of {SEQ:,} tokens"
"""The runs whose memory was printed, in words."""


@dataclass(frozen=True)
class Regime:
    """Runs that err alike: `name` says what they have, `margin` is the error that nine of ten of each model's stay
    within, above and below, and `rows` is how many printed their memory."""

    name: str
    margin: float
    rows: int


REGIMES = {
    (False, False): Regime("without a pipeline, tp up to 8", FITTED.margin, 259),
    (False, True): Regime("without a pipeline, tp over 8", 0.59, 135),
    (True, False): Regime("with a pipeline, tp up to 8", 0.21, 425),
    (True, True): Regime("with a pipeline, tp over 8", 0.27, 162),
}
"""By whether there is a pipeline, and whether tp is over 8 ranks. What `margin` finds in the rows; where they stay
within less than the first regime's margin, that one: no regime is surer than the one with the most rows."""

# Over 8 tensor ranks without a pipeline a run that is taken to keep what it gathered, and did not, errs by half or
# more: some of these rows, of which nobody printed whether they did.


def regime(plan: Plan) -> Regime:
    """The regime of `plan`."""
    return REGIMES[plan.pp > 1, plan.tp > 8]


def margin(errors: Iterable[tuple[str, float]]) -> float:
    """The error that nine of ten runs of each model stay within, rounded up to a hundredth.

    `errors` are the model of a run and the planned bytes over the printed ones, less one; an error is as large from
    above as from below: what is half as much errs by one. ``ValueError`` for none.
    """
    by_model: dict[str, list[float]] = {}
    for name, error in errors:
        by_model.setdefault(name, []).append(abs(math.log1p(error)))
    if not by_model:
        raise ValueError("errors must not be empty")
    most = max(float(np.quantile(each, 0.9, method="higher")) for each in by_model.values())
    return math.ceil(100 * math.expm1(most)) / 100


_PLAN: tuple[tuple[str, Callable[[Plan], bool]], ...] = (
    ("context parallelism", lambda plan: plan.cp > 1),
    ("tensor parallelism alone", lambda plan: plan.tp > 1 and not plan.sequence_parallel),
    ("another schedule than 1F1B", lambda plan: plan.pp > 1 and plan.schedule != "1F1B"),
    ("another recipe of states", lambda plan: recipe(plan.recipe) != recipe(RECIPE)),
    ("ZeRO 2 or 3", lambda plan: plan.zero > 1 and plan.dp * plan.cp > 1),
    ("messages of tp behind products", lambda plan: plan.tp_overlap and plan.tp > 1),
    ("hybrid shards", lambda plan: plan.shard is not None),
    ("recompute", lambda plan: plan.recompute != "none"),
    ("attention as a matrix", lambda plan: plan.attention == "matrix"),
    ("products in fp8", lambda plan: plan.precision != "bf16"),
    ("optimizer states on the host", lambda plan: plan.offload),
    ("adapters alone trained", lambda plan: plan.adapters is not None),
    ("dropout", lambda plan: plan.dropout),
    (f"micro-batches of more than {MICRO_BATCH} sequences", lambda plan: plan.micro_batch > MICRO_BATCH),
    (f"more than {STAGES} stages", lambda plan: plan.pp > STAGES),
    (f"more than {RANKS} ranks", lambda plan: plan.dp * plan.tp * plan.pp * plan.cp > RANKS),
)


def outside(plan: Plan, model: Architecture, card: Accelerator | None = None) -> tuple[str, ...]:
    """What a job has and none of the runs of `SEEN` had: the error of its memory is unknown. Empty for none.

    Without a `card` none is asked for. Vocabulary and heads are not looked at, nor how stages are cut and when
    gradients are added: what they add is counted, not estimated.
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
