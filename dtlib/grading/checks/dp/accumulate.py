"""dp.5: many micro-batches, one sync."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dtlib.grading import rounds
from dtlib.grading.checks.on_paper import NOT_YOUR_OWN, mistake
from dtlib.grading.checks.on_ranks import (
    FLOAT_BYTES,
    OFF_RECORD,
    TWO_RANKS,
    inspect_library,
    inspect_record,
    inspect_total,
    total_like,
)
from dtlib.grading.compare import any_of, right_only_if, some_rank
from dtlib.grading.exercise import Case, Check, Exercise, Finding, Run, describe_case

from .network import (
    Gradients,
    all_reduce_total,
    combine,
    compare_gradients,
    local_gradients,
    mean_gradients,
    num_frozen,
    same_gradients,
    trainable_elements,
)


def _draw_accumulation(rng: np.random.Generator) -> list[dict[str, Any]]:
    cases = []
    for n, micro_batches in ((2, 1), (2, int(rng.integers(3, 6))), (3, int(rng.integers(2, 5)))):
        cases.append(
            {
                "world_size": n,
                "micro_batches": micro_batches,
                "samples": int(rng.integers(2, 5)),
                "widths": [48, 256, int(rng.integers(90, 140)), 1],
                "frozen": True,
                "seed": int(rng.integers(0, 2**31)),
                "words": f"{n} ranks, {micro_batches} micro-batch{'es' if micro_batches > 1 else ''} a rank",
            }
        )
    return cases


def _inspect_accumulated(run: Run) -> Finding | None:
    expected = mean_gradients(run.case, range(run.case["micro_batches"]))
    for rank, data in enumerate(run.ranks):
        finding = compare_gradients(data["gradients"], expected, run.case, f"on rank {rank}; {describe_case(run.case)}")
        if finding:
            return finding
    return None


def _accumulated_gives(wrong: Callable[[Case, int], Gradients]) -> Any:
    """Recognise a mistake by the gradients: in every failing run, rank r holds ``wrong(case, r)``."""

    def fits(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
        back = [run for run in failing if run.trouble is None]
        return bool(back) and all(
            same_gradients(data["gradients"], wrong(run.case, rank))
            for run in back
            for rank, data in enumerate(run.ranks)
        )

    return fits


def _all_micro(case: Case) -> range:
    return range(case["micro_batches"])


def _scaled(factor: Callable[[Case], float]) -> Callable[[Case, int], Gradients]:
    return lambda case, rank: combine([mean_gradients(case, _all_micro(case))], factor(case))


def _local(case: Case, rank: int, divide: bool) -> Gradients:
    parts = [local_gradients(case, rank, number) for number in _all_micro(case)]
    return combine(parts, 1 / len(parts) if divide else 1.0)


_FROZEN_CRASH = mistake(
    "a frozen parameter has no gradient",
    lambda failing, passing: all(run.trouble is not None and "NoneType" in run.trouble.text for run in failing),
    "One of the parameters is frozen: its `.grad` is None. Which parameters take part in the sync?",
)


def _trainable_bytes(case: Case) -> int:
    return FLOAT_BYTES * sum(trainable_elements(case))


def _inspect_one_sync(run: Run) -> Finding | None:
    for rank, data in enumerate(run.ranks):
        called = rounds.collectives(data["events"])
        if called != ["all_reduce"]:
            seen = f"{len(called)} collectives ({', '.join(called[:6])}{', …' if len(called) > 6 else ''})"
            return Finding(f"{seen} on rank {rank}", "one all_reduce", describe_case(run.case))
    return None


def _calls(count: Callable[[Case], int]) -> Any:
    def fits(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
        back = [run for run in failing if run.trouble is None]
        return bool(back) and all(
            len(rounds.collectives(data["events"])) == count(run.case) for run in back for data in run.ranks
        )

    return fits


def _inspect_own(run: Run) -> Finding | None:
    for rank, data in enumerate(run.ranks):
        if any(event.get("native") for event in data["events"]):
            return Finding(f"collectives called by torch's own machinery on rank {rank}", "a call of `dist.all_reduce`")
    return inspect_library(run) or inspect_record(run)


_OWN = Check(
    "own work",
    "schedule",
    0,
    "`accumulate` syncs the gradients itself",
    _inspect_own,
    mistakes=(
        *NOT_YOUR_OWN,
        mistake(
            "built-in called",
            some_rank(lambda data, case: any(event.get("native") for event in data["events"])),
            "DistributedDataParallel does what this exercise asks you to do. What does its `no_sync` leave out, and "
            "what happens in the one backward that is not in it? Write that.",
        ),
        OFF_RECORD,
    ),
    gate=True,
)

_SYNC_EACH = (
    "The gradients are synchronised after every micro-batch. Until the weights change, who needs to know the others' "
    "gradients?"
)

ACCUMULATE = Exercise(
    id="dp.5",
    function="accumulate",
    title="Many micro-batches, one sync",
    harness="dp.accumulate",
    draw=_draw_accumulation,
    checks=(
        _OWN,
        Check(
            "gradient",
            "gradient",
            3,
            "`.grad` is that of the mean over all micro-batches of all ranks",
            _inspect_accumulated,
            mistakes=(
                _FROZEN_CRASH,
                mistake(
                    "sum over ranks",
                    _accumulated_gives(_scaled(lambda case: case["world_size"])),
                    "N times too large: an all-reduce adds. Which mean is the gradient of the whole batch?",
                ),
                mistake(
                    "not divided by the micro-batches",
                    _accumulated_gives(_scaled(lambda case: case["micro_batches"])),
                    "As many times too large as there are micro-batches: `backward` adds to `.grad`. Where does the "
                    "mean over micro-batches come from?",
                ),
                mistake(
                    "not divided at all",
                    _accumulated_gives(_scaled(lambda case: case["micro_batches"] * case["world_size"])),
                    "Added over ranks and over micro-batches, and never divided. How many micro-batches does the "
                    "whole batch have?",
                ),
                mistake(
                    "last micro-batch only",
                    any_of(
                        _accumulated_gives(lambda case, rank: mean_gradients(case, [case["micro_batches"] - 1])),
                        _accumulated_gives(
                            lambda case, rank: combine(
                                [mean_gradients(case, [case["micro_batches"] - 1])], 1 / case["micro_batches"]
                            )
                        ),
                    ),
                    "Only the last micro-batch is left in `.grad`, and the loss would still look fine. What clears "
                    "the gradients of the others?",
                ),
                mistake(
                    "no sync",
                    any_of(
                        _accumulated_gives(lambda case, rank: _local(case, rank, True)),
                        _accumulated_gives(lambda case, rank: _local(case, rank, False)),
                    ),
                    "Each rank holds its own gradient: after this step the replicas drift apart, and nothing "
                    "complains.",
                ),
                TWO_RANKS,
                mistake(
                    "right for one micro-batch only",
                    right_only_if(lambda case: bool(case["micro_batches"] == 1)),
                    "With a single micro-batch it is right, with several it is not. What is in `.grad` when the "
                    "second backward begins, and what has already happened to it?",
                ),
            ),
        ),
        Check(
            "traffic",
            "traffic",
            2,
            "the ranks send what one all-reduce of the trainable parameters needs",
            inspect_total(lambda case: all_reduce_total(case, _trainable_bytes(case))),
            mistakes=(
                mistake(
                    "gathered, then added",
                    some_rank(lambda data, case: "all_gather" in rounds.collectives(data["events"])),
                    "Every rank receives every gradient and adds for itself. Which collective adds on the way?",
                ),
                mistake(
                    "a sync for each micro-batch",
                    total_like(lambda case: case["micro_batches"] * all_reduce_total(case, _trainable_bytes(case))),
                    _SYNC_EACH,
                ),
                mistake(
                    "frozen parameters travel",
                    total_like(
                        lambda case: all_reduce_total(case, _trainable_bytes(case) + FLOAT_BYTES * num_frozen(case))
                    ),
                    "Zeros for the frozen parameters travel too. Who would miss them?",
                ),
            ),
        ),
        Check(
            "one call",
            "schedule",
            1,
            "the sync is one call of `all_reduce`",
            _inspect_one_sync,
            mistakes=(
                mistake(
                    "a call for each parameter",
                    _calls(lambda case: len(trainable_elements(case))),
                    "The bytes may be right, and each call pays its latency: one for every parameter. How could the "
                    "gradients travel as one tensor?",
                ),
                mistake("a sync for each micro-batch", _calls(lambda case: case["micro_batches"]), _SYNC_EACH),
                mistake(
                    "both at once",
                    _calls(lambda case: case["micro_batches"] * len(trainable_elements(case))),
                    "Every parameter is sent by itself, after every micro-batch.",
                ),
                mistake(
                    "nothing sent",
                    _calls(lambda case: 0),
                    "Nothing was sent, so no rank knows what the others found.",
                ),
            ),
        ),
    ),
)
