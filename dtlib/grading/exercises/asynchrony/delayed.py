"""asynchrony.3: which rates a delay allows, how fast the error falls, and which delay a rate allows; on paper."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from dtlib.grading.exercises.inputs import Case, Rng, call, in_order
from dtlib.grading.exercises.kinds import on_paper, values

#: The delay, and η λ as a part of what lies between two limits: of the fastest rate, of the largest that is stable, or
#: of 2. No delay and one, real roots and complex ones, what grows, and what grows without a delay too. Between
#: 1 and π/3: what one update of delay bears, and what it would if a small angle were its sine. At last a rate that
#: more than a hundred updates of delay allow.
KINDS = (
    (0, "fastest", 0.4), (0, "stable", 0.8), (1, "fastest", 0.7), (1, "stable", 0.6), (2, "stable", 0.9),
    (3, "stable", 1.4), (5, "fastest", 0.5), (4, "two", 1.2), (12, "stable", 0.75), (30, "stable", 0.5),
    (1, "small angle", 1), (0, "stable", 0.006),
)  # fmt: skip


def drawn(rng: Rng, delay: int, limit: str, part: float) -> dict[str, Any]:
    """A curvature of any size; the error neither falls nor grows by little only, with this delay or with another."""
    while True:
        whole = {"fastest": fastest(delay), "stable": stable(delay), "two": 2.0, "small angle": 1.024}[limit]
        product = whole * part * float(1 + (0.01 if limit == "small angle" else 0.07) * rng.uniform(-1, 1))
        most = longest(product)
        is_clear = all(abs(product / stable(each) - 1) > 0.002 for each in (most, most + 1) if each >= 0)
        if is_clear and abs(product / fastest(delay) - 1) > 0.03:
            curvature = float(f"{np.exp(rng.uniform(-3, 3)):.4g}")
            rate = float(f"{product / curvature:.5g}")
            return call(f"λ={curvature}, τ={delay}, η={rate}", [curvature, delay, rate])


def between(low: float, high: float, is_low: Callable[[float], bool]) -> float:
    """Where it changes."""
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if is_low(middle) else (low, middle)
    return low


def turning(angle: float, delay: int) -> tuple[float, float]:
    """The length of a root z of z^(τ + 1) − z^τ + a = 0 that turns by this angle in a step, and the a that it has."""
    length = math.sin(delay * angle) / math.sin((delay + 1) * angle)
    a = length**delay * math.cos(delay * angle) - length ** (delay + 1) * math.cos((delay + 1) * angle)
    return length, a


def stable(delay: int) -> float:
    """η λ at which the largest root is as long as 1."""
    if delay == 0:
        return 2.0
    return turning(between(0, math.pi / (delay + 1), lambda angle: turning(angle, delay)[0] < 1), delay)[1]


def fastest(delay: int) -> float:
    """η λ at which the largest root begins to turn."""
    return turning(1e-7, delay)[1] if delay else 1.0


def radius(product: float, delay: int) -> float:
    """The length of the largest root: of a real one in (τ/(τ + 1), 1), or of one that turns."""
    if delay == 0:
        return abs(1 - product)
    if product < fastest(delay):
        return between(delay / (delay + 1), 1, lambda z: z**delay * (1 - z) > product)
    return turning(between(0, math.pi / (delay + 1), lambda angle: turning(angle, delay)[1] < product), delay)[0]


def longest(product: float) -> int:
    """The longest delay with which the error falls; −1 where there is none."""
    delay = 0
    while stable(delay) > product:
        delay += 1
    return delay - 1


def right(case: Case) -> list[Any]:
    curvature, delay, rate = case["arguments"]
    product = rate * curvature
    return [stable(delay) / curvature, fastest(delay) / curvature, radius(product, delay), longest(product)]


part = partial(values, right=right, parts="stable, fastest, radius, most")

EXERCISE = on_paper(
    "asynchrony.3", "delayed", "Which rate does a delay allow?", in_order(KINDS, drawn),
    part(2, "stable", "the largest rate that a delay allows", part=0),
    part(2, "fastest", "the rate with which the error falls fastest", part=1),
    part(2, "radius", "by which factor it falls in a step", part=2),
    part(2, "most", "the longest delay that a rate allows", part=3),
)  # fmt: skip
