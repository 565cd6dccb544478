"""dp.2: the bill of a step, on paper."""

from __future__ import annotations

from typing import Any

import numpy as np

from dtlib.grading.checks.on_paper import factor_off, gives_part, inspect_part, mistake, own_formula
from dtlib.grading.compare import any_of
from dtlib.grading.exercise import Case, Check, Exercise
from dtlib.theory import collectives as theory

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
    mistake(
        "one micro-batch",
        gives_part(lambda case: case["arguments"][4], 0, _BILL),
        "This is one micro-batch of one rank. What else goes into the same update?",
    ),
    mistake(
        "pair turned round",
        gives_part(_sync, 0, _BILL),
        "The samples come first in the pair, then the seconds.",
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
    mistake(
        "four bytes for each parameter",
        gives_part(lambda case: _sync(case) * 4 / case["arguments"][1], 1, _BILL),
        "It is right for gradients of 4 bytes, and only there. What if they are kept in fp16?",
    ),
    mistake(
        "milliseconds for seconds",
        factor_off(_sync, 1000, 1, _BILL),
        "A factor of 1000: the task asks for seconds.",
    ),
    mistake(
        "all ranks together",
        gives_part(lambda case: case["arguments"][2] * _sync(case), 1, _BILL),
        "This is what all ranks send, one after another. Each has a link of its own, and they send at the same time.",
    ),
    mistake(
        "whole buffers around the ring",
        gives_part(lambda case: _sync(case) * case["arguments"][2] / 2, 1, _BILL),
        "This passes the whole gradient on N−1 times. How long is the piece that a rank sends in one step?",
    ),
    mistake(
        "fraction upside down",
        gives_part(lambda case: _sync(case) * (case["arguments"][2] / (case["arguments"][2] - 1)) ** 2, 1, _BILL),
        "The fraction stands on its head: with more ranks a rank cannot send less than with two.",
    ),
)

BILL = Exercise(
    id="dp.2",
    function="bill_of_a_step",
    title="The bill of a step",
    harness="paper.call",
    draw=_draw_bill,
    checks=(
        own_formula("bill_of_a_step"),
        Check("effective batch", "value", 2, "samples in one update", inspect_part(_batch, 0, _BILL), _BATCH_MISTAKES),
        Check("sync time", "traffic", 3, "seconds for the sync", inspect_part(_sync, 1, _BILL), _SYNC_MISTAKES),
    ),
)
