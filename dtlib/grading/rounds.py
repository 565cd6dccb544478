"""Counting rounds: how long a recorded exchange of messages takes when every message costs one unit of time.

A rank sends one message at a time; a message that is sent during round k has arrived at its end; a rank that waits for
a message goes on when it has arrived. So a relay through N ranks takes N−1 rounds, N−1 messages out of one rank too,
and a tree ⌈log2 N⌉. This counts steps, the α term of the cost, without a clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

Events = Sequence[Mapping[str, Any]]


def count_rounds(ranks: Sequence[Events]) -> int | None:
    """The rounds that the recorded events of all ranks take; None where they do not fit together or a peer is unknown.

    Events are those of `harness.recorder.Recorder`: ``send`` and ``receive`` with a ``peer``, ``wait`` with the index
    of what was waited for. Other events cost nothing.
    """
    arrivals: dict[tuple[int, int], list[int]] = defaultdict(list)  # (from, to) -> when each message has arrived
    received = [_receives(events) for events in ranks]
    if any(source is None for each in received for source, _ in each.values()):
        return None
    clock = [0] * len(ranks)
    port_free = [0] * len(ranks)
    sent_at: list[dict[int, int]] = [{} for _ in ranks]
    position = [0] * len(ranks)
    progress = True
    while progress:
        progress = False
        for rank, events in enumerate(ranks):
            while position[rank] < len(events):
                index = position[rank]
                event = events[index]
                if event["op"] == "send":
                    end = max(clock[rank], port_free[rank]) + 1
                    port_free[rank] = sent_at[rank][index] = end
                    arrivals[rank, event["peer"]].append(end)
                elif event["op"] == "wait" and event["of"] in received[rank]:
                    source, number = received[rank][event["of"]]
                    if len(arrivals[source, rank]) <= number:
                        break
                    clock[rank] = max(clock[rank], arrivals[source, rank][number])
                elif event["op"] == "wait" and event["of"] in sent_at[rank]:
                    clock[rank] = max(clock[rank], sent_at[rank][event["of"]])
                position[rank] += 1
                progress = True
    if any(position[rank] < len(events) for rank, events in enumerate(ranks)):
        return None
    return max(clock + port_free, default=0)


def _receives(events: Events) -> dict[int, tuple[Any, int]]:
    """For each receive, by its index: from whom, and which one from there it is."""
    counts: dict[Any, int] = defaultdict(int)
    found = {}
    for index, event in enumerate(events):
        if event["op"] == "receive":
            source = event["peer"] if event["peer"] >= 0 else None
            found[index] = (source, counts[source])
            counts[source] += 1
    return found


def sends(events: Events) -> list[Mapping[str, Any]]:
    """The sends among `events`."""
    return [event for event in events if event["op"] == "send"]


def collectives(events: Events) -> list[str]:
    """The names of the collectives among `events`, barriers left out, in the order of the calls."""
    waits_and_marks = {"send", "receive", "wait", "barrier"}
    return [event["op"] for event in events if event["op"] not in waits_and_marks and "bytes" in event]
