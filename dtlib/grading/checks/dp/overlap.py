"""dp.6: buckets that travel while backward still computes, judged by the order of events and not by the clock."""

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
from dtlib.grading.compare import every_run, right_only_if, some_rank
from dtlib.grading.exercise import Case, Check, Exercise, Finding, Run, describe_case

from .buckets import BUCKETS, HIDES
from .network import (
    Gradients,
    all_reduce_total,
    combine,
    compare_gradients,
    local_gradients,
    mean_gradients,
    same_gradients,
)
from .steps import expected_buckets, parameter_bytes, sent_sizes, steps_of


def _draw(rng: np.random.Generator) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = []
    for n, of_layer in ((2, 2.3), (3, 0.1), (2, 1.4), (3, 100.0)):  # bucket size in weights of a layer
        width = int(rng.integers(90, 130))
        case: dict[str, Any] = {
            "world_size": n,
            "steps": 2,
            "samples": int(rng.integers(2, 5)),
            "widths": [*[width] * 5, 1],
            "bucket_bytes": int(of_layer * FLOAT_BYTES * width * width),
            "seed": int(rng.integers(0, 2**31)),
        }
        if not cases:  # one limit that a bucket fills to the last byte
            case["bucket_bytes"] = sum(expected_buckets(case)[0])
        words = f"{n} ranks, layers of {width}×{width}, buckets of {case['bucket_bytes']} B"
        cases.append(case | {"words": words})
    return cases


# gate: by hooks, not by DDP


def _inspect_own(run: Run) -> Finding | None:
    for rank, data in enumerate(run.ranks):
        if any(event.get("native") for event in data["events"]):
            return Finding(f"collectives called by torch's own machinery on rank {rank}", "calls of `dist.all_reduce`")
    around = inspect_library(run) or inspect_record(run)
    if around is None and not any(rounds.collectives(data["events"]) for data in run.ranks):
        return Finding("no collective at all", "all-reduces", describe_case(run.case))
    return around


_OWN = Check(
    "own work",
    "schedule",
    1,
    "`overlap_gradients` calls `dist.all_reduce` itself",
    _inspect_own,
    mistakes=(
        *NOT_YOUR_OWN,
        mistake(
            "built-in called",
            some_rank(lambda data, case: any(event.get("native") for event in data["events"])),
            "DistributedDataParallel does what this exercise asks you to do. When does it launch a bucket? Write that.",
        ),
        OFF_RECORD,
        mistake(
            "nothing sent",
            every_run(lambda run: True),
            "Nothing was sent. Do the hooks fire, and does `finish` send what is left?",
        ),
    ),
    gate=True,
)


# gradients


def _inspect_gradients(run: Run) -> Finding | None:
    for rank, data in enumerate(run.ranks):
        for step in range(run.case["steps"]):
            where = f"on rank {rank}, step {step + 1}, {describe_case(run.case)}"
            finding = compare_gradients(data["gradients"][step], mean_gradients(run.case, [step]), run.case, where)
            if finding:
                return finding
    return None


def _gradients_are(wrong: Callable[[Case, int, int], Gradients]) -> Any:
    """Recognise: in every failing run, rank r holds ``wrong(case, r, step)`` after each step."""

    def fits(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
        back = [run for run in failing if run.trouble is None]
        return bool(back) and all(
            same_gradients(data["gradients"][step], wrong(run.case, rank, step))
            for run in back
            for rank, data in enumerate(run.ranks)
            for step in range(run.case["steps"])
        )

    return fits


def _right_first_step(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
    back = [run for run in failing if run.trouble is None]
    return bool(back) and all(
        same_gradients(data["gradients"][0], mean_gradients(run.case, [0])) for run in back for data in run.ranks
    )


def _some_stay_local(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
    """Whether in every failing run each parameter holds either the mean or the rank's own gradient, and both occur."""
    back = [run for run in failing if run.trouble is None]
    for run in back:
        for rank, data in enumerate(run.ranks):
            triples = zip(
                data["gradients"][0], mean_gradients(run.case, [0]), local_gradients(run.case, rank, 0), strict=True
            )
            kinds = {
                "mean" if same_gradients([g], [mean]) else "local" if same_gradients([g], [own]) else "other"
                for g, mean, own in triples
            }
            if kinds != {"mean", "local"}:
                return False
    return bool(back)


_GRADIENTS = Check(
    "gradient",
    "gradient",
    3,
    "after `finish()` every `.grad` is the mean over the ranks, step after step",
    _inspect_gradients,
    mistakes=(
        mistake(
            "sum for mean",
            _gradients_are(lambda case, rank, step: combine([mean_gradients(case, [step])], case["world_size"])),
            "N times too large: an all-reduce adds. Where is the division?",
        ),
        mistake(
            "no sync",
            _gradients_are(lambda case, rank, step: local_gradients(case, rank, step)),
            "Each rank still holds its own gradients. What was summed, a bucket or a copy of it, and who writes it "
            "back?",
        ),
        mistake(
            "a bucket is dropped",
            _some_stay_local,
            "Some parameters hold the mean, others only this rank's own gradient. What happens to a bucket that is "
            "not full when backward ends?",
        ),
        mistake(
            "right in the first step only",
            _right_first_step,
            "The first step is right, the second is not. What do your counters and lists still hold when the second "
            "backward begins?",
        ),
        TWO_RANKS,
        mistake(
            "right for one bucket size only",
            right_only_if(lambda case: len(expected_buckets(case)) == 1),
            "It is right where everything fits into one bucket, and only there.",
        ),
    ),
)

# traffic


def _sends_more_each_step(run: Run) -> bool:
    first, *_, last = (sum(sent_sizes(events)) for events in steps_of(run.ranks[0]["events"]))
    return last > first


def _total(case: Case) -> float:
    return case["steps"] * all_reduce_total(case, sum(parameter_bytes(case)))


_TRAFFIC = Check(
    "traffic",
    "traffic",
    2,
    "each step sends what one all-reduce of all gradients needs",
    inspect_total(_total),
    mistakes=(
        mistake(
            "everything twice",
            total_like(lambda case: 2 * _total(case)),
            "Every gradient travels twice in each step. Who sends it the second time?",
        ),
        mistake(
            "grows with the steps",
            every_run(_sends_more_each_step),
            "The second step sends more than the first. What do your lists still hold when it begins?",
        ),
        mistake(
            "gathered, then added",
            some_rank(lambda data, case: "all_gather" in rounds.collectives(data["events"])),
            "Every rank receives every gradient and adds for itself. Which collective adds on the way?",
        ),
    ),
)


OVERLAP = Exercise(
    id="dp.6",
    function="overlap_gradients",
    title="Buckets that hide behind backward",
    harness="dp.overlap",
    draw=_draw,
    checks=(_OWN, _GRADIENTS, _TRAFFIC, BUCKETS, HIDES),
)
