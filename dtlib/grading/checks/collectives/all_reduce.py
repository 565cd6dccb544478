"""collectives.6: a whole ring, the all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dtlib.grading import plain
from dtlib.grading.checks.collectives.ring import (
    ATOL,
    DEADLOCK,
    DIVISIBLE,
    TOO_SHORT,
    WHOLE_BUFFERS,
    cut,
    draw_ring,
    inspect_ring,
    not_in_place,
    ring_mistakes,
    traffic,
)
from dtlib.grading.checks.on_paper import mistake
from dtlib.grading.checks.on_ranks import (
    TWO_RANKS,
    full_bytes,
    inspect_sent,
    is_divisible,
    is_large,
    own_work,
    ranks_case,
    sent_like,
)
from dtlib.grading.compare import any_of, close, compare_ranks, each_rank, every_run, gives
from dtlib.grading.drawn import all_values
from dtlib.grading.exercise import Case, Check, Exercise, Finding, Run
from dtlib.theory import collectives as theory


def _draw_all_reduce(rng: np.random.Generator) -> list[dict[str, Any]]:
    cases = [ranks_case(*each, op="sum") for each in draw_ring(rng)]
    n, length, seed = draw_ring(rng)[int(rng.integers(1, 3))]
    return [*cases, ranks_case(n, length, seed, op="mean")]


def _reduced(case: Case) -> list[Any]:
    rows = all_values(case)
    return [rows.sum(0) if case["op"] == "sum" else rows.mean(0)] * len(rows)


def _inspect_reduced(run: Run) -> Finding | None:
    return compare_ranks(run, "tensor", _reduced(run.case), atol=ATOL)


def _one_sends_most(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
    """Whether, wherever there are more than two ranks, one sends half as much again as another."""
    several = [run for run in failing if run.case["world_size"] > 2]
    uneven = every_run(lambda run: max(map(_sent, run.ranks)) > 1.5 * min(map(_sent, run.ranks)))
    return bool(uneven(several, passing))


def _sent(data: Any) -> float:
    return float(data["sent_bytes"])


def _num_right(data: Any, case: Case) -> int:
    """How many chunks of a rank hold the sum."""
    n = case["world_size"]
    seen = data["tensor"]
    total = all_values(case).sum(0)
    if not plain.is_array(seen) or seen.shape != total.shape:
        return -1
    return sum(close(one, two, atol=ATOL) for one, two in zip(cut(seen, n), cut(total, n), strict=True))


def _chunks_right(count: Any) -> Any:
    """Recognise by how many chunks are right: in every failing run, on every rank."""

    def fits(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
        back = [run for run in failing if run.trouble is None]
        return any(run.case["world_size"] > 2 for run in back) and all(
            _num_right(data, run.case) == count(run.case["world_size"]) for run in back for data in run.ranks
        )

    return fits


def _halved_at_each_hop(divisor: Any) -> Any:
    """Recognise a division at every addition: v ← (v + own) / divisor along the ring, from any rank, either way."""

    def wrong(case: Case, start: int, by: int) -> list[Any]:
        n, rows = case["world_size"], all_values(case)
        chunks = []
        for c in range(n):
            order = [(c + start + by * step) % n for step in range(n)]
            value = cut(rows[order[0]], n)[c]
            for rank in order[1:]:
                value = (value + cut(rows[rank], n)[c]) / divisor(n)
            chunks.append(value)
        return [np.concatenate(chunks)] * n

    def fits(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
        back = [run for run in failing if run.trouble is None]
        return bool(back) and all(
            any(
                close([data["tensor"] for data in run.ranks], wrong(run.case, start, by), atol=ATOL)
                for start in range(run.case["world_size"])
                for by in (1, -1)
            )
            for run in back
        )

    return fits


def _mean_gives(wrong: Any) -> Any:
    return gives(each_rank("tensor"), lambda case: [wrong(all_values(case))] * case["world_size"], atol=ATOL)


ALL_REDUCE = Exercise(
    id="collectives.6",
    function="ring_all_reduce",
    title="A whole ring: all-reduce",
    harness="collectives.all_reduce",
    draw=_draw_all_reduce,
    checks=(
        own_work("ring_all_reduce"),
        Check(
            "sum",
            "value",
            2,
            "every rank ends up with the sum, chunks of equal length",
            _inspect_reduced,
            mistakes=(
                TWO_RANKS,
                not_in_place(_reduced),
                mistake(
                    "reduce-scatter only",
                    _chunks_right(lambda n: 1),
                    "On each rank one chunk is the sum and the others are not: that is half of the way. Who has the "
                    "chunks that are missing, and how do they travel?",
                ),
                mistake(
                    "last step missing",
                    _chunks_right(lambda n: n - 1),
                    "On each rank a single chunk is wrong, all others are right. Count the steps of the second "
                    "journey.",
                ),
                mistake(
                    "mean for sum",
                    _mean_gives(lambda rows: rows.mean(0)),
                    "This is the mean, and `op` says sum. When is it time to divide?",
                ),
                mistake(
                    "nothing happened",
                    gives(each_rank("tensor"), lambda case: list(all_values(case))),
                    "Each rank still holds what it started with. Do the received chunks reach the caller's tensor?",
                ),
                DEADLOCK,
            ),
            applies=lambda case: case["op"] == "sum" and is_divisible(case),
        ),
        Check(
            "any length",
            "value",
            2,
            "the sum for any length",
            _inspect_reduced,
            mistakes=(
                TWO_RANKS,
                DIVISIBLE,
                TOO_SHORT,
            ),
            applies=lambda case: bool(case["op"] == "sum"),
        ),
        Check(
            "mean",
            "value",
            1,
            'every rank ends up with the mean where `op` is `"mean"`',
            _inspect_reduced,
            mistakes=(
                mistake(
                    "sum for mean",
                    _mean_gives(lambda rows: rows.sum(0)),
                    "This is the sum, N times too large. A model that trains on it behaves as if its learning rate "
                    "were N times larger.",
                ),
                mistake(
                    "mean of the mean",
                    _mean_gives(lambda rows: rows.mean(0) / len(rows)),
                    "Divided by N twice. How often does an element pass the line that divides?",
                ),
                mistake(
                    "divided at every step",
                    any_of(_halved_at_each_hop(lambda n: n), _halved_at_each_hop(lambda n: 2)),
                    "The running sum is divided at every step, so contributions that joined early are divided more "
                    "often. When is it time to divide, and how often?",
                ),
            ),
            applies=lambda case: case["op"] == "mean",
        ),
        Check(
            "traffic",
            "traffic",
            3,
            "each rank sends 2(N−1)/N·D bytes",
            inspect_sent(lambda case: traffic("ring_all_reduce", case).sent_bytes),
            mistakes=(
                mistake(
                    "whole buffers",
                    sent_like(lambda case, rank: (case["world_size"] - 1) * full_bytes(case)),
                    "Each rank sends (N−1)·D bytes, and everybody adds everything. " + WHOLE_BUFFERS,
                ),
                mistake(
                    "one rank does the work",
                    _one_sends_most,
                    "One rank sends far more than the others: it collects, adds and hands out, while their links "
                    "stand idle. Could each rank do that for a part of the buffer?",
                ),
                mistake(
                    "half of the bytes",
                    sent_like(lambda case, rank: (case["world_size"] - 1) / case["world_size"] * full_bytes(case)),
                    "That is one journey around the ring. Who has what after it?",
                ),
            ),
            applies=is_large,
        ),
        Check(
            "rounds",
            "schedule",
            2,
            "2(N−1) rounds, each rank sending to one neighbour",
            inspect_ring(theory.ring_all_reduce_steps),
            ring_mistakes(theory.ring_all_reduce_steps),
            applies=is_large,
        ),
    ),
)
