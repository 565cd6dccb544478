"""dp.4: the mean over tokens, on ranks that have different numbers of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dtlib.grading import inputs
from dtlib.grading.exercise import Exercise
from dtlib.grading.inputs import all_values
from dtlib.grading.kinds import GATHERED, Theory, full_bytes, instead, only_if, own_work, sends, values
from dtlib.grading.seen import Case

FUNCTION = "token_weighted_mean"
RTOL, ATOL = 1e-4, 1e-2  # numbers up to 100, in float32


def draw(rng: np.random.Generator) -> list[dict[str, Any]]:
    """Equal counts; two ranks and three with different ones; four, one of them without tokens, whichever it is."""
    cases: list[dict[str, Any]] = []
    for n, kind in ((3, "equal"), (2, "different"), (3, "different"), (4, "empty")):
        tokens = [int(each) for each in rng.integers(1, 90, n)]
        tokens[0] = {"equal": tokens[-1], "different": tokens[-1] + int(rng.integers(1, 90)), "empty": 0}[kind]
        tokens = [int(each) for each in rng.permutation(tokens)] if kind != "equal" else tokens[-1:] * n
        cases.append(
            {
                "world_size": n,
                "num_elements": int(rng.integers(40_000, 70_000)),
                "num_tokens": tokens,
                "seed": int(rng.integers(0, 2**31)),
                "words": f"{n} ranks with {', '.join(map(str, tokens))} tokens",
                "is": {"two ranks": n == 2, "equal": kind == "equal", "all have some": kind != "empty"},
            }
        )
    return cases


def everywhere(formula: Callable[[Any, Any], Any]) -> Theory:
    """``formula(gradients, tokens)`` on every rank; both have a row a rank."""

    def theory(case: Case) -> list[Any]:
        return [formula(all_values(case), np.asarray(case["num_tokens"], np.float64)[:, None])] * case["world_size"]

    return theory


right = everywhere(lambda rows, tokens: (tokens * rows).sum(0) / tokens.sum())
weighted_sum = everywhere(lambda rows, tokens: (tokens * rows).sum(0))


def by_own_tokens(case: Case) -> list[Any]:
    """The weighted sum, divided by each rank's own tokens."""
    return [total / max(tokens, 1) for total, tokens in zip(weighted_sum(case), case["num_tokens"], strict=True)]


def needed(case: Case) -> float:
    """What all ranks send in an all-reduce of the gradient."""
    return 2.0 * (case["world_size"] - 1) * full_bytes(case)


EXERCISE = Exercise(
    id="dp.4",
    function=FUNCTION,
    title="Ranks with different numbers of tokens",
    harness="dp.token_weighted",
    draw=draw,
    handed_out=inputs.values,
    checks=(
        own_work(FUNCTION),
        values(
            4,
            "gradient",
            "the gradient of the mean loss over all tokens, on every rank",
            right,
            of="tensor",
            kind="gradient",
            least_sent=lambda case: needed(case) / 2,
            wrong={
                "plain mean": everywhere(lambda rows, tokens: rows.mean(0)),
                "not divided": weighted_sum,
                "divided by the ranks": everywhere(lambda rows, tokens: (tokens * rows).sum(0) / len(rows)),
                "divided by the own tokens": by_own_tokens,
                "divided twice": everywhere(lambda rows, tokens: (tokens * rows).sum(0) / tokens.sum() / len(rows)),
                "weights for a mean, and a sum": everywhere(
                    lambda rows, tokens: (tokens * rows).sum(0) / tokens.sum() * len(rows)
                ),
                "sum": everywhere(lambda rows, tokens: rows.sum(0)),
                "returned, not in place": instead("returned", right, RTOL, ATOL),
                "nothing happened": lambda case: list(all_values(case)),
                "right for equal counts only": only_if("equal"),
                "a rank without tokens": only_if("all have some"),
            },
            rtol=RTOL,
            atol=ATOL,
        ),
        sends(
            2,
            "traffic",
            "no more is sent than one all-reduce of the gradient needs",
            needed,
            wrong={
                "gathered, then added": (lambda case: case["world_size"] / 2 * needed(case), GATHERED),
                "two all-reduces": lambda case: 2 * needed(case),
            },
        ),
    ),
)
