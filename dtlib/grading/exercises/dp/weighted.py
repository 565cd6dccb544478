"""dp.4: the mean over tokens, on ranks that have different numbers of them."""

from collections.abc import Callable
from typing import Any

import numpy as np

from dtlib.grading.exercises import inputs, kinds, signs
from dtlib.grading.exercises.exercise import Exercise
from dtlib.grading.exercises.seen import Case

RTOL, ATOL = 1e-4, 1e-2  # numbers up to 100, in float32
ROUNDED = 4.0  # a sum of some of them, times tens of thousands


def draw(rng: inputs.Rng) -> inputs.Cases:
    """Equal counts; two ranks and three with different ones; four, one of them without tokens, whichever it is. The
    first two have so many tokens that a format of 16 bits does not count them; the gradient of the third has rows."""
    cases: inputs.Cases = []
    for n, kind in ((3, "equal"), (2, "different"), (3, "different"), (4, "empty")):
        is_many = len(cases) < 2
        lowest, highest = (10_001, 60_000) if is_many else (1, 60)
        tokens = [int(each) | is_many for each in rng.integers(lowest, highest, n)]  # then odd
        tokens[0] = {"equal": tokens[-1], "different": tokens[-1] + int(rng.integers(1, 60)), "empty": 0}[kind]
        tokens = [int(each) for each in rng.permutation(tokens)] if kind != "equal" else tokens[-1:] * n
        case = {"world_size": n, "num_elements": 8 * int(rng.integers(5_000, 9_000)), "num_tokens": tokens}
        case |= {"columns": 8} if len(cases) == 2 else {}
        case["words"] = f"{n} ranks with {', '.join(map(str, tokens))} tokens"
        more = {"few tokens": not is_many, "one dimension": "columns" not in case}
        case["is"] = {"two ranks": n == 2, "equal": kind == "equal", "all have some": kind != "empty", **more}
        cases.append(case | {"seed": int(rng.integers(0, 2**31))})
    return cases


def everywhere(formula: Callable[[Any, Any], Any]) -> signs.Theory:
    """``formula(gradients, tokens)`` on every rank; both have a row a rank."""

    def theory(case: Case) -> list[Any]:
        rows = inputs.all_values(case)
        tokens = np.asarray(case["num_tokens"], np.float64).reshape(-1, *[1] * (rows.ndim - 1))
        return [formula(rows, tokens)] * len(rows)

    return theory


right = everywhere(lambda rows, tokens: (tokens * rows).sum(0) / tokens.sum())
weighted_sum = everywhere(lambda rows, tokens: (tokens * rows).sum(0))


def by_own_tokens(case: Case) -> list[Any]:
    return [total / max(tokens, 1) for total, tokens in zip(weighted_sum(case), case["num_tokens"], strict=True)]


def needed(case: Case) -> float:
    return 2.0 * (case["world_size"] - 1) * kinds.full_bytes(case)


GRADIENT: signs.Wrong = {
    "plain mean": everywhere(lambda rows, tokens: rows.mean(0)),
    "not divided": signs.instead("tensor", weighted_sum, RTOL, ROUNDED),
    "divided by the ranks": signs.instead(
        "tensor", everywhere(lambda rows, tokens: (tokens * rows).sum(0) / len(rows)), RTOL, ROUNDED
    ),
    "divided by the own tokens": by_own_tokens,
    "divided twice": everywhere(lambda rows, tokens: (tokens * rows).sum(0) / tokens.sum() / len(rows)),
    "weights for a mean, and a sum": everywhere(lambda rows, tokens: (tokens * rows).sum(0) / tokens.sum() * len(rows)),
    "sum": everywhere(lambda rows, tokens: rows.sum(0)),
    "returned, not in place": signs.instead("returned", right, RTOL, ATOL),
    "nothing happened": lambda case: list(inputs.all_values(case)),
    "right for equal counts only": signs.only_if("equal"),
    "a rank without tokens": signs.only_if("all have some"),
    "right for few tokens only": signs.only_if("few tokens"),
}
TRAFFIC: signs.Wrong = {
    "gathered, then added": (lambda case: case["world_size"] / 2 * needed(case), signs.GATHERED),
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
