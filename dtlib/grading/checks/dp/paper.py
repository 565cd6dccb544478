"""dp.1 and .2: one averaged step, and the bill of a step, on paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dtlib.grading.checks.on_paper import factor_off, gives_part, inspect_part, mistake
from dtlib.grading.compare import answer, any_of, compare, show
from dtlib.grading.exercise import Case, Check, Exercise, Finding, FormError, Run, describe_case
from dtlib.theory import collectives as theory

# dp.1: one step of four workers

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


# dp.2: the bill of a step

_BILL = "effective_batch, sync_seconds"


def _draw_bill(rng: np.random.Generator) -> list[dict[str, Any]]:
    drawn = [
        (10**9, 2, 8, 100 * 10**9, 32, 4),
        (int(rng.integers(1, 80)) * 10**8, 2, int(rng.integers(3, 9)), 100 * 10**9, int(rng.integers(4, 33)), 2),
        (
            int(rng.integers(10, 700)) * 10**8,
            4,
            int(rng.choice([16, 64, 128])),
            int(rng.choice([200, 400, 800])) * 10**9,
            int(rng.integers(1, 9)),
            int(rng.integers(3, 17)),
        ),
    ]
    return [
        {
            "arguments": list(arguments),
            "words": "{:,} parameters of {} B, {} ranks, {:,} bit/s, {} samples a micro-batch, {} micro-batches".format(
                *arguments
            ),
        }
        for arguments in drawn
    ]


def _batch(case: Case) -> int:
    _, _, n, _, micro_batch, accumulation = case["arguments"]
    return int(micro_batch * n * accumulation)


def _sync(case: Case) -> float:
    num_params, bytes_per_param, n, bits_per_s, _, _ = case["arguments"]
    return float(theory.ring_all_reduce_seconds(num_params * bytes_per_param, n, 0.0, bits_per_s / 8))


_BATCH_MISTAKES = (
    mistake(
        "accumulation forgotten",
        gives_part(lambda case: case["arguments"][2] * case["arguments"][4], 0, _BILL),
        "This counts one micro-batch a rank. How many of them go into one update of the weights?",
    ),
    mistake(
        "one rank's batch",
        gives_part(lambda case: case["arguments"][4] * case["arguments"][5], 0, _BILL),
        "This is the batch of one rank. Whose samples does the averaged gradient know about?",
    ),
    mistake(
        "added, not multiplied",
        gives_part(lambda case: case["arguments"][4] * (case["arguments"][2] + case["arguments"][5]), 0, _BILL),
        "Ranks and micro-batches were added. Every rank runs every one of its micro-batches: draw the table of "
        "samples.",
    ),
)
_SYNC_MISTAKES = (
    mistake(
        "bits for bytes",
        any_of(factor_off(_sync, 1 / 8, 1, _BILL), factor_off(_sync, 8, 1, _BILL)),
        "A factor of 8: gradients are counted in bytes and this link in bits a second.",
    ),
    mistake(
        "a sync for each micro-batch",
        gives_part(lambda case: case["arguments"][5] * _sync(case), 1, _BILL),
        "This pays for a sync after every micro-batch. Until the weights change, who needs to know the others' "
        "gradients?",
    ),
    mistake(
        "buffer once over the link",
        gives_part(lambda case: _sync(case) * case["arguments"][2] / (2 * (case["arguments"][2] - 1)), 1, _BILL),
        "This sends the gradient once. Follow one chunk through a ring all-reduce: how far does it travel?",
    ),
    mistake(
        "2 D",
        gives_part(lambda case: _sync(case) * case["arguments"][2] / (case["arguments"][2] - 1), 1, _BILL),
        "2·D is the limit for very many ranks. Which share does a rank not need to send?",
    ),
    mistake(
        "one phase",
        factor_off(_sync, 1 / 2, 1, _BILL),
        "That is half of an all-reduce. Which half, and what is still missing?",
    ),
    mistake(
        "bytes per parameter forgotten",
        gives_part(lambda case: _sync(case) / case["arguments"][1], 1, _BILL),
        "This counts every parameter as one byte.",
    ),
    mistake(
        "two bytes for each parameter",
        gives_part(lambda case: _sync(case) * 2 / case["arguments"][1], 1, _BILL),
        "It is right for gradients of 2 bytes, and only there. What if they are kept in fp32?",
    ),
)

EXERCISES = (
    Exercise(
        id="dp.1",
        function="sgd_step",
        title="One step of several workers",
        harness="paper.call",
        draw=_draw_step,
        checks=(
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
                        "This is the sum over the workers. With twice as many workers, should the step be twice as "
                        "long?",
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
                ),
            ),
        ),
    ),
    Exercise(
        id="dp.2",
        function="bill_of_a_step",
        title="The bill of a step",
        harness="paper.call",
        draw=_draw_bill,
        checks=(
            Check(
                "effective batch", "value", 2, "samples in one update", inspect_part(_batch, 0, _BILL), _BATCH_MISTAKES
            ),
            Check("sync time", "traffic", 3, "seconds for the sync", inspect_part(_sync, 1, _BILL), _SYNC_MISTAKES),
        ),
    ),
)
