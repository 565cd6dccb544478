"""collectives.4: a broadcast along a tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dtlib.grading import rounds
from dtlib.grading.checks.collectives.ring import (
    DEADLOCK,
    NOT_IN_PLACE,
    TWO_RANKS,
)
from dtlib.grading.checks.on_paper import mistake
from dtlib.grading.checks.on_ranks import (
    full_bytes,
    inspect_rounds,
    inspect_total,
    own_work,
    peers,
    ranks_case,
    total_like,
)
from dtlib.grading.compare import (
    close,
    compare_ranks,
    each_rank,
    gives,
    right_only_if,
    some_rank,
)
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
    expected = all_values(run.case)[run.case["src"]]
    return compare_ranks(run, "tensor", [expected] * run.case["world_size"])


def _root_sends_all(data: Any, case: Case) -> bool:
    return len(peers(data)) == case["world_size"] - 1 > 1


def _is_chain(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
    return all(
        all(len(rounds.sends(data["events"])) <= 1 for data in run.ranks) for run in failing if run.trouble is None
    ) and any(run.case["world_size"] > 3 and run.trouble is None for run in failing)


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
                NOT_IN_PLACE,
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
                    lambda failing, passing: all(
                        run.trouble is None
                        and sum(close(d["tensor"], all_values(run.case)[run.case["src"]]) for d in run.ranks) > 0
                        for run in failing
                    ),
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
                    lambda failing, passing: all(
                        sum(d["sent_bytes"] for d in run.ranks) > (run.case["world_size"] - 1) * full_bytes(run.case)
                        for run in failing
                        if run.trouble is None
                    ),
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
                    lambda failing, passing: all(run.trouble is None for run in failing),
                    "Each round should double the number of ranks that know. Draw who sends to whom in each round.",
                ),
            ),
        ),
    ),
)
