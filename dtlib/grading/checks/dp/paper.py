"""dp.1: one averaged step, on paper."""

from functools import partial
from typing import Any

import numpy as np

from dtlib.grading.inputs import Case, Cases, Rng, call
from dtlib.grading.kinds import on_paper, values
from dtlib.grading.signs import only_if

PAIR = "mean_gradient, new_weights"


def draw(rng: Rng) -> Cases:
    """The example's four workers; two, three and more workers; one weight, as many as workers, more and fewer."""
    some, many = int(rng.integers(4, 7)), int(rng.integers(5, 9))
    cases = []
    for n, num_weights in ((4, 2), (2, some), (3, 3), (many, 3), (4, 1), (many - 1, 2)):
        gradients = np.round(rng.uniform(-0.5, 0.5, (n, num_weights)), 2)
        weights = np.round(rng.uniform(-1, 1, num_weights), 2)
        rate = float(rng.choice([0.01, 0.02, 0.05, 0.1]))
        words = f"{n} workers, {num_weights} weight{'s' if num_weights > 1 else ''}, learning rate {rate:g}"
        cases.append(call(words, [gradients, weights, rate], **{"four workers": n == 4}))
    return cases


def right(case: Case) -> list[Any]:
    gradients, weights, rate = case["arguments"]
    return [gradients.mean(0), weights - rate * gradients.mean(0)]


FOUR = {"right for four workers only": only_if("four workers")}
part = partial(values, right=right, parts=PAIR, atol=1e-12)

EXERCISE = on_paper(
    "dp.1", "sgd_step", "One step of several workers", draw,
    part(2, "mean gradient", "the averaged gradient", part=0, kind="gradient", wrong=FOUR),
    part(2, "new weights", "the weights after the step", part=1),
)  # fmt: skip
