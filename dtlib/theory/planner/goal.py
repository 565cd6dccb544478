"""What the batch of a plan means for a goal: tokens and steps above the least, days, and how far more cards help."""

from __future__ import annotations

from dataclasses import dataclass

from dtlib.theory.batch import examples_needed, goal_seconds, most_ranks
from dtlib.theory.valid import amount

from .answer import Answer, Found


@dataclass(frozen=True)
class Goal:
    """A goal, such as a loss, that is to be reached with a plan's batch.

    `batch_share` is the batch over the critical one: the goal takes 1 + `batch_share` times its least tokens. With more
    cards in dp and as much for each, `most_cards` is where it takes up to twice the least. `tokens` and `seconds` with
    the plan as it is, and `least_seconds` that no number of such cards goes below, each step as long as now; these are
    None where the least tokens are not known.
    """

    batch_share: float
    most_cards: int
    tokens: float | None = None
    seconds: float | None = None
    least_seconds: float | None = None


def toward_goal(answer: Answer, found: Found, critical_batch: float, min_tokens: float | None = None) -> Goal:
    """`found`, a plan of `answer`, on the way to a goal of this `critical_batch`, in tokens.

    By the law of `batch.steps_needed`; `min_tokens` are those that the goal takes with a batch far below the critical
    one. ``ValueError`` unless both are positive.
    """
    critical = amount("critical_batch", critical_batch, positive=True)
    plan, seconds = found.plan, found.time.total
    cards = most_ranks(critical, answer.tokens / plan.dp) * (answer.machine.gpus // plan.dp)
    if min_tokens is None:
        return Goal(answer.tokens / critical, cards)
    least = amount("min_tokens", min_tokens, positive=True)
    return Goal(
        answer.tokens / critical,
        cards,
        examples_needed(least, critical, answer.tokens),
        float(goal_seconds(least, critical, answer.tokens, seconds)),
        least / critical * seconds,
    )
