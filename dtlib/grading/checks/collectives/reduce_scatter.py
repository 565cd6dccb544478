"""collectives.5: half of a ring, the reduce-scatter."""

from __future__ import annotations

from typing import Any

import numpy as np

from dtlib.grading.checks.collectives.ring import (
    ATOL,
    DEADLOCK,
    DIVISIBLE,
    ONE_RANK,
    TOO_SHORT,
    WHOLE_BUFFERS,
    cut,
    draw_ring,
    inspect_ring,
    one_rank_does_the_work,
    ring_mistakes,
    traffic,
)
from dtlib.grading.checks.on_paper import mistake
from dtlib.grading.checks.on_ranks import (
    TWO_RANKS,
    full_bytes,
    inspect_sent,
    is_large,
    own_work,
    ranks_case,
    sent_like,
    total_like,
)
from dtlib.grading.compare import any_of, close, compare_ranks, each_rank, every_run, gives, some_rank
from dtlib.grading.drawn import all_values
from dtlib.grading.exercise import Case, Check, Exercise, Finding, Run
from dtlib.theory import collectives as theory


def _draw_reduce_scatter(rng: np.random.Generator) -> list[dict[str, Any]]:
    return [ranks_case(*each) for each in draw_ring(rng)]


def _inspect_chunk(run: Run) -> Finding | None:
    return compare_ranks(run, "returned", cut(all_values(run.case).sum(0), run.case["world_size"]), atol=ATOL)


def _moved(by: int) -> Any:
    def wrong(case: Case) -> list[Any]:
        n = case["world_size"]
        chunks = cut(all_values(case).sum(0), n)
        return [chunks[(rank + by) % n] for rank in range(n)]

    return gives(each_rank("returned"), wrong, atol=ATOL)


def _scaled(factor: Any) -> Any:
    def wrong(case: Case) -> list[Any]:
        n = case["world_size"]
        return [factor(n) * chunk for chunk in cut(all_values(case).sum(0), n)]

    return gives(each_rank("returned"), wrong, atol=ATOL)


def _raw_chunk(data: Any, case: Case) -> bool:
    """Whether a rank returned a chunk of one rank's input, to which nothing was added."""
    n = case["world_size"]
    return any(close(data["returned"], chunk) and chunk.size for row in all_values(case) for chunk in cut(row, n))


def _off_by_one_rank(sign: int, least_ranks: int) -> Any:
    """Recognise: a rank returned the sum of a chunk, and one rank's contribution added (or taken off) once more."""

    def fits(data: Any, case: Case) -> bool:
        n, rows = case["world_size"], all_values(case)
        return n >= least_ranks and any(
            close(data["returned"], chunk, atol=ATOL) and chunk.size
            for row in rows
            for chunk in cut(rows.sum(0) + sign * row, n)
        )

    return some_rank(fits)


REDUCE_SCATTER = Exercise(
    id="collectives.5",
    function="ring_reduce_scatter",
    title="Half of a ring: reduce-scatter",
    harness="collectives.reduce_scatter",
    draw=_draw_reduce_scatter,
    checks=(
        own_work("ring_reduce_scatter"),
        Check(
            "values",
            "value",
            3,
            "rank r returns chunk r of the sum",
            _inspect_chunk,
            mistakes=(
                TWO_RANKS,
                DIVISIBLE,
                TOO_SHORT,
                mistake(
                    "not returned",
                    every_run(lambda run: all(data["returned"] is None for data in run.ranks)),
                    "The function returns nothing. The sum may well lie in a chunk of the tensor: the task asks to "
                    "hand that chunk back.",
                ),
                mistake(
                    "mean for sum",
                    _scaled(lambda n: 1 / n),
                    "This is the mean over the ranks. The task asks for the sum; who divides, and when, is a later "
                    "decision.",
                ),
                mistake(
                    "chunk of the neighbour",
                    any_of(_moved(1), _moved(-1)),
                    "The sums are right and each lies one rank off. Where does a chunk end its journey, and where "
                    "must it start so that chunk r ends on rank r?",
                ),
                mistake(
                    "all-reduce",
                    gives(each_rank("returned"), lambda c: [all_values(c).sum(0)] * c["world_size"], atol=ATOL),
                    "Every rank returns the whole sum. Its own chunk is enough, and costs half.",
                ),
                mistake(
                    "nothing added",
                    some_rank(_raw_chunk),
                    "What comes back is a chunk of one rank's input, as it was. A chunk that arrives has to be added "
                    "to the own one before it travels on.",
                ),
                mistake(
                    "a contribution is missing",
                    _off_by_one_rank(-1, 3),
                    "One rank's contribution is missing from the sum. Count the steps: how many additions does a "
                    "chunk need, and who makes the last?",
                ),
                mistake(
                    "a contribution counted twice",
                    _off_by_one_rank(1, 2),
                    "One rank's contribution is in the sum twice. Does a chunk come back to where it started, or is it "
                    "added to a sum that holds it already?",
                ),
                DEADLOCK,
            ),
        ),
        Check(
            "traffic",
            "traffic",
            2,
            "each rank sends (N−1)/N·D bytes",
            inspect_sent(lambda case: traffic("ring_reduce_scatter", case).sent_bytes),
            mistakes=(
                mistake(
                    "whole buffers",
                    sent_like(lambda case, rank: (case["world_size"] - 1) * full_bytes(case)),
                    WHOLE_BUFFERS,
                ),
                mistake("one rank does the work", one_rank_does_the_work, ONE_RANK),
                mistake(
                    "twice the bytes",
                    total_like(lambda case: 2 * (case["world_size"] - 1) * full_bytes(case)),
                    "All ranks together send 2(N−1)·D, what an all-reduce costs. The second journey tells everybody "
                    "what one rank needs to know.",
                ),
            ),
            applies=is_large,
        ),
        Check(
            "rounds",
            "schedule",
            2,
            "N−1 rounds, each rank sending to one neighbour",
            inspect_ring(theory.ring_reduce_scatter_steps),
            ring_mistakes(theory.ring_reduce_scatter_steps),
            applies=is_large,
        ),
    ),
)
