"""dp.4: the mean over tokens, on ranks that have different numbers of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dtlib.grading import rounds
from dtlib.grading.checks.on_paper import NOT_YOUR_OWN, mistake
from dtlib.grading.checks.on_ranks import (
    TWO_RANKS,
    full_bytes,
    inspect_library,
    inspect_total,
    ranks_case,
    total_like,
)
from dtlib.grading.compare import any_of, compare_ranks, each_rank, gives, right_only_if, some_rank
from dtlib.grading.drawn import all_values
from dtlib.grading.exercise import Case, Check, Exercise, Finding, Run

from .network import all_reduce_total


def _draw_weighted(rng: np.random.Generator) -> list[dict[str, Any]]:
    same = int(rng.integers(20, 60))
    counts = [
        [same] * 3,
        rng.integers(1, 90, 2).tolist(),
        rng.integers(1, 90, 3).tolist(),
        [*rng.integers(1, 90, 3).tolist(), 0],
    ]
    counts[1][0] += 90  # never equal
    cases = []
    for tokens in counts:
        case = ranks_case(
            len(tokens), int(rng.integers(40_000, 70_000)), int(rng.integers(0, 2**31)), num_tokens=tokens
        )
        cases.append({**case, "words": f"{len(tokens)} ranks with {', '.join(map(str, tokens))} tokens"})
    return cases


def _tokens(case: Case) -> Any:
    return np.asarray(case["num_tokens"], np.float64)[:, None]


def _everywhere(formula: Callable[[Any, Any], Any]) -> Callable[[Case], list[Any]]:
    return lambda case: [formula(all_values(case), _tokens(case))] * case["world_size"]


_weighted = _everywhere(lambda rows, tokens: (tokens * rows).sum(0) / tokens.sum())


def _by_own_tokens(case: Case) -> list[Any]:
    total = (_tokens(case) * all_values(case)).sum(0)
    return [total / max(tokens, 1) for tokens in case["num_tokens"]]


def _weighted_gives(formula: Callable[[Any, Any], Any]) -> Any:
    return gives(each_rank("tensor"), _everywhere(formula), rtol=1e-4, atol=1e-2)


def _inspect_weighted(run: Run) -> Finding | None:
    return compare_ranks(run, "tensor", _weighted(run.case), rtol=1e-4, atol=1e-2)  # numbers up to 100 in float32


WEIGHTED = Exercise(
    id="dp.4",
    function="token_weighted_mean",
    title="Ranks with different numbers of tokens",
    harness="dp.token_weighted",
    draw=_draw_weighted,
    checks=(
        Check(
            "own work",
            "schedule",
            0,
            "`token_weighted_mean` does not call `dtlib.ranks`",
            inspect_library,
            mistakes=NOT_YOUR_OWN,
            gate=True,
        ),
        Check(
            "gradient",
            "gradient",
            4,
            "the gradient of the mean loss over all tokens, on every rank",
            _inspect_weighted,
            mistakes=(
                mistake(
                    "plain mean",
                    _weighted_gives(lambda rows, tokens: rows.mean(0)),
                    "Every rank counts the same here, however few tokens it has. How much should a rank with one "
                    "token weigh against one with a hundred?",
                ),
                mistake(
                    "not divided",
                    _weighted_gives(lambda rows, tokens: (tokens * rows).sum(0)),
                    "The gradients are weighted and added, and the sum is not a mean yet. Divided by what, does it "
                    "become one?",
                ),
                mistake(
                    "divided by the ranks",
                    _weighted_gives(lambda rows, tokens: (tokens * rows).sum(0) / len(rows)),
                    "A weighted sum was divided by the number of ranks. The weights do not add up to that number: to "
                    "what do they add up?",
                ),
                mistake(
                    "divided by the own tokens",
                    gives(each_rank("tensor"), _by_own_tokens, rtol=1e-4, atol=1e-1),
                    "Every rank divides the same sum by its own number of tokens, so the ranks end up with different "
                    "gradients. Whose tokens are in the sum?",
                ),
                mistake(
                    "divided twice",
                    _weighted_gives(lambda rows, tokens: (tokens * rows).sum(0) / tokens.sum() / len(rows)),
                    "N times too small: the weights already make it a mean, and then it was divided by N once more. "
                    "What does `op=AVG`, or a final `/ N`, do to it?",
                ),
                mistake(
                    "sum",
                    _weighted_gives(lambda rows, tokens: rows.sum(0)),
                    "The gradients were added as they are. Each is the gradient of a mean over that rank's tokens.",
                ),
                mistake(
                    "returned, not in place",
                    gives(each_rank("returned"), _weighted, rtol=1e-4, atol=1e-2),
                    "What the function returns is right, and the tensor it was given is not. What does `gradient = "
                    "something` do to the caller's tensor, and what does `gradient.copy_(something)`?",
                ),
                mistake(
                    "nothing happened",
                    gives(each_rank("tensor"), lambda case: list(all_values(case))),
                    "Each rank still holds its own gradient. Does the result reach the caller's tensor?",
                ),
                mistake(
                    "right for equal counts only",
                    right_only_if(lambda case: len(set(case["num_tokens"])) == 1),
                    "It is right where all ranks have the same number of tokens, and only there.",
                ),
                TWO_RANKS,
                mistake(
                    "a rank without tokens",
                    right_only_if(lambda case: 0 not in case["num_tokens"]),
                    "It goes wrong where one rank has no tokens at all. What does your code divide by "
                    "there, and does that rank still come to every all-reduce?",
                ),
            ),
        ),
        Check(
            "traffic",
            "traffic",
            2,
            "no more is sent than one all-reduce of the gradient needs",
            inspect_total(lambda case: all_reduce_total(case, full_bytes(case))),
            mistakes=(
                mistake(
                    "gathered, then added",
                    any_of(
                        total_like(lambda case: case["world_size"] * (case["world_size"] - 1) * full_bytes(case)),
                        some_rank(lambda data, case: "all_gather" in rounds.collectives(data["events"])),
                    ),
                    "Every rank receives every gradient and adds for itself: N/2 times the bytes, and the memory for "
                    "N gradients. Which collective adds on the way?",
                ),
                mistake(
                    "two all-reduces",
                    total_like(lambda case: 2 * all_reduce_total(case, full_bytes(case))),
                    "The gradient travels twice. What else has to be known everywhere is one number: it costs next "
                    "to nothing.",
                ),
            ),
        ),
    ),
)
