"""collectives.6: a whole ring, the all-reduce."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from dtlib.grading.exercises import inputs
from dtlib.grading.exercises.compare import close, mixture
from dtlib.grading.exercises.exercise import Exercise
from dtlib.grading.exercises.inputs import Cases, Rng, all_values
from dtlib.grading.exercises.kinds import messages_alone, own_work, values
from dtlib.grading.exercises.seen import Case, Observed
from dtlib.grading.exercises.signs import Sign, Wrong, every, instead, only_if
from dtlib.theory import collectives as theory

from ._ring import ATOL, cut, draw_ring, holds, messages, ring, ring_case, traffic

FUNCTION = "ring_all_reduce"
STEPS = theory.ring_all_reduce_steps


def draw(rng: Rng) -> Cases:
    """The cases of a ring for the sum; the mean of 4 ranks with equal chunks and with few numbers, of 3."""
    means = ((4, 4 * int(rng.integers(8_000, 12_000))), (3, 3 * int(rng.integers(8_000, 12_000)) + 1), (4, 3))
    return [*draw_ring(rng, op="sum"), *(ring_case(n, length, rng, op="mean") for n, length in means)]


def right(case: Case) -> list[Any]:
    rows = all_values(case)
    return [rows.sum(0) if case["op"] == "sum" else rows.mean(0)] * len(rows)


def sums(case: Case, rank: int) -> Any:
    """What each rank contributes, chunk by chunk."""
    return [cut(row, case["world_size"]) for row in all_values(case)]


def chunks_right(count: Callable[[int], int]) -> Sign:
    """On every rank of n, ``count(n)`` chunks hold what they should, and messages are missing."""

    def holds(each: Observed) -> bool:
        n = each.case["world_size"]
        if max(messages(each)) >= STEPS(n):
            return False
        pairs = ((cut(said["tensor"], n), cut(row, n)) for said, row in zip(each.said, right(each.case), strict=True))
        return all(sum(map(lambda a, b: close(a, b, atol=ATOL), *pair)) == count(n) for pair in pairs)

    return every(holds)


def divided_on_the_way(each: Observed) -> bool:
    """Whether each chunk is (…((a + b)/d + c)/d + …)/d: whoever joined earlier is divided more often. A few numbers do
    not tell."""
    if not each.case["is"]["large"]:
        return True
    n, parts = each.case["world_size"], sums(each.case, 0)
    chunks = [cut(said["tensor"], n) for said in each.said]
    found = [mixture(own[number], [part[number] for part in parts]) for own in chunks for number in range(n)]
    for one in found:
        if n < 3 or one is None or one.min() < 0.01:
            return False
        _, *rest = np.sort(one)
        by = rest[1] / rest[0]
        if by < 1.5 or not np.allclose(rest, rest[0] * by ** np.arange(n - 1), rtol=0.02):
            return False
    return True


def is_sum(case: Case) -> bool:
    return bool(case["op"] == "sum")


SUM: Wrong = {
    "returned, not in place": instead("returned", right, atol=ATOL),
    "reduce-scatter only": chunks_right(lambda n: 1),
    "last step missing": chunks_right(lambda n: n - 1),
}
MEAN: Wrong = {
    "mean of the mean": lambda case: [row / case["world_size"] for row in right(case)],
    "too short to go round": only_if("long enough"),
    "divided at every step": every(divided_on_the_way),
}
EQUAL = "every rank ends up with the sum, chunks of equal length"
MEANS = 'every rank ends up with the mean where `op` is `"mean"`'
in_place = partial(values, right=right, of="tensor", atol=ATOL)

EXERCISE = Exercise(
    id="collectives.6", function=FUNCTION, title="A whole ring: all-reduce", harness="collectives.all_reduce",
    draw=draw, handed_out=inputs.values, holds=holds,
    checks=(
        own_work(FUNCTION),
        messages_alone(1, FUNCTION),
        in_place(2, "sum", EQUAL, sums=sums, wrong=SUM, where=lambda case: is_sum(case) and case["is"]["divisible"]),
        in_place(2, "any length", "the sum for any length", where=is_sum),
        in_place(1, "mean", MEANS, sums=sums, wrong=MEAN, where=lambda case: not is_sum(case)),
        traffic(3, "each rank sends 2(N−1)/N·D bytes", "ring_all_reduce", STEPS),
        ring(2, STEPS, "2(N−1) messages to one neighbour, and none waits for its turn"),
    ),
)  # fmt: skip
