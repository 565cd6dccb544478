"""`lab.timeline`: when each rank computes, when it communicates, and how much of the one hides behind the
other."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from dtlib.lab.html import table_html
from dtlib.lab.launch import context
from dtlib.theory import units

from .classify import COMMUNICATION, COMPUTE, PHASE, Event, Interval, Span, classify
from .intervals import Piece, difference, intersection, length, pack, union
from .profiler import recording

KINDS = (COMPUTE, COMMUNICATION, PHASE)


_COLUMNS = ("rank", "block", "computing", "communicating", "exposed", "hidden")


@dataclass(repr=False)
class Timeline:
    """What one rank did during a block of `lab.timeline`; the numbers are there once the block has ended.

    Times are seconds of the machine's monotonic clock, which all its processes share. A rank can return its
    timeline; `merge` puts those of all ranks side by side.
    """

    rank: int = 0
    start_seconds: float = math.nan
    end_seconds: float = math.nan
    intervals: tuple[Interval, ...] = ()
    _spans: list[Span] | None = field(default=None, repr=False, compare=False)

    @contextmanager
    def span(self, name: str, kind: str = PHASE) -> Iterator[None]:
        """Name what this thread does in a block of its own inside the block of the timeline.

        With kind ``"phase"`` the computing in it is called `name` (``"forward"``) and nothing else changes.
        With ``"compute"`` all of it counts as computing, also what torch does not see (numpy, a sleep),
        except communication that is marked as such; with ``"communication"`` all of it counts as
        communicating.
        """
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}")
        if not isinstance(name, str) or not name:
            raise ValueError(f"name must be a non-empty string, not {name!r}")
        spans = self._spans
        if spans is None:
            raise RuntimeError("span works inside the block of lab.timeline() that made this timeline")
        start = time.monotonic()
        try:
            yield
        finally:
            spans.append(Span(kind, name, start, time.monotonic(), threading.get_native_id()))

    def pieces(self, kind: str) -> list[Piece]:
        """The times at which intervals of `kind` were going on, as sorted (start, end) without overlap."""
        if not math.isfinite(self.end_seconds):
            raise RuntimeError("a timeline has its numbers once the block of lab.timeline() has ended")
        return union((i.start_seconds, i.end_seconds) for i in self.intervals if i.kind == kind)

    @property
    def seconds(self) -> float:
        """The length of the block."""
        return self.end_seconds - self.start_seconds

    @property
    def compute_seconds(self) -> float:
        """How long at least one thread of the rank was computing."""
        return length(self.pieces(COMPUTE))

    @property
    def communication_seconds(self) -> float:
        """How long at least one communication of the rank was going on; two at once count once."""
        return length(self.pieces(COMMUNICATION))

    @property
    def hidden_seconds(self) -> float:
        """How long the rank was communicating and computing at once."""
        return length(intersection(self.pieces(COMMUNICATION), self.pieces(COMPUTE)))

    @property
    def exposed_seconds(self) -> float:
        """How long the rank was communicating without computing: the price of communication."""
        return length(difference(self.pieces(COMMUNICATION), self.pieces(COMPUTE)))

    @property
    def idle_seconds(self) -> float:
        """How long the rank did neither."""
        return self.seconds - length(self.pieces(COMPUTE) + self.pieces(COMMUNICATION))

    @property
    def hidden_share(self) -> float:
        """The share of the communication time that hides behind computing, 0 to 1; NaN where nothing is sent."""
        total = self.communication_seconds
        return self.hidden_seconds / total if total else math.nan

    def __repr__(self) -> str:
        """The rank and its numbers in a line."""
        if not math.isfinite(self.end_seconds):
            return f"<timeline of rank {self.rank}, still recording>"
        words = ", ".join(f"{name} {value}" for name, value in zip(_COLUMNS[1:], self._row()[1:], strict=True))
        return f"<timeline of rank {self.rank}: {words}>"

    def _row(self) -> list[str]:
        seconds = (self.seconds, self.compute_seconds, self.communication_seconds, self.exposed_seconds)
        hidden = "–" if math.isnan(self.hidden_share) else f"{self.hidden_share:.0%}"
        return [str(self.rank), *(units.format_seconds(each) for each in seconds), hidden]

    @staticmethod
    def merge(timelines: Iterable[Timeline]) -> Timelines:
        """The timelines of several ranks side by side, in the order of their ranks.

        Raises ``ValueError`` where there is none, where two claim one rank, or where one has not ended.
        """
        return Timelines(tuple(sorted(timelines, key=lambda timeline: timeline.rank)))

    def draw(self, axes: Any = None) -> Any:
        """Draw this rank alone, see `Timelines.draw`."""
        return self.merge([self]).draw(axes)

    def write_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write this rank alone, see `Timelines.write_chrome_trace`."""
        self.merge([self]).write_chrome_trace(path)


@dataclass(frozen=True, repr=False)
class Timelines:
    """Timelines of ranks that ran at the same time on one machine, in rank order."""

    ranks: tuple[Timeline, ...]

    def __post_init__(self) -> None:
        """Refuse what cannot be laid side by side."""
        numbers = [timeline.rank for timeline in self.ranks]
        if not numbers:
            raise ValueError("timelines must hold the timeline of one rank at least")
        if len(set(numbers)) != len(numbers):
            raise ValueError(f"timelines must come from different ranks, not {numbers}")
        for timeline in self.ranks:
            timeline.pieces(COMPUTE)

    def __repr__(self) -> str:
        """A line a rank."""
        return "\n".join(map(repr, self.ranks))

    def _repr_html_(self) -> str:
        return table_html(_COLUMNS, (timeline._row() for timeline in self.ranks))

    @property
    def start_seconds(self) -> float:
        """When the first rank began, on the machine's monotonic clock."""
        return min(timeline.start_seconds for timeline in self.ranks)

    @property
    def seconds(self) -> float:
        """From the beginning of the first rank to the end of the last."""
        return max(timeline.end_seconds for timeline in self.ranks) - self.start_seconds

    def draw(self, axes: Any = None) -> Any:
        """Draw computing and communicating, one row a rank; the matplotlib figure. `axes` may say where."""
        from dtlib import figures

        return figures.timeline(self, axes=axes)

    def write_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a file in Chrome's trace format, which ui.perfetto.dev and chrome://tracing open.

        A rank is a process of the trace, computing and communicating are threads of it. Times are in
        microseconds from the beginning of the first rank.
        """
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": self._trace_events(), "displayTimeUnit": "ms"}, file)

    def _trace_events(self) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for timeline in self.ranks:
            pid = timeline.rank
            events.append(_metadata("process_name", pid, 0, name=f"rank {pid}"))
            events.append(_metadata("process_sort_index", pid, 0, sort_index=pid))
            first_tid = 1
            for kind in (COMPUTE, COMMUNICATION):
                own = [interval for interval in timeline.intervals if interval.kind == kind]
                lanes = pack((i.start_seconds, i.end_seconds) for i in own)
                num_lanes = max(lanes, default=0) + 1
                for lane in range(num_lanes):
                    name = kind if lane == 0 else f"{kind} ({lane + 1})"
                    events.append(_metadata("thread_name", pid, first_tid + lane, name=name))
                    events.append(_metadata("thread_sort_index", pid, first_tid + lane, sort_index=first_tid + lane))
                for interval, lane in zip(own, lanes, strict=True):
                    start = (interval.start_seconds - self.start_seconds) * 1e6
                    events.append(
                        {
                            "ph": "X",
                            "name": interval.name,
                            "cat": kind,
                            "ts": round(start, 3),
                            "dur": round(interval.seconds * 1e6, 3),
                            "pid": pid,
                            "tid": first_tid + lane,
                        }
                    )
                first_tid += num_lanes
        return events


def _metadata(what: str, pid: int, tid: int, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": arguments}


_recording = False


@contextmanager
def timeline() -> Iterator[Timeline]:
    """Record when this rank computes and when it communicates, from the start to the end of a block.

    It sees any code: torch's collectives and DDP from the moment a communication thread begins a collective
    until it has finished, and code that annotates its communication with
    ``torch.profiler.record_function("all-reduce")`` (or the name of another collective). A bare ``isend`` or
    ``irecv`` counts from its launch to the end of its ``wait``: nobody is told when such a message arrived
    earlier. Computing is torch's operators, with pauses under 0.1 ms between two of them, and what
    `Timeline.span` declares. Wait for all communication inside the block: what is still going on at its end
    was not seen to finish, and is left out.

    Ranks enter the block when they come to it, without waiting for each other; begin it with
    ``lab.barrier()`` where they shall be compared. Raises ``RuntimeError`` while another timeline of this
    process is recording.
    """
    global _recording
    if _recording:
        raise RuntimeError("a timeline is being recorded already: this process can record one at a time")
    _recording = True
    result = Timeline(rank=context.current("lab.timeline()").rank if context.inside_rank() else 0, _spans=[])
    events: list[Event] = []
    try:
        with recording(events):
            start = time.monotonic()
            try:
                yield result
            finally:
                end = time.monotonic()
    finally:
        _recording = False
        spans, result._spans = result._spans or [], None
        result.start_seconds, result.end_seconds = start, end
        result.intervals = tuple(_clip(classify(events, spans), start, end))


def _clip(found: Iterable[Interval], start: float, end: float) -> Iterator[Interval]:
    for interval in found:
        first, last = max(interval.start_seconds, start), min(interval.end_seconds, end)
        if first < last:
            yield Interval(interval.kind, interval.name, first, last)
