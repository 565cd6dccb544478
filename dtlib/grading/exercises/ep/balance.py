"""ep.5: the bias that moves against the load of an expert: in the choice, not in the weights; on paper."""

import math
from functools import partial
from typing import Any

import numpy as np

from dtlib.grading.exercises.inputs import Case, Rng, call, in_order
from dtlib.grading.exercises.kinds import on_paper, values

#: Steps, tokens, experts, experts a token, and whether the bias is zero at first: a mean load that is a whole number,
#: and one that no load can have.
KINDS = (
    (1, 8, 4, 1, True), (1, 7, 4, 2, False), (3, 8, 4, 2, False), (4, 10, 5, 1, True), (3, 7, 4, 3, False),
    (3, 8, 8, 2, True), (4, 9, 3, 1, False),
)  # fmt: skip


def drawn(rng: Rng, steps: int, tokens: int, num_experts: int, top_k: int, is_zero: bool) -> dict[str, Any]:
    """Where an expert can have just the mean load, one has in each step; where none can, one has a little more and one
    a little less in the first. No two sums are the same."""
    while True:
        liked = rng.normal(0, 0.8, num_experts)
        logits = liked + rng.normal(0, 0.6, (steps, tokens, num_experts))
        scores = np.round(1 / (1 + np.exp(-logits)), 3)
        first = np.round(rng.normal(0, 0.25, num_experts), 3) + 7e-5 * np.arange(num_experts)
        bias = np.round(0 * first if is_zero else first, 5)
        rate = float(rng.integers(30, 90)) / 1000 + 0.00037
        told = call("", [scores, top_k, bias, rate]) | {
            "words": f"{steps} steps, scores {scores.tolist()}, k={top_k}, bias {bias.tolist()}, rate {rate}"
        }
        mean = tokens * top_k / num_experts
        is_clear = np.diff(np.sort(scores)).min() > 0
        loads = right(told)[0].tolist()
        is_near = {math.floor(mean), math.ceil(mean)} <= set(loads[0])
        if is_clear and is_near and all((mean % 1 > 0 or mean in load) and len(set(load)) > 1 for load in loads):
            return told


def right(case: Case) -> list[Any]:
    """Seats are taken one expert after the other, the best one that is left each time."""
    scores, top_k, bias, rate = case["arguments"]
    loads, bias = [], bias.copy()
    for step in scores:
        left, weights = step + bias, np.zeros_like(step)
        for _ in range(top_k):
            best = left.argmax(1)[:, None]
            np.put_along_axis(weights, best, np.take_along_axis(step, best, 1), 1)
            np.put_along_axis(left, best, -np.inf, 1)
        load = (weights > 0).sum(0)
        loads.append(load)
        difference = load * len(bias) - load.sum()
        bias = bias - rate * (difference > 0) + rate * (difference < 0)
    return [np.array(loads), bias, weights / weights.sum(1)[:, None]]


part = partial(values, right=right, parts="loads, bias, weights", atol=1e-9)

EXERCISE = on_paper(
    "ep.5", "balance", "A balance without a loss", in_order(KINDS, drawn),
    part(2, "loads", "the loads of all steps", part=0),
    part(3, "bias", "the bias after the last step", part=1),
    part(2, "weights", "the weights of the last step", part=2),
)  # fmt: skip
