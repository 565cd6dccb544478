"""dp.1: one averaged step, on paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dtlib.grading.checks.on_paper import mistake, own_formula
from dtlib.grading.compare import answer, compare, right_only_if, show
from dtlib.grading.exercise import Case, Check, Exercise, Finding, FormError, Run, describe_case

_STEP = "mean_gradient, new_weights"


def _draw_step(rng: np.random.Generator) -> list[dict[str, Any]]:
    cases = []
    for n, num_params in ((4, 2), (int(rng.integers(2, 4)), int(rng.integers(3, 6))), (int(rng.integers(5, 9)), 3)):
        gradients = np.round(rng.uniform(-0.5, 0.5, (n, num_params)), 2)
        weights = np.round(rng.uniform(-1, 1, num_params), 2)
        rate = float(rng.choice([0.01, 0.02, 0.05, 0.1]))
        cases.append(
            {
                "arguments": [gradients, weights, rate],
                "words": f"{n} workers, {num_params} parameters, learning rate {rate:g}",
            }
        )
    return cases


def _mean(case: Case) -> Any:
    return case["arguments"][0].mean(0)


def _updated(case: Case) -> Any:
    gradients, weights, rate = case["arguments"]
    return weights - rate * gradients.mean(0)


def _inspect_array(expected: Any, part: int) -> Any:
    def inspect(run: Run) -> Finding | None:
        return compare(_array(run, part), expected(run.case), describe_case(run.case), atol=1e-12)

    return inspect


def _array(run: Run, part: int) -> Any:
    value = answer(run)
    if not isinstance(value, list) or len(value) != 2:
        raise FormError(show(value), f"a tuple ({_STEP})")
    return np.asarray(value[part], np.float64) if isinstance(value[part], list) else value[part]


def _array_gives(wrong: Any, part: int) -> Any:
    def fits(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
        back = [run for run in failing if run.trouble is None]
        return bool(back) and all(compare(_array(run, part), wrong(run.case), "", atol=1e-12) is None for run in back)

    return fits


STEP = Exercise(
    id="dp.1",
    function="sgd_step",
    title="One step of several workers",
    harness="paper.call",
    draw=_draw_step,
    checks=(
        own_formula("sgd_step"),
        Check(
            "mean gradient",
            "gradient",
            2,
            "the averaged gradient",
            _inspect_array(_mean, 0),
            (
                mistake(
                    "sum for mean",
                    _array_gives(lambda case: case["arguments"][0].sum(0), 0),
                    "This is the sum over the workers. With twice as many workers, should the step be twice as long?",
                ),
                mistake(
                    "mean over the parameters",
                    _array_gives(lambda case: case["arguments"][0].mean(1), 0),
                    "The mean was taken along the wrong side of the table: one number for each worker. How many "
                    "numbers does a gradient have?",
                ),
                mistake(
                    "divided by the parameters",
                    _array_gives(lambda case: case["arguments"][0].sum(0) / case["arguments"][0].shape[1], 0),
                    "The sum was divided by the number of parameters. Over what is the mean taken?",
                ),
                mistake(
                    "one worker's gradient",
                    _array_gives(lambda case: case["arguments"][0][0], 0),
                    "This is the gradient of the first worker. What would the others update with?",
                ),
                mistake(
                    "one number for all",
                    _array_gives(lambda case: float(case["arguments"][0].mean()), 0),
                    "A single number: the mean over workers and weights. How many numbers does a gradient have?",
                ),
                mistake(
                    "divided twice",
                    _array_gives(lambda case: _mean(case) / len(case["arguments"][0]), 0),
                    "Divided by the number of workers twice. What does `mean` do already?",
                ),
                mistake(
                    "pair turned round",
                    _array_gives(_updated, 0),
                    "The averaged gradient comes first in the pair, then the weights.",
                ),
                mistake(
                    "right for four workers only",
                    right_only_if(lambda case: len(case["arguments"][0]) == 4),
                    "It is right for the four workers of the example, and only there. Where does the number of "
                    "workers come from?",
                ),
                mistake(
                    "right for two workers only",
                    _array_gives(lambda case: case["arguments"][0][:2].mean(0), 0),
                    "This is the mean over the first two workers. Where are the others?",
                ),
            ),
        ),
        Check(
            "new weights",
            "value",
            2,
            "the weights after the step",
            _inspect_array(_updated, 1),
            (
                mistake(
                    "uphill",
                    _array_gives(lambda case: 2 * case["arguments"][1] - _updated(case), 1),
                    "The step goes uphill: the gradient points where the loss grows.",
                ),
                mistake(
                    "sum for mean",
                    _array_gives(
                        lambda case: case["arguments"][1] - case["arguments"][2] * case["arguments"][0].sum(0), 1
                    ),
                    "The step was made with the sum of the gradients: it is as many times too long as there are "
                    "workers.",
                ),
                mistake(
                    "update for weights",
                    _array_gives(lambda case: _updated(case) - case["arguments"][1], 1),
                    "This is the change. The task asks for the weights after it.",
                ),
                mistake(
                    "learning rate forgotten",
                    _array_gives(lambda case: case["arguments"][1] - _mean(case), 1),
                    "The whole gradient was subtracted. What does the learning rate do?",
                ),
                mistake(
                    "one worker's step",
                    _array_gives(lambda case: case["arguments"][1] - case["arguments"][2] * case["arguments"][0][0], 1),
                    "The step was made with the first worker's gradient: the replicas would drift apart from here.",
                ),
                mistake(
                    "divided twice",
                    _array_gives(
                        lambda case: (
                            case["arguments"][1] - case["arguments"][2] * _mean(case) / len(case["arguments"][0])
                        ),
                        1,
                    ),
                    "The step is as many times too short as there are workers: the mean is divided once more.",
                ),
            ),
        ),
    ),
)
