"""dp.6: buckets that travel while backward still computes, judged by the order of events and not by the clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dtlib.grading import rounds
from dtlib.grading.checks.on_paper import mistake
from dtlib.grading.checks.on_ranks import (
    FLOAT_BYTES,
    inspect_total,
    total_like,
)
from dtlib.grading.compare import (
    every_run,
    right_only_if,
    some_rank,
)
from dtlib.grading.exercise import Case, Check, Exercise, Finding, Run, describe_case

from .network import (
    Gradients,
    all_reduce_total,
    combine,
    compare_gradients,
    greedy_buckets,
    local_gradients,
    mean_gradients,
    same_gradients,
    trainable_elements,
)

Events = Sequence[Mapping[str, Any]]


def _draw(rng: np.random.Generator) -> list[dict[str, Any]]:
    cases = []
    for n, of_layer in ((2, 2.3), (3, 0.1), (2, 1.4), (3, 100.0)):  # bucket size in weights of a layer
        width = int(rng.integers(90, 130))
        bucket_bytes = int(of_layer * FLOAT_BYTES * width * width)
        cases.append(
            {
                "world_size": n,
                "steps": 2,
                "samples": int(rng.integers(2, 5)),
                "widths": [*[width] * 5, 1],
                "bucket_bytes": bucket_bytes,
                "seed": int(rng.integers(0, 2**31)),
                "words": f"{n} ranks, layers of {width}×{width}, buckets of {bucket_bytes} B",
            }
        )
    return cases


def _sizes(case: Case) -> list[int]:
    """Bytes of each parameter in the order in which backward finishes them: the last first."""
    return [FLOAT_BYTES * elements for elements in reversed(trainable_elements(case))]


def _buckets(case: Case) -> list[list[int]]:
    return greedy_buckets(_sizes(case), case["bucket_bytes"])


def steps_of(events: Events) -> list[list[Mapping[str, Any]]]:
    """The events of each step: from its mark to the next."""
    starts = [index for index, event in enumerate(events) if event["op"] == "step"]
    return [list(events[start:end]) for start, end in zip(starts, [*starts[1:], len(events)], strict=True)]


def _position(events: Events, op: str) -> int:
    return next((index for index, event in enumerate(events) if event["op"] == op), len(events))


def _each_step(run: Run) -> list[tuple[str, list[Mapping[str, Any]]]]:
    return [
        (f"on rank {rank}, step {number + 1}, {describe_case(run.case)}", events)
        for rank, data in enumerate(run.ranks)
        for number, events in enumerate(steps_of(data["events"]))
    ]


# gate: by hooks, not by DDP


def _inspect_own(run: Run) -> Finding | None:
    for rank, data in enumerate(run.ranks):
        if data["library"]:
            return Finding(f"a call of dtlib.ranks.{data['library'][0]} on rank {rank}", "your own code")
        if any(event.get("native") for event in data["events"]):
            return Finding(f"collectives called by torch's own machinery on rank {rank}", "calls of `dist.all_reduce`")
    if not any(rounds.collectives(data["events"]) for data in run.ranks):
        return Finding("no collective at all", "all-reduces", describe_case(run.case))
    return None


_OWN = Check(
    "own work",
    "schedule",
    1,
    "`overlap_gradients` calls `dist.all_reduce` itself",
    _inspect_own,
    mistakes=(
        mistake(
            "library called",
            some_rank(lambda data, case: bool(data["library"])),
            "The course's own wrapper answers the question for you. Write the hooks yourself; compare with it "
            "afterwards.",
        ),
        mistake(
            "built-in called",
            some_rank(lambda data, case: any(event.get("native") for event in data["events"])),
            "DistributedDataParallel does what this exercise asks you to do. When does it launch a bucket? Write that.",
        ),
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
        mistake(
            "right for one bucket size only",
            right_only_if(lambda case: len(_buckets(case)) == 1),
            "It is right where everything fits into one bucket, and only there.",
        ),
    ),
)

# traffic


def _sends_more_each_step(run: Run) -> bool:
    first, *_, last = (sum(_sent_sizes(events)) for events in steps_of(run.ranks[0]["events"]))
    return last > first


def _total(case: Case) -> float:
    return case["steps"] * all_reduce_total(case, sum(_sizes(case)))


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


# buckets


def _sent_sizes(events: Events) -> list[int]:
    return [event["bytes"] for event in events if event["op"] == "all_reduce"]


def _inspect_buckets(run: Run) -> Finding | None:
    wanted = [sum(bucket) for bucket in _buckets(run.case)]
    for where, events in _each_step(run):
        seen = _sent_sizes(events)
        if seen != wanted:
            return Finding(f"all-reduces of {_listed(seen)} B", f"{_listed(wanted)} B", where)
    return None


def _overflows(run: Run) -> bool:
    longest = max(run.case["bucket_bytes"], *_sizes(run.case))
    return all(any(size > longest for size in _sent_sizes(events)) for _, events in _each_step(run))


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes[:8])) + (", …" if len(sizes) > 8 else "") if sizes else "0"


def _sizes_are(wrong: Callable[[Case], Sequence[int]]) -> Any:
    def fits(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
        back = [run for run in failing if run.trouble is None]
        return bool(back) and all(
            sorted(_sent_sizes(events)) == sorted(wrong(run.case)) for run in back for _, events in _each_step(run)
        )

    return fits


_BUCKETS = Check(
    "buckets",
    "schedule",
    2,
    "the buckets are cut greedily, from the last parameter to the first",
    _inspect_buckets,
    mistakes=(
        mistake(
            "a bucket for each parameter",
            _sizes_are(_sizes),
            "Every parameter travels by itself: each pays the latency of an all-reduce. What is `bucket_bytes` for?",
        ),
        mistake(
            "one bucket for all",
            _sizes_are(lambda case: [sum(_sizes(case))]),
            "Everything travels in one bucket, so nothing can leave before the last gradient is there. What is "
            "`bucket_bytes` for?",
        ),
        mistake(
            "from the first parameter",
            _sizes_are(lambda case: [sum(b) for b in greedy_buckets(_sizes(case)[::-1], case["bucket_bytes"])]),
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


# overlap


def _launches(events: Events) -> list[int]:
    return [index for index, event in enumerate(events) if event["op"] == "all_reduce"]


def _inspect_overlap(run: Run) -> Finding | None:
    counts = np.cumsum([len(bucket) for bucket in _buckets(run.case)])
    for where, events in _each_step(run):
        end = _position(events, "backward done")
        waits = sum(event["op"] == "wait" for event in events[:end])
        if waits:
            return Finding(f"{waits} waits for a collective during backward", "none before it ends", where)
        launches = _launches(events)
        if len(launches) < 2:
            return Finding(f"{len(launches)} all-reduces", f"{len(counts)}", where)
        for number, (index, count) in enumerate(zip(launches, counts, strict=False)):
            ready = sum(event["op"] == "ready" for event in events[:index])
            # A layer's weight and bias become ready together, in either order: hence one gradient of slack.
            if ready > count + 1:
                return Finding(
                    f"bucket {number + 1} launched when {ready} gradients were ready", f"{count} at that moment", where
                )
    return None


def _all_launched_late(data: Mapping[str, Any], case: Case) -> bool:
    return all(
        min(_launches(events), default=0) > _position(events, "backward done") for events in steps_of(data["events"])
    )


def _waits_early(data: Mapping[str, Any], case: Case) -> bool:
    return any(
        any(event["op"] == "wait" for event in events[: _position(events, "backward done")])
        for events in steps_of(data["events"])
    )


_OVERLAP = Check(
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
            some_rank(lambda data, case: any(len(_launches(events)) < 2 for events in steps_of(data["events"]))),
            "With a single all-reduce there is nothing to overlap: it starts when the last gradient is there.",
        ),
        mistake(
            "launched late",
            every_run(lambda run: True),
            "A bucket waits although all of its gradients are there. What does its launch depend on that it need not?",
        ),
    ),
    applies=lambda case: len(_buckets(case)) > 1,
)

OVERLAP = Exercise(
    id="dp.6",
    function="overlap_gradients",
    title="Buckets that hide behind backward",
    harness="dp.overlap",
    draw=_draw,
    checks=(_OWN, _GRADIENTS, _TRAFFIC, _BUCKETS, _OVERLAP),
)
