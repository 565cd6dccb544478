"""dp.6, reading the record: the steps of a rank, what it launched when, and the buckets it should have cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dtlib.grading.checks.on_ranks import FLOAT_BYTES
from dtlib.grading.exercise import Case, Run, describe_case

from .network import greedy_buckets, trainable_elements

Events = Sequence[Mapping[str, Any]]


def parameter_bytes(case: Case) -> list[int]:
    """Bytes of each parameter in the order in which backward finishes them: the last first."""
    return [FLOAT_BYTES * elements for elements in reversed(trainable_elements(case))]


def expected_buckets(case: Case) -> list[list[int]]:
    """The bytes of the parameters in each bucket that the task asks for."""
    return greedy_buckets(parameter_bytes(case), case["bucket_bytes"])


def steps_of(events: Events) -> list[list[Mapping[str, Any]]]:
    """The events of each step: from its mark to the next."""
    starts = [index for index, event in enumerate(events) if event["op"] == "step"]
    return [list(events[start:end]) for start, end in zip(starts, [*starts[1:], len(events)], strict=True)]


def position_of(events: Events, op: str) -> int:
    """Where `op` first stands among `events`; their number where it does not."""
    return next((index for index, event in enumerate(events) if event["op"] == op), len(events))


def each_step(run: Run) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """The events of each step of each rank, with words for where that was."""
    return [
        (f"on rank {rank}, step {number + 1}, {describe_case(run.case)}", events)
        for rank, data in enumerate(run.ranks)
        for number, events in enumerate(steps_of(data["events"]))
    ]


def sent_sizes(events: Events) -> list[int]:
    """The bytes of each all-reduce, in the order of the calls."""
    return [event["bytes"] for event in events if event["op"] == "all_reduce"]


def launches(events: Events) -> list[int]:
    """Where the all-reduces stand among `events`."""
    return [index for index, event in enumerate(events) if event["op"] == "all_reduce"]
