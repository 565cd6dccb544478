"""dp.6, the schedule: how the buckets are cut, and whether they travel while backward still computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dtlib.grading.checks.on_paper import mistake
from dtlib.grading.compare import every_run, some_rank
from dtlib.grading.exercise import Case, Check, Finding, Run

from .network import greedy_buckets
from .steps import each_step, expected_buckets, launches, parameter_bytes, position_of, sent_sizes, steps_of


def _inspect_buckets(run: Run) -> Finding | None:
    wanted = [sum(bucket) for bucket in expected_buckets(run.case)]
    for where, events in each_step(run):
        seen = sent_sizes(events)
        if seen != wanted:
            return Finding(f"all-reduces of {_listed(seen)} B", f"{_listed(wanted)} B", where)
    return None


def _overflows(run: Run) -> bool:
    longest = max(run.case["bucket_bytes"], *parameter_bytes(run.case))
    return all(any(size > longest for size in sent_sizes(events)) for _, events in each_step(run))


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes[:8])) + (", …" if len(sizes) > 8 else "") if sizes else "0"


def _sizes_are(wrong: Callable[[Case], Sequence[int]]) -> Any:
    def fits(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
        back = [run for run in failing if run.trouble is None]
        return bool(back) and all(
            sorted(sent_sizes(events)) == sorted(wrong(run.case)) for run in back for _, events in each_step(run)
        )

    return fits


BUCKETS = Check(
    "buckets",
    "schedule",
    2,
    "the buckets are cut greedily, from the last parameter to the first",
    _inspect_buckets,
    mistakes=(
        mistake(
            "a bucket for each parameter",
            _sizes_are(parameter_bytes),
            "Every parameter travels by itself: each pays the latency of an all-reduce. What is `bucket_bytes` for?",
        ),
        mistake(
            "one bucket for all",
            _sizes_are(lambda case: [sum(parameter_bytes(case))]),
            "Everything travels in one bucket, so nothing can leave before the last gradient is there. What is "
            "`bucket_bytes` for?",
        ),
        mistake(
            "full taken for too full",
            _sizes_are(lambda case: [sum(b) for b in greedy_buckets(parameter_bytes(case), case["bucket_bytes"] - 1)]),
            "A parameter that fills its bucket to the last byte was sent to the next one. The bucket is then full, not "
            "too large: compare with `>`.",
        ),
        mistake(
            "from the first parameter",
            _sizes_are(
                lambda case: [sum(b) for b in greedy_buckets(parameter_bytes(case)[::-1], case["bucket_bytes"])]
            ),
            "The buckets are cut from the first parameter to the last. Which gradients does backward finish first?",
        ),
        mistake(
            "buckets that overflow",
            every_run(_overflows),
            "Some buckets are longer than `bucket_bytes`: they close after they are full, not before they would "
            "overflow.",
        ),
    ),
)


def _waits(event: Mapping[str, Any]) -> bool:
    """Whether a rank waited: in a call that waits, or by asking again and again whether something is done."""
    return bool(event["op"] == "wait" or (event["op"] == "poll" and event["times"] > 1))


def _inspect_overlap(run: Run) -> Finding | None:
    counts = np.cumsum([len(bucket) for bucket in expected_buckets(run.case)])
    for where, events in each_step(run):
        end = position_of(events, "backward done")
        waits = sum(_waits(event) for event in events[:end])
        if waits:
            return Finding(f"{waits} waits for a collective during backward", "none before it ends", where)
        launched = launches(events)
        if len(launched) < 2:
            return Finding(f"{len(launched)} all-reduces", f"{len(counts)}", where)
        for number, (index, count) in enumerate(zip(launched, counts, strict=False)):
            ready = sum(event["op"] == "ready" for event in events[:index])
            # A layer's weight and bias become ready together, in either order: hence one gradient of slack.
            if ready > count + 1:
                return Finding(
                    f"bucket {number + 1} launched when {ready} gradients were ready", f"{count} at that moment", where
                )
    return None


def _all_launched_late(data: Mapping[str, Any], case: Case) -> bool:
    return all(
        min(launches(events), default=0) > position_of(events, "backward done") for events in steps_of(data["events"])
    )


def _waits_early(data: Mapping[str, Any], case: Case) -> bool:
    return any(
        any(_waits(event) for event in events[: position_of(events, "backward done")])
        for events in steps_of(data["events"])
    )


HIDES = Check(
    "overlap",
    "overlap",
    3,
    "each bucket leaves when its last gradient is ready, and nobody waits before backward ends",
    _inspect_overlap,
    mistakes=(
        mistake(
            "blocking in the hook",
            some_rank(_waits_early),
            "Backward stops at a bucket until it has arrived: the hook is there, the overlap is not. What does "
            "`async_op` change, and where is the right place to wait?",
        ),
        mistake(
            "launched after backward",
            some_rank(_all_launched_late),
            "Every all-reduce starts after backward has ended: there is nothing left to hide behind. Who could tell "
            "you, during backward, that a gradient is ready?",
        ),
        mistake(
            "one bucket for all",
            some_rank(lambda data, case: any(len(launches(events)) < 2 for events in steps_of(data["events"]))),
            "With a single all-reduce there is nothing to overlap: it starts when the last gradient is there.",
        ),
        mistake(
            "launched late",
            every_run(lambda run: True),
            "A bucket waits although all of its gradients are there. What does its launch depend on that it need not?",
        ),
    ),
    applies=lambda case: len(expected_buckets(case)) > 1,
)
