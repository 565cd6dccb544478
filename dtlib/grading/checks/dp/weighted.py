"""dp.4: the mean over tokens, on ranks that have different numbers of them."""

from collections.abc import Callable
from typing import Any

import numpy as np

from dtlib.grading import inputs, kinds
from dtlib.grading.exercise import Exercise
from dtlib.grading.seen import Case

RTOL, ATOL = 1e-4, 1e-2  # numbers up to 100, in float32


def draw(rng: inputs.Rng) -> inputs.Cases:
    """Equal counts; two ranks and three with different ones; four, one of them without tokens, whichever it is."""
    cases: inputs.Cases = []
    for n, kind in ((3, "equal"), (2, "different"), (3, "different"), (4, "empty")):
        tokens = [int(each) for each in rng.integers(1, 90, n)]
        tokens[0] = {"equal": tokens[-1], "different": tokens[-1] + int(rng.integers(1, 90)), "empty": 0}[kind]
        tokens = [int(each) for each in rng.permutation(tokens)] if kind != "equal" else tokens[-1:] * n
        case = {"world_size": n, "num_elements": int(rng.integers(40_000, 70_000)), "num_tokens": tokens}
        case["words"] = f"{n} ranks with {', '.join(map(str, tokens))} tokens"
        case["is"] = {"two ranks": n == 2, "equal": kind == "equal", "all have some": kind != "empty"}
        cases.append(case | {"seed": int(rng.integers(0, 2**31))})
    return cases


def everywhere(formula: Callable[[Any, Any], Any]) -> kinds.Theory:
    """``formula(gradients, tokens)`` on every rank; both have a row a rank."""

    def theory(case: Case) -> list[Any]:
        tokens = np.asarray(case["num_tokens"], np.float64)[:, None]
        return [formula(inputs.all_values(case), tokens)] * case["world_size"]

    return theory


right = everywhere(lambda rows, tokens: (tokens * rows).sum(0) / tokens.sum())
weighted_sum = everywhere(lambda rows, tokens: (tokens * rows).sum(0))


def by_own_tokens(case: Case) -> list[Any]:
    return [total / max(tokens, 1) for total, tokens in zip(weighted_sum(case), case["num_tokens"], strict=True)]


def needed(case: Case) -> float:
    return 2.0 * (case["world_size"] - 1) * kinds.full_bytes(case)


GRADIENT: kinds.Wrong = {
    "plain mean": everywhere(lambda rows, tokens: rows.mean(0)),
    "not divided": weighted_sum,
    "divided by the ranks": everywhere(lambda rows, tokens: (tokens * rows).sum(0) / len(rows)),
    "divided by the own tokens": by_own_tokens,
    "divided twice": everywhere(lambda rows, tokens: (tokens * rows).sum(0) / tokens.sum() / len(rows)),
    "weights for a mean, and a sum": everywhere(lambda rows, tokens: (tokens * rows).sum(0) / tokens.sum() * len(rows)),
    "sum": everywhere(lambda rows, tokens: rows.sum(0)),
    "returned, not in place": kinds.instead("returned", right, RTOL, ATOL),
    "nothing happened": lambda case: list(inputs.all_values(case)),
    "right for equal counts only": kinds.only_if("equal"),
    "a rank without tokens": kinds.only_if("all have some"),
}
TRAFFIC: kinds.Wrong = {
    "gathered, then added": (lambda case: case["world_size"] / 2 * needed(case), kinds.GATHERED),
    "two all-reduces": lambda case: 2 * needed(case),
}
CHECKS = (
    kinds.own_work("token_weighted_mean"),
    kinds.values(
        4, "gradient", "the gradient of the mean loss over all tokens, on every rank", right, of="tensor",
        kind="gradient", least_sent=lambda case: needed(case) / 2, wrong=GRADIENT, rtol=RTOL, atol=ATOL,
    ),
    kinds.sends(2, "traffic", "no more is sent than one all-reduce of the gradient needs", needed, wrong=TRAFFIC),
)  # fmt: skip
EXERCISE = Exercise(
    id="dp.4", function="token_weighted_mean", title="Ranks with different numbers of tokens",
    harness="dp.token_weighted", draw=draw, handed_out=inputs.values, checks=CHECKS,
)  # fmt: skip
