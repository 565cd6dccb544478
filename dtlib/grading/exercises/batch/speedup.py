"""batch.3: what more ranks buy: the best rate, the steps to a goal, and where 1/L holds both up; on paper."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from dtlib.grading.exercises.inputs import Case, Cases, Rng, call, rounded
from dtlib.grading.exercises.kinds import on_paper, values

#: Ranks; as many times as many ranks would be held up by 1/L (below 1: these are); the goal in units of the noise σ²/B,
#: below and above twice that, for one rank too. One rank, and one rank that is held up.
KINDS = (
    (1, 3, 0.5), (4, 0.3, 3), (8, 5, 0.2), (16, 0.8, 1.5), (2, 30, 9), (64, 0.05, 5), (6, 0.5, 1.9), (8, 0.06, 40),
    (3, 1.5, 2.2), (1, 0.4, 4),
)  # fmt: skip


WORDS = "gap {}, L = {}, σ² = {}, b = {}, N = {}, T = {}, goal {}"
EXACT = [2.0, 8.0, 32.0, 4, 8, 1024, 3.0]  # sure of the goal after 16 steps, free up to 256 ranks, to the bit


def draw(rng: Rng) -> Cases:
    """Each kind."""
    return [*(drawn(rng, *kind) for kind in KINDS), call(WORDS.format(*EXACT), EXACT)]


def drawn(rng: Rng, n: int, times: float, goal: float) -> dict[str, Any]:
    """No whole number hangs on rounding."""
    while True:
        batch, gap, smoothness = int(rng.integers(2, 40)), rounded(rng.uniform(0.5, 8)), rounded(rng.uniform(2, 60))
        variance = rounded(2 * gap * smoothness * batch * n / rng.uniform(300, 900))
        steps = int(times * rng.uniform(0.9, 1.1) * 2 * gap * smoothness * batch * n / variance)
        wanted = rounded(goal * rng.uniform(0.95, 1.05) * variance / (batch * n))
        numbers = [gap, smoothness, variance, batch, n, steps, wanted]
        parts = [float(variance * steps / (2 * gap * smoothness * batch))]
        for samples in (batch, batch * n):
            noise = variance / samples
            is_short = wanted < 2 * noise
            parts.append(2 * gap * smoothness * (4 * noise / wanted**2 if is_short else 1 / (wanted - noise)))
        if all(0.02 < part % 1 < 0.98 for part in parts):
            return call(WORDS.format(*numbers), numbers)


def first(holds: Callable[[int], bool]) -> int:
    """The least whole number from 1 on at which something begins to hold."""
    high = 1
    while not holds(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def right(case: Case) -> dict[str, float]:
    """By trying numbers of steps and of ranks: two terms whose product is fixed are least when they are equal."""
    gap, smoothness, variance, batch, n, steps, goal = case["arguments"]

    def free(steps: int, samples: int) -> float:
        """The best of all rates."""
        return math.sqrt(2 * gap / steps) / math.sqrt(smoothness * variance / samples)

    def bound(steps: int, samples: int) -> float:
        rate = min(1 / smoothness, free(steps, samples))
        return float(2 * gap / (rate * steps) + rate * smoothness * variance / samples)

    def fewest(samples: int) -> int:
        return first(lambda steps: bound(steps, samples) <= goal)

    return {
        "rate": min(1 / smoothness, free(steps, batch * n)),
        "bound": bound(steps, batch * n),
        "steps": fewest(batch * n),
        "gain": fewest(batch) / fewest(batch * n),
        "most": first(lambda ranks: free(steps, batch * ranks) > 1 / smoothness) - 1,
    }


part = partial(values, right=right, parts="rate, bound, steps, gain and most")

EXERCISE = on_paper(
    "batch.3", "speed_up", "What do more ranks buy?", draw,
    part(2, "rate", "the best rate", part="rate"),
    part(2, "bound", "the bound with the best rate", part="bound"),
    part(3, "steps", "the fewest steps to a goal, and what N ranks gain", part=("steps", "gain")),
    part(2, "most", "the most ranks that 1/L does not hold up", part="most"),
)  # fmt: skip
