"""batch.4: S_min and E_min from runs with different batches, and what a batch that was not tried takes; on paper."""

from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from dtlib.grading.exercises.inputs import Case, Rng, call, in_order
from dtlib.grading.exercises.kinds import on_paper, values

#: Batches in units of the critical one, how far the steps are off, how many runs did not get there, the new batch in
#: the same units, and the deadline in units of S_min: runs on both sides of the critical batch and on one, two runs
#: alone, a batch that was tried twice, a new one that was tried, no error at all; deadlines that no batch meets.
KINDS = (
    ((0.1, 0.5, 2, 8), 0.05, 0, 2, 1.5), ((0.3, 3), 0.1, 0, 30, 1.1), ((0.05, 0.2, 0.8, 3, 12, 50), 0.08, 2, 0.5, 3),
    ((0.2, 0.2, 1, 5, 5), 0.1, 1, 0.02, 0.6), ((0.02, 0.05, 0.1, 0.3), 0.01, 0, 5, 4),
    ((2, 4, 10, 40), 0.02, 1, 0.3, 1.8), ((0.1, 1, 10), 0, 0, 3, 0.9), ((0.3, 1, 3, 9, 0.1), 0.06, 1, 100, 20),
)  # fmt: skip


def drawn(rng: Rng, times: tuple[float, ...], error: float, lost: int, new: float, deadline: float) -> dict[str, Any]:
    """Runs in any order."""
    while True:
        min_steps, critical = float(rng.uniform(400, 9000)), float(np.exp(rng.uniform(4, 8)))
        batches = [max(1, round(each * critical)) for each in rng.permutation(times)]
        off = np.exp(error * rng.uniform(0.5, 1, len(batches)) * rng.choice([-1, 1], len(batches)))
        exact = [min_steps * (1 + critical / batch) for batch in batches]
        steps: list[float | None] = [float(each) for each in np.round(off * exact, 0 if error else 9)]
        for place in rng.permutation(len(batches) - (lost == 1))[:lost]:  # one alone is not the last
            steps[place] = None
        kept = {batch for batch, taken in zip(batches, steps, strict=True) if taken}
        new_batch, most_steps = max(1, round(new * critical)), int(deadline * min_steps)
        if len(kept) < 2:
            continue
        found = fitted(batches, steps)
        is_clear = all(each > 0 for each in found) and abs(most_steps / found[0] - 1) > 0.02
        if is_clear and (most_steps > found[0]) == (deadline > 1):
            words = f"batches {batches}, steps {steps}, a new batch of {new_batch}, {most_steps} steps"
            return call(words, [batches, steps, new_batch, most_steps], reached=deadline > 1)


def fitted(batches: list[int], steps: list[float | None]) -> tuple[Fraction, Fraction]:
    """S_min and E_min by the two normal equations, in exact fractions."""
    runs = [(Fraction(1, batch), Fraction(taken)) for batch, taken in zip(batches, steps, strict=True) if taken]
    weight, first, second = (sum((x**power / taken**2 for x, taken in runs), Fraction(0)) for power in range(3))
    one, two = (sum((x**power / taken for x, taken in runs), Fraction(0)) for power in range(2))
    common = weight * second - first**2
    return (second * one - first * two) / common, (weight * two - first * one) / common


def right(case: Case) -> dict[str, Any]:
    batches, steps, new_batch, deadline = case["arguments"]
    min_steps, min_samples = fitted(batches, steps)
    taken = min_steps + min_samples / new_batch
    return {
        "min_steps": float(min_steps),
        "min_samples": float(min_samples),
        "critical_batch": float(min_samples / min_steps),
        "steps": float(taken),
        "samples": float(taken * new_batch),
        "least_batch": float(min_samples / (deadline - min_steps)) if deadline > min_steps else 0.0,
    }


part = partial(values, right=right, parts="min_steps, min_samples, critical_batch, steps, samples and least_batch")

EXERCISE = on_paper(
    "batch.4", "fit_tradeoff", "Steps or samples?", in_order(KINDS, drawn),
    part(4, "fit", "S_min and E_min", part=("min_steps", "min_samples")),
    part(1, "critical", "the critical batch", part="critical_batch"),
    part(2, "new", "steps and samples with a new batch", part=("steps", "samples")),
    part(2, "least", "the least batch for so many steps", part="least_batch"),
)  # fmt: skip
