"""collectives.4: a broadcast along a tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dtlib.grading import rounds
from dtlib.grading.checks.collectives.ring import DEADLOCK, not_in_place
from dtlib.grading.checks.on_paper import mistake
from dtlib.grading.checks.on_ranks import (
    TWO_RANKS,
    full_bytes,
    inspect_rounds,
    inspect_total,
    own_work,
    peers,
    ranks_case,
    total_like,
    total_sent,
)
from dtlib.grading.compare import close, compare_ranks, each_rank, every_run, gives, right_only_if, some_rank
from dtlib.grading.drawn import all_values
from dtlib.grading.exercise import Case, Check, Exercise, Finding, Run
from dtlib.theory import collectives as theory


def _draw_broadcast(rng: np.random.Generator) -> list[dict[str, Any]]:
    worlds = ((2, 1), (4, 0), (4, int(rng.integers(1, 4))), (3, int(rng.integers(1, 3))), (6, int(rng.integers(1, 6))))
    seeds = rng.integers(0, 2**31, len(worlds))
    lengths = rng.integers(40_000, 80_000, len(worlds))
    return [
        ranks_case(n, int(length), int(seed), src=src)
        for (n, src), length, seed in zip(worlds, lengths, seeds, strict=True)
    ]


def _inspect_broadcast(run: Run) -> Finding | None:
    return compare_ranks(run, "tensor", _spoken(run.case))


def _spoken(case: Case) -> list[Any]:
    return [all_values(case)[case["src"]]] * case["world_size"]


def _some_heard(run: Run) -> bool:
    """Whether another rank than `src` holds what `src` said."""
    return sum(close(data["tensor"], expected) for data, expected in zip(run.ranks, _spoken(run.case), strict=True)) > 1


def _root_sends_all(data: Any, case: Case) -> bool:
    return len(peers(data)) == case["world_size"] - 1 > 1


def _is_chain(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
    """Whether each rank sends once at most, among four ranks or more."""
    one_each = every_run(lambda run: all(len(rounds.sends(data["events"])) <= 1 for data in run.ranks))
    return one_each(failing, passing) and any(run.case["world_size"] > 3 for run in failing)


BROADCAST = Exercise(
    id="collectives.4",
    function="tree_broadcast",
    title="A broadcast along a tree",
    harness="collectives.broadcast",
    draw=_draw_broadcast,
    checks=(
        own_work("tree_broadcast"),
        Check(
            "values",
            "value",
            3,
            "every rank ends up with the values of rank `src`",
            _inspect_broadcast,
            mistakes=(
                TWO_RANKS,
                not_in_place(_spoken),
                mistake(
                    "rank 0 for src",
                    gives(each_rank("tensor"), lambda case: list(all_values(case)[[0] * case["world_size"]])),
                    "Everybody has the values of rank 0. The one who speaks is rank `src`: renumber the ranks as "
                    "seen from there.",
                ),
                mistake(
                    "right for root 0 only",
                    right_only_if(lambda case: bool(case["src"] == 0)),
                    "It is right when rank 0 speaks, and only then. Renumber the ranks as seen from `src`, and back "
                    "before you send.",
                ),
                mistake(
                    "right for powers of two only",
                    right_only_if(lambda case: bool(case["world_size"] & (case["world_size"] - 1) == 0)),
                    "With 2 and 4 ranks it is right, with 3 and 6 it is not. In the last round the partner of a rank "
                    "may not exist, and somebody still waits.",
                ),
                mistake(
                    "first round only",
                    every_run(_some_heard),
                    "Some ranks have heard, others have not. How many know after one round, after two, after three?",
                ),
                DEADLOCK,
            ),
        ),
        Check(
            "traffic",
            "traffic",
            1,
            "all ranks together send (N−1)·D bytes",
            inspect_total(lambda case: (case["world_size"] - 1) * full_bytes(case)),
            mistakes=(
                mistake(
                    "everybody sends to everybody",
                    total_like(lambda case: case["world_size"] * (case["world_size"] - 1) * full_bytes(case)),
                    "Each rank sends a buffer to each other rank. Who has something to say that the others do not "
                    "know yet?",
                ),
                mistake(
                    "sent to ranks that know",
                    every_run(lambda run: total_sent(run) > (run.case["world_size"] - 1) * full_bytes(run.case)),
                    "Somebody receives the buffer twice. Each rank needs to hear it once.",
                ),
            ),
        ),
        Check(
            "rounds",
            "schedule",
            3,
            "⌈log₂ N⌉ rounds, in each of which a rank sends one message",
            inspect_rounds(lambda case: theory.tree_broadcast_steps(case["world_size"])),
            mistakes=(
                mistake(
                    "the root sends to everybody",
                    some_rank(_root_sends_all),
                    "Rank `src` sends every copy itself, one after another, while those that have heard stand idle. "
                    "Who else could send in the second round?",
                ),
                mistake(
                    "a chain",
                    _is_chain,
                    "The buffer is passed from rank to rank, so the last one waits for all the others. In each round "
                    "every rank that knows could tell one that does not.",
                ),
                mistake(
                    "everybody waits for everybody",
                    every_run(lambda run: True),
                    "Each round should double the number of ranks that know. Draw who sends to whom in each round.",
                ),
            ),
        ),
    ),
)
