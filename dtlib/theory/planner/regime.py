"""What the margin of the memory was seen on, and what of a plan lies outside of it."""

from __future__ import annotations

from collections.abc import Callable

from .plan import Plan

SEEN = (
    "runs of one framework on H100, of models of 1.3 to 8.9 billion parameters and sequences of 4,096 tokens, without "
    "a pipeline"
)
"""The runs whose memory was printed and on which the margin holds: `ultrascale_small` and `ultrascale_half`, those of
no pipeline and tensor parallelism of at most eight."""

_RULES: tuple[tuple[str, Callable[[Plan], bool]], ...] = (
    ("a pipeline", lambda plan: plan.pp > 1),
    ("context parallelism", lambda plan: plan.cp > 1),
    ("tensor parallelism over more than 8 ranks", lambda plan: plan.tp > 8),
    ("ZeRO 2 or 3", lambda plan: plan.zero > 1 and plan.dp * plan.cp > 1),
    ("recompute", lambda plan: plan.recompute != "none"),
    ("attention as a matrix", lambda plan: plan.attention == "matrix"),
    ("dropout", lambda plan: plan.dropout),
)


def outside(plan: Plan) -> tuple[str, ...]:
    """What `plan` has and none of the runs of `SEEN` had: the error of its memory is unknown. Empty for none."""
    return tuple(name for name, has in _RULES if has(plan))
