"""cp.4: the way back around the ring."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from dtlib.grading.exercises import inputs
from dtlib.grading.exercises.compare import show_bytes
from dtlib.grading.exercises.exercise import Exercise, Finding
from dtlib.grading.exercises.kinds import messages_alone, near, order, own_work, values
from dtlib.grading.exercises.seen import Case, Observed
from dtlib.grading.exercises.signs import Sign, Theory, Wrong, every, only_if

from . import _attention as attention
from .ring import PLACES, everything, needed, own_block_alone, where

TOLERANCE = 2e-4  # float32, sums of some dozen numbers around 1
Blocks = Callable[[int, int], Sequence[int]]


def draw(rng: inputs.Rng) -> inputs.Cases:
    """Lengths that are equal and not, one token too, of two ranks and more, causal and not."""
    cases = []
    for n, is_equal, causal in (
        (2, True, False), (3, False, True), (4, True, False), (2, False, True), (3, True, True), (4, False, False),
        (4, False, True),
    ):  # fmt: skip
        own = int(rng.integers(10, 18))
        lengths = [own] * n if is_equal else [int(each) for each in own + rng.permutation(n) * 3]
        lengths = attention.in_front(lengths) if causal else lengths
        if n == 4 and causal:
            lengths[int(rng.integers(1, n))] = 1
        cases.append(attention.case(rng, lengths, causal=causal))
    return cases


def handed_out(case: Case, rank: int) -> inputs.Pieces:
    output, log_sum = (each.astype(np.float32) for each in attention.whole(case)[rank])
    return [("start", attention.given(case, rank) | {"output": output, "log_sum": log_sum})]


def to_queries(blocks: Blocks = lambda rank, n: range(n), **how: Any) -> Theory:
    """Of each rank the gradient of its queries, as far as it comes from such blocks."""

    def theory(case: Case) -> list[Any]:
        n = case["world_size"]
        return [sum(attention.back(case, rank, block, **how).to_q for block in blocks(rank, n)) for rank in range(n)]

    return theory


def addends(case: Case, block: int, **how: Any) -> list[list[Any]]:
    """What each rank brings to the gradients of a block's keys and values."""
    found = [attention.back(case, rank, block, **how) for rank in range(case["world_size"])]
    return [[each.to_k, each.to_v] for each in found]


def to_keys(shift: int = 0, times: Callable[[int], float] = lambda n: 1, **how: Any) -> Theory:
    """Of each rank the gradients of the keys and values of the rank so many places further, so many times the sum."""

    def theory(case: Case) -> list[Any]:
        n = case["world_size"]
        every_rank = [addends(case, (rank + shift) % n, **how) for rank in range(n)]
        return [[times(n) * sum(each) for each in zip(*found, strict=True)] for found in every_rank]

    return theory


def most(case: Case) -> float:
    """What all ranks send: keys and values to all others, their gradients as far, and home."""
    return needed(case, 4) + needed(case) / (case["world_size"] - 1)


def find_bytes(each: Observed) -> Finding | None:
    """That no more was sent; less is possible."""
    sent = each.seen.total_bytes
    if sent <= most(each.case) or near(sent, most(each.case)):
        return None
    return Finding(f"{show_bytes(sent)} sent", f"at most {show_bytes(most(each.case))}", each.words)


def sent(theory: Theory) -> Sign:
    """As much was sent as that."""
    return every(lambda each: near(each.seen.total_bytes, theory(each.case)))


def of_either(of: Callable[..., Theory]) -> Wrong:
    return {
        "inner product forgotten": of(inner=0.0), "scores not scaled": of(power=0.0),
        "softmax of each block": of(own=True), "positions from 0": where("causal", of(mask=attention.local)),
        "places from the own length": tuple(where("causal", of(mask=each)) for each in PLACES),
        "causal forgotten": where("causal", of(mask=everything)), "always causal": of(mask=attention.in_all),
        "later blocks not hidden": where("causal", of(mask=own_block_alone)),
        "right for equal lengths only": only_if("equal lengths"),
    }  # fmt: skip


QUERIES: Wrong = {"own block alone": to_queries(lambda rank, n: [rank]), **of_either(to_queries)}
KEYS: Wrong = {
    "left with another rank": (to_keys(1), to_keys(-1)), "mean for sum": to_keys(times=lambda n: 1 / n),
    **of_either(to_keys),
}  # fmt: skip
TRAFFIC: Wrong = {
    "whole gradients travel": sent(lambda case: needed(case) * (1 + case["world_size"])),
    "a round too many": sent(lambda case: most(case) + needed(case) / (case["world_size"] - 1)),
    "more than keys, values and their gradients": sent(lambda case: most(case) + needed(case)),
}
right = partial(values, rtol=TOLERANCE, atol=TOLERANCE, kind="gradient", least_sent=lambda case: needed(case))

EXERCISE = Exercise(
    id="cp.4", function="ring_backward", title="The way back around the ring", harness="cp.back", draw=draw,
    handed_out=handed_out,
    checks=(
        own_work("ring_backward", built_in=True),
        messages_alone(1, "ring_backward"),
        right(2, "queries", "the gradient of the own queries", to_queries(), of="queries", wrong=QUERIES),
        right(3, "keys", "the gradients of the own keys and values", to_keys(), of="keys", wrong=KEYS,
              sums=addends, names=lambda case: ("k", "v")),
        order(2, "traffic", "keys, values and their gradients travel, and nothing else as large", find_bytes,
              wrong=TRAFFIC, kind="traffic"),
    ),
)  # fmt: skip
