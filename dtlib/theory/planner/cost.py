"""What a training run takes: days, energy and money."""

from __future__ import annotations

from dataclasses import dataclass

from dtlib.theory.hardware import POWER_WATTS
from dtlib.theory.valid import amount

from .answer import Answer


@dataclass(frozen=True)
class Training:
    """A run of so many steps: `seconds` from start to end, `energy_joules` of the cards alone (None: power unknown),
    `cost` in the money of the price (None: no price). Restarts, evaluation and saving are not counted."""

    steps: float
    seconds: float
    energy_joules: float | None
    cost: float | None


def training(
    answer: Answer, tokens: float, *, price_per_card_hour: float | None = None, watts: float | None = None
) -> Training:
    """`tokens` tokens with the best plan of `answer`.

    Energy is `watts` of each card (default: its design power, which it draws at most) over the whole run.
    ``ValueError`` for amounts below 0 and a power that is not positive.
    """
    steps = amount("tokens", tokens, positive=True) / answer.tokens
    seconds, gpus = steps * answer.best.time.total, answer.machine.gpus
    known = POWER_WATTS.get(answer.machine.accelerator.name)
    power = known if watts is None else amount("watts", watts, positive=True)
    cost = None
    if price_per_card_hour is not None:
        cost = amount("price_per_card_hour", price_per_card_hour) * gpus * seconds / 3600
    return Training(steps, seconds, None if power is None else power * gpus * seconds, cost)
