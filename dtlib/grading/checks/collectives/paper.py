"""collectives.2 and .3: what a ring sends, and where a tree is faster, on paper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dtlib.grading.checks.on_paper import factor_off, gives_part, inspect_part, mistake, part_of
from dtlib.grading.exercise import Case, Check, Exercise, Run
from dtlib.theory import collectives as theory
from dtlib.theory import units

# collectives.2: the documents' problem

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
        "pair turned round",
        gives_part(_ring_seconds, 0, _PAIR),
        "The bytes come first in the pair, then the seconds.",
    ),
)
_RING_SECONDS_MISTAKES = (
    mistake(
        "bits for bytes",
        lambda failing, passing: any(factor_off(_ring_seconds, f, 1, _PAIR)(failing, passing) for f in (8, 1 / 8)),
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

# collectives.3: ring against tree


def _draw_crossover(rng: np.random.Generator) -> list[dict[str, Any]]:
    powers, others = (
        rng.choice([8, 16, 32, 64, 256], 2, replace=False),
        rng.choice([6, 12, 24, 40, 100, 300], 2, replace=False),
    )
    cases = []
    for n in [*powers, *others]:
        alpha, rate = float(rng.integers(2, 60)) * units.us, float(rng.integers(5, 95)) * units.GB
        words = f"{n} ranks, α = {units.format_seconds(alpha)}, B = {units.format_rate(rate)}"
        cases.append({"arguments": [int(n), alpha, rate], "words": words})
    return cases


def _crossover(case: Case) -> float:
    return float(theory.ring_tree_crossover_bytes(*case["arguments"]))


def _is_power(case: Case) -> bool:
    n = case["arguments"][0]
    return bool(n & (n - 1) == 0)


def _equal_cost(ring: Callable[..., tuple[float, float]], tree: Callable[..., tuple[float, float]]) -> Any:
    """Recognise a crossover of two wrong costs, each given as (number of α, number of D/B)."""

    def crossing(case: Case) -> float | None:
        n, alpha, rate = case["arguments"]
        levels = int(n - 1).bit_length()
        (ring_steps, ring_share), (tree_steps, tree_share) = ring(n), tree(levels)
        return (
            alpha * rate * (ring_steps - tree_steps) / (tree_share - ring_share) if tree_share != ring_share else None
        )

    return gives_part(crossing)


def _ring_cost(n: float) -> tuple[float, float]:
    return 2 * (n - 1), 2 * (n - 1) / n


def _tree_cost(levels: float) -> tuple[float, float]:
    return 2 * levels, 2 * levels


def _with_rounds(rounds: Callable[[int], float]) -> Any:
    """Recognise a crossover that counts the rounds of the tree in another way."""

    def crossing(case: Case) -> float:
        n, alpha, rate = case["arguments"]
        return float(alpha * rate * (n - 1 - rounds(n)) / (rounds(n) - (n - 1) / n))

    return gives_part(crossing)


_CROSSOVER_MISTAKES = (
    mistake(
        "natural logarithm",
        _with_rounds(np.log),
        "That is the logarithm to base e. By which factor does the number of ranks that know grow in a round?",
    ),
    mistake(
        "tree sends the buffer once",
        _equal_cost(_ring_cost, lambda levels: (2 * levels, 2)),
        "Your tree pays for the buffer once up and once down. In each of its rounds a whole buffer travels, and the "
        "rounds come one after another.",
    ),
    mistake(
        "tree one way",
        _equal_cost(_ring_cost, lambda levels: (levels, levels)),
        "Your tree goes one way. After the sum has reached the root, who knows it?",
    ),
    mistake(
        "ring one phase",
        _equal_cost(lambda n: (n - 1, (n - 1) / n), _tree_cost),
        "Your ring makes one journey. What does a rank hold after N−1 steps?",
    ),
    mistake(
        "ring sends whole buffers",
        _equal_cost(lambda n: (2 * (n - 1), 2 * (n - 1)), _tree_cost),
        "Your ring passes on the whole buffer in each step. How long is a chunk?",
    ),
    mistake(
        "ring sends 2 D",
        _equal_cost(lambda n: (2 * (n - 1), 2), _tree_cost),
        "Your ring sends 2·D, its limit for many ranks. At this number of ranks it sends less.",
    ),
    mistake(
        "N steps",
        _equal_cost(lambda n: (2 * n, 2 * (n - 1) / n), _tree_cost),
        "Count the steps of a ring of two ranks: how often must they exchange before both know the sum of one chunk?",
    ),
    mistake(
        "seconds for bytes",
        gives_part(lambda case: _crossover(case) / case["arguments"][2]),
        "This is a time. Multiply it by what, to get a size?",
    ),
)
_OTHER_MISTAKES = (
    mistake(
        "log2 without rounding up",
        _with_rounds(np.log2),
        "A tree of 6 ranks has no 2.58 rounds. How many does it take until the last rank is reached?",
    ),
    mistake(
        "log2 rounded down",
        _with_rounds(lambda n: n.bit_length() - 1),
        "A tree of 2 rounds reaches 4 ranks. How many rounds do 6 ranks take?",
    ),
    *_CROSSOVER_MISTAKES,
)

EXERCISES = (
    Exercise(
        id="collectives.2",
        function="ring_on_paper",
        title="What a ring sends, and how long that takes",
        harness="paper.call",
        draw=_draw_ring,
        checks=(
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
    ),
    Exercise(
        id="collectives.3",
        function="crossover_bytes",
        title="Ring or tree?",
        harness="paper.call",
        draw=_draw_crossover,
        checks=(
            Check(
                "powers of two",
                "value",
                3,
                "the crossover for 2, 4, 8, … ranks",
                inspect_part(_crossover),
                _CROSSOVER_MISTAKES,
                applies=_is_power,
            ),
            Check(
                "other ranks",
                "value",
                2,
                "the crossover for other numbers of ranks",
                inspect_part(_crossover),
                _OTHER_MISTAKES,
                applies=lambda case: not _is_power(case),
            ),
        ),
    ),
)
