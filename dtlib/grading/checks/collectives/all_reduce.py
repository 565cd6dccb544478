"""collectives.6: a whole ring, the all-reduce."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dtlib.grading import inputs
from dtlib.grading.compare import close, mixture
from dtlib.grading.exercise import Exercise
from dtlib.grading.inputs import all_values
from dtlib.grading.kinds import Sign, every, full_bytes, instead, messages_alone, own_work, sends, values
from dtlib.grading.seen import Case, Observed
from dtlib.theory import collectives as theory

from ._ring import ATOL, cut, draw_ring, holds, one_rank_collects, ring, ring_case, sent, sent_in

FUNCTION = "ring_all_reduce"


def draw(rng: np.random.Generator) -> list[dict[str, Any]]:
    """The cases of a ring for the sum; the mean of 4 ranks with equal chunks, of 3 with unequal ones."""
    means = ((4, 4 * int(rng.integers(8_000, 12_000))), (3, 3 * int(rng.integers(8_000, 12_000)) + 1))
    return [*draw_ring(rng, op="sum"), *(ring_case(n, length, rng, op="mean") for n, length in means)]


def right(case: Case) -> list[Any]:
    """The sum or the mean, everywhere."""
    rows = all_values(case)
    return [rows.sum(0) if case["op"] == "sum" else rows.mean(0)] * len(rows)


def sums(case: Case, rank: int) -> Any:
    """What each rank contributes, chunk by chunk."""
    return [cut(row, case["world_size"]) for row in all_values(case)]


def chunks_right(count: Callable[[int], int]) -> Sign:
    """On every rank of n, ``count(n)`` chunks hold what they should."""

    def holds(each: Observed) -> bool:
        n = each.case["world_size"]
        pairs = ((cut(said["tensor"], n), cut(row, n)) for said, row in zip(each.said, right(each.case), strict=True))
        return all(sum(map(lambda a, b: close(a, b, atol=ATOL), *pair)) == count(n) for pair in pairs)

    return every(holds)


def divided_on_the_way(each: Observed) -> bool:
    """Whether each chunk is (…((a + b)/d + c)/d + …)/d: whoever joined earlier is divided more often."""
    parts, n = sums(each.case, 0), each.case["world_size"]
    for said in each.said:
        for number, chunk in enumerate(cut(said["tensor"], n)):
            found = mixture(chunk, [part[number] for part in parts])
            if found is None or found.min() < 0.01:
                return False
            first, *rest = np.sort(found)
            by = rest[1] / rest[0]
            if by < 1.5 or not np.allclose(rest, first * by ** np.arange(n - 1), rtol=0.02):
                return False
    return True


EXERCISE = Exercise(
    id="collectives.6",
    function=FUNCTION,
    title="A whole ring: all-reduce",
    harness="collectives.all_reduce",
    draw=draw,
    handed_out=inputs.values,
    holds=holds,
    checks=(
        own_work(FUNCTION),
        messages_alone(1, FUNCTION),
        values(
            2,
            "sum",
            "every rank ends up with the sum, chunks of equal length",
            right,
            of="tensor",
            atol=ATOL,
            sums=sums,
            where=lambda case: bool(case["op"] == "sum" and case["is"]["divisible"]),
            wrong={
                "returned, not in place": instead("returned", right, atol=ATOL),
                "reduce-scatter only": chunks_right(lambda n: 1),
                "last step missing": chunks_right(lambda n: n - 1),
            },
        ),
        values(
            2,
            "any length",
            "the sum for any length",
            right,
            of="tensor",
            atol=ATOL,
            where=lambda case: bool(case["op"] == "sum"),
        ),
        values(
            1,
            "mean",
            'every rank ends up with the mean where `op` is `"mean"`',
            right,
            of="tensor",
            atol=ATOL,
            sums=sums,
            where=lambda case: bool(case["op"] == "mean"),
            wrong={
                "mean of the mean": lambda case: [row / case["world_size"] for row in right(case)],
                "divided at every step": every(divided_on_the_way),
            },
        ),
        sends(
            3,
            "traffic",
            "each rank sends 2(N−1)/N·D bytes",
            lambda case: sent("ring_all_reduce", case),
            where="large",
            wrong={
                "messages twice as long": sent_in(theory.ring_all_reduce_steps, 2.0, "ring_all_reduce"),
                "whole buffers": lambda case: [(case["world_size"] - 1) * full_bytes(case)] * case["world_size"],
                "one rank does the work": every(one_rank_collects),
            },
        ),
        ring(2, theory.ring_all_reduce_steps, "2(N−1) messages to one neighbour, and none waits for its turn"),
    ),
)
