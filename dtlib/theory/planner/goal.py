"""What the batch of a plan means for a goal: tokens and steps above the least, days, and how far more cards help."""

from __future__ import annotations

from dataclasses import dataclass

from dtlib.theory.batch import examples_needed, goal_seconds, most_ranks
from dtlib.theory.timing import Plan
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
    return goal_of(found.plan, answer.tokens, found.time.total, critical_batch, min_tokens)


def goal_of(plan: Plan, tokens: int, step: float, critical_batch: float, min_tokens: float | None) -> Goal:
    """`toward_goal` of a plan whose step has so many `tokens` and takes `step` seconds."""
    critical = amount("critical_batch", critical_batch, positive=True)
    cards = most_ranks(critical, tokens / plan.dp) * (plan.world_size // plan.dp)
    if min_tokens is None:
        return Goal(tokens / critical, cards)
    least = amount("min_tokens", min_tokens, positive=True)
    needed = float(goal_seconds(least, critical, tokens, step))
    return Goal(tokens / critical, cards, examples_needed(least, critical, tokens), needed, least / critical * step)
