"""collectives.2: what a ring sends, on paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dtlib.grading.checks.on_paper import factor_off, gives_part, inspect_part, mistake, own_formula, part_of
from dtlib.grading.compare import any_of
from dtlib.grading.exercise import Case, Check, Exercise, Run
from dtlib.theory import collectives as theory
from dtlib.theory import units

_PAIR = "sent_bytes, seconds"


def _draw_ring(rng: np.random.Generator) -> list[dict[str, Any]]:
    sizes = [
        64 * units.MiB,
        200 * units.MB,
        int(rng.integers(1, 40)) * units.GB // 4,
        int(rng.integers(3, 900)) * units.MiB,
    ]
    ranks = [8, 16, int(rng.integers(3, 8)), int(rng.choice([2, 24, 64, 96, 512]))]
    rates = [
        int(rng.choice([50, 900])) * units.GB,
        100 * units.GB,
        int(rng.integers(10, 99)) * units.GB,
        12.5 * units.GB,
    ]
    return [
        {
            "arguments": [size, n, rate],
            "words": f"{size:,} B, {n} ranks, {units.format_rate(rate)}",
        }
        for size, n, rate in zip(sizes, ranks, rates, strict=True)
    ]


def _ring_bytes(case: Case) -> float:
    full_bytes, n, _ = case["arguments"]
    return float(theory.ring_all_reduce_bytes(full_bytes, n))


def _ring_seconds(case: Case) -> float:
    full_bytes, n, rate = case["arguments"]
    return float(theory.ring_all_reduce_seconds(full_bytes, n, 0.0, rate))


def _carried(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
    pairs = [(part_of(run, 0, _PAIR), part_of(run, 1, _PAIR), run.case["arguments"][2]) for run in failing]
    return all(abs(seconds * rate / sent - 1) < 1e-6 for sent, seconds, rate in pairs)


_RING_BYTES_MISTAKES = (
    mistake(
        "one phase",
        factor_off(_ring_bytes, 1 / 2, 0, _PAIR),
        "That is what one journey around the ring costs. After it each rank knows one chunk of the sum: who still "
        "has to learn what?",
    ),
    mistake(
        "send plus receive",
        factor_off(_ring_bytes, 2, 0, _PAIR),
        "Twice too much, as if the bytes that arrive were counted beside those that leave. What does the 2 in the "
        "formula count?",
    ),
    mistake(
        "2 D",
        gives_part(lambda case: 2 * case["arguments"][0], 0, _PAIR),
        "2·D is the limit for very many ranks. Which share of the buffer does a rank not need to send, because it is "
        "the one that adds it up?",
    ),
    mistake(
        "all ranks together",
        gives_part(lambda case: case["arguments"][1] * _ring_bytes(case), 0, _PAIR),
        "This is what all ranks send together (or what rank 0 would send and receive if it did all the work). The "
        "task asks for one rank.",
    ),
    mistake(
        "whole buffers around the ring",
        gives_part(lambda case: (case["arguments"][1] - 1) * case["arguments"][0], 0, _PAIR),
        "This passes the whole buffer on N−1 times. How long is the piece that a rank sends in one step?",
    ),
    mistake(
        "fraction upside down",
        gives_part(lambda case: 2 * case["arguments"][0] * case["arguments"][1] / (case["arguments"][1] - 1), 0, _PAIR),
        "The fraction stands on its head: with more ranks a rank cannot send less than with two.",
    ),
    mistake(
        "right for two ranks only",
        gives_part(lambda case: case["arguments"][0], 0, _PAIR),
        "This is the buffer once, which is right for two ranks, and for them alone. How many chunks are there with "
        "three ranks, and how often does each of them travel?",
    ),
    mistake(
        "pair turned round",
        gives_part(_ring_seconds, 0, _PAIR),
        "The bytes come first in the pair, then the seconds.",
    ),
)
_RING_SECONDS_MISTAKES = (
    mistake(
        "bits for bytes",
        any_of(factor_off(_ring_seconds, 8, 1, _PAIR), factor_off(_ring_seconds, 1 / 8, 1, _PAIR)),
        "A factor of 8: the link's rate is given in bytes a second, not in bits.",
    ),
    mistake(
        "milliseconds for seconds",
        factor_off(_ring_seconds, 1000, 1, _PAIR),
        "A factor of 1000: the task asks for seconds.",
    ),
    mistake(
        "buffer over link",
        gives_part(lambda case: case["arguments"][0] / case["arguments"][2], 1, _PAIR),
        "That is the time to send the buffer once. How many bytes does the rank really send?",
    ),
    mistake(
        "carried error",
        _carried,
        "The time does follow from the bytes you gave: put the bytes right and it will be right too.",
    ),
    mistake(
        "both directions for one",
        factor_off(_ring_seconds, 1 / 2, 1, _PAIR),
        "Half the time that the bytes need to leave. What arrives meanwhile takes the other direction of the link, and "
        "does not make them leave faster.",
    ),
)


ON_PAPER = Exercise(
    id="collectives.2",
    function="ring_on_paper",
    title="What a ring sends, and how long that takes",
    harness="paper.call",
    draw=_draw_ring,
    checks=(
        own_formula("ring_on_paper"),
        Check(
            "bytes",
            "traffic",
            3,
            "bytes sent by each rank",
            inspect_part(_ring_bytes, 0, _PAIR),
            _RING_BYTES_MISTAKES,
        ),
        Check(
            "seconds",
            "value",
            2,
            "seconds on the link",
            inspect_part(_ring_seconds, 1, _PAIR),
            _RING_SECONDS_MISTAKES,
        ),
    ),
)
