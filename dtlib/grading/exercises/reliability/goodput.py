"""reliability.1: how often a job fails, how often it should save, and what is left of its time; on paper."""

import math
from functools import partial
from typing import Any

from dtlib.grading.exercises.inputs import Case, Rng, call, in_order
from dtlib.grading.exercises.kinds import on_paper, values

DAY = 24.0

#: Nodes, cards of each, about the job's MTBF in hours; of that a save, a restart; the interval as so many of Young's.
#: A save that is nothing and one that is longer than the job lives, a node, nodes of one card, intervals far too short
#: and too long.
KINDS = (
    (1, 8, 100, 0.001, 0.01, 1.3), (16, 8, 20, 0.01, 0.05, 0.3), (128, 4, 60, 0.02, 0.2, 3.0),
    (2048, 8, 4, 0.05, 0.1, 0.8), (1000, 1, 10, 0.3, 0.4, 0.5), (512, 8, 6, 1.5, 0.8, 1.2),
    (24, 2, 200, 0.002, 0.02, 9.0),
)  # fmt: skip


def drawn(
    rng: Rng, nodes: int, cards: int, about: float, saving: float, restarting: float, often: float
) -> dict[str, Any]:
    """A job that fails every few hours or days; its cards have less than half of the failures, or more."""
    mtbf, of_cards = about * float(rng.uniform(0.7, 1.4)), float(rng.uniform(0.3, 0.45) + 0.3 * (often < 1))
    nodes = nodes if nodes == 1 else int(nodes * rng.uniform(0.8, 1.2))
    save, restart = (mtbf * share * rng.uniform(0.8, 1.2) for share in (saving, restarting))
    numbers = [
        nodes, cards, nodes * cards * mtbf / of_cards, nodes * mtbf / (1 - of_cards), save, restart,
        often * math.sqrt(2 * save * mtbf),
    ]  # fmt: skip
    numbers = [each if isinstance(each, int) else float(f"{each:.4g}") for each in numbers]
    told = "{} node(s) of {} cards, a card's MTBF {} h, that of the rest of a node {} h, save {} h, restart {} h"
    return call((told + ", interval {} h").format(*numbers), numbers)


def right(case: Case) -> list[float]:
    nodes, cards, card, rest, save, restart, interval = case["arguments"]
    rate = nodes * cards / card + nodes / rest

    def part(work: float) -> float:
        """An interval takes (work + save) without a failure; each try but the last ends after a time whose mean is
        that of a failure which comes in time, and costs restarts until one comes through."""
        whole = work + save
        chance = math.exp(-rate * whole)
        lost = 1 / rate - whole * chance / (1 - chance)
        again = math.expm1(rate * restart) / rate
        return work / (whole + (1 / chance - 1) * (lost + again))

    low, high = 0.0, 1.0  # of the MTBF
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if math.log1p(-middle) + middle + rate * save > 0 else (low, middle)
    best = low / rate
    return [1 / rate, math.exp(-rate * DAY), part(interval), best, part(best)]


part = partial(values, right=right, parts="mtbf, quiet, goodput, best, at best")

EXERCISE = on_paper(
    "reliability.1", "failing_run", "How often does it fail, how often should it save?", in_order(KINDS, drawn),
    part(2, "mtbf", "the hours between two failures of the job", part=0),
    part(1, "quiet", "the chance of a day without a failure", part=1),
    part(3, "goodput", "the part of the time that is work", part=2),
    part(2, "best", "the interval with most work", part=3, rtol=1e-4),
    part(1, "at best", "the part that is work with it", part=4),
)  # fmt: skip
