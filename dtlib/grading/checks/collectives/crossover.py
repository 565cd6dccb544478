"""collectives.3: where ring and tree are equally fast, on paper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dtlib.grading.checks.on_paper import factor_off, gives_part, inspect_part, mistake, own_formula
from dtlib.grading.compare import any_of
from dtlib.grading.exercise import Case, Check, Exercise
from dtlib.theory import collectives as theory
from dtlib.theory import units


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
    mistake(
        "a round too many",
        _with_rounds(lambda n: n.bit_length()),
        "One round too many for 8 ranks, and right for 6: how many rounds reach 2, 4 and 8 ranks?",
    ),
    mistake(
        "ring and tree turned round",
        gives_part(lambda case: -_crossover(case)),
        "A buffer of less than no bytes. On one side of the equation ring and tree have changed places.",
    ),
    mistake(
        "rate upside down",
        gives_part(lambda case: _crossover(case) / case["arguments"][2] ** 2),
        "Here a faster link moves the crossover to smaller buffers. What do D bytes cost on a link of B bytes a "
        "second?",
    ),
    mistake(
        "bits for bytes",
        any_of(factor_off(_crossover, 8), factor_off(_crossover, 1 / 8)),
        "A factor of 8: the link's rate is given in bytes a second, not in bits.",
    ),
    mistake(
        "a factor of two",
        any_of(factor_off(_crossover, 2), factor_off(_crossover, 1 / 2)),
        "A factor of 2. Both algorithms make two journeys, in steps and in bytes: in which of the four terms did you "
        "count one?",
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

CROSSOVER = Exercise(
    id="collectives.3",
    function="crossover_bytes",
    title="Ring or tree?",
    harness="paper.call",
    draw=_draw_crossover,
    checks=(
        own_formula("crossover_bytes"),
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
)
