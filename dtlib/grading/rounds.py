"""Counting rounds: how long a recorded exchange of messages takes when every message costs one unit of time.

A rank sends one message at a time; a message that is sent during round k has arrived at its end; a rank that waits for
a message goes on when it has arrived. So a relay through N ranks takes N−1 rounds, N−1 messages out of one rank too,
and a tree ⌈log2 N⌉. This counts steps, the α term of the cost, without a clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Events = Sequence[Mapping[str, Any]]


def count_rounds(ranks: Sequence[Events]) -> int | None:
    """The rounds that the recorded events of all ranks take; None where they do not fit together or a peer is unknown.

    Events are those of `harness.recorder.Recorder`: ``send`` and ``receive`` with a ``peer``, ``wait`` with the index
    of what was waited for. Other events cost nothing. Threads of a rank share its link and wait each for itself.
    """
    arrivals: dict[tuple[int, int], list[int]] = defaultdict(list)  # (from, to) -> when each message has arrived
    received = [_receives(events) for events in ranks]
    if any(source is None for each in received for source, _ in each.values()):
        return None
    sent_at: list[dict[int, int]] = [{} for _ in ranks]
    port_free = [0] * len(ranks)
    tracks = [track for rank, events in enumerate(ranks) for track in _tracks(rank, events)]
    while any(_advance(track, ranks, arrivals, received, sent_at, port_free) for track in tracks):
        pass
    if any(track.left for track in tracks):
        return None
    return max([track.clock for track in tracks] + port_free, default=0)


@dataclass
class _Track:
    """What one thread of a rank did: the indices of its events that are left, the next one last, and its time."""

    rank: int
    left: list[int]
    clock: int = 0


def _tracks(rank: int, events: Events) -> list[_Track]:
    by_thread: dict[int, list[int]] = defaultdict(list)
    for index, event in enumerate(events):
        by_thread[event.get("thread", 0)].append(index)
    return [_Track(rank, indices[::-1]) for indices in by_thread.values()]


def _advance(
    track: _Track,
    ranks: Sequence[Events],
    arrivals: dict[tuple[int, int], list[int]],
    received: list[dict[int, tuple[Any, int]]],
    sent_at: list[dict[int, int]],
    port_free: list[int],
) -> bool:
    """Go on with a track until it waits for a message that is not sent yet; whether it got anywhere."""
    rank, before = track.rank, len(track.left)
    while track.left:
        index = track.left[-1]
        event = ranks[rank][index]
        if event["op"] == "send":
            end = max(track.clock, port_free[rank]) + 1
            port_free[rank] = sent_at[rank][index] = end
            arrivals[rank, event["peer"]].append(end)
        elif event["op"] == "wait" and event["of"] in received[rank]:
            source, number = received[rank][event["of"]]
            if len(arrivals[source, rank]) <= number:
                break
            track.clock = max(track.clock, arrivals[source, rank][number])
        elif event["op"] == "wait":
            track.clock = max(track.clock, sent_at[rank].get(event["of"], 0))
        track.left.pop()
    return len(track.left) < before


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
    waits_and_marks = {"send", "receive", "wait", "poll", "barrier"}
    return [event["op"] for event in events if event["op"] not in waits_and_marks and "bytes" in event]
