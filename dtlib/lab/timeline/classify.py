"""Tell computing from communicating in what the profiler saw of one process. Pure data: no torch in here."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from .intervals import Piece, difference

COMPUTE, COMMUNICATION, PHASE = "compute", "communication", "phase"
INTERPRETER_SECONDS = 100e-6
"""A shorter pause between two operators of a thread is the interpreter's work, and counts as computing."""

_JOINED = (
    ("reduce-scatter", r"reduce ?scatter"),
    ("all-reduce", r"all ?reduce"),
    ("all-gather", r"all ?gather"),
    ("all-to-all", r"all ?to ?all"),
    ("broadcast", r"broadcast"),
)
_ALONE = re.compile(r"(barrier|reduce|gather|scatter|send|recv)\b")
_BACKENDS = ("gloo:", "nccl:", "mpi:", "ucc:")
_NOT_COMPUTE = ("c10d::", "c10d_functional::", "_c10d_functional::", "record_param_comms", "profiler::", *_BACKENDS)
_ENGINE = "autograd::engine::evaluate_function"
_REDUCER = ("torch.distributed.ddp.reducer::", "torch::distributed::reducer::")  # what DDP does in its backward
_PHASES = ("forward", "backward", "weight gradient", "input gradient", "optimizer")


@dataclass(frozen=True)
class Event:
    """What the profiler saw: times in seconds of the monotonic clock, `thread` as the system numbers it.

    `annotation` marks what a program (not torch's dispatcher) named, `is_async` work that no thread waits in,
    `device` a kernel of a GPU.
    """

    name: str
    start: float
    end: float
    thread: int
    annotation: bool = False
    is_async: bool = False
    device: bool = False


@dataclass(frozen=True)
class Interval:
    """Something that went on from `start_seconds` to `end_seconds` of the machine's monotonic clock.

    `kind` is ``"compute"`` or ``"communication"``, `name` says what: ``"backward"``, ``"all-reduce"``.
    """

    kind: str
    name: str
    start_seconds: float
    end_seconds: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_seconds - self.start_seconds


@dataclass(frozen=True)
class Span:
    """A stretch of one thread's time that the program named itself, see `Timeline.span`."""

    kind: str
    name: str
    start: float
    end: float
    thread: int


def communication_name(text: str) -> str | None:
    """The collective that `text` names, in the book's spelling (``"all-reduce"``), or None.

    The joined names may stand anywhere (``"ring_all_reduce of bucket 3"``), the plain words ``send``,
    ``recv``, ``reduce``, ``gather``, ``scatter`` and ``barrier`` must come first.
    """
    words = re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()
    for name, pattern in _JOINED:
        if re.search(rf"(^| ){pattern}", words):
            return name
    alone = _ALONE.match(words)
    return alone[1] if alone else None


def classify(events: Iterable[Event], spans: Iterable[Span] = ()) -> list[Interval]:
    """The intervals of computing and of communicating that `events` and the program's own `spans` amount to.

    *Communicating* is: an asynchronous collective of a backend, from its beginning to its completion; a
    stretch that the program annotated with the name of a collective (the outermost, if such annotations are
    nested); a span of that kind. *Computing* is: operators, and spans of that kind; not what a thread does
    inside a communication of its own (the additions of a ring belong to the ring). With a GPU, its kernels
    are what computes and communicates.
    """
    events, spans = sorted(events, key=lambda event: (event.start, -event.end)), list(spans)
    if any(event.device for event in events):
        return _on_gpu(events) + _communication([], spans)
    communication = _communication(events, spans)
    threads = {event.thread for event in events} | {span.thread for span in spans}
    compute = [interval for thread in sorted(threads) for interval in _compute(thread, events, spans)]
    return sorted(communication + compute, key=lambda interval: (interval.start_seconds, interval.end_seconds))


def _on_gpu(events: list[Event]) -> list[Interval]:
    found = []
    for event in events:
        if event.device:
            name = communication_name(re.sub(r"(?<=[a-z])(?=[A-Z])", " ", event.name)) or "communication"
            travels = "nccl" in event.name.lower()
            kind, name = (COMMUNICATION, name) if travels else (COMPUTE, "compute")
            found.append(Interval(kind, name, event.start, event.end))
    return found


def _marks(thread: int, events: list[Event], spans: list[Span]) -> list[Interval]:
    """The outermost stretches of `thread` that the program itself named communication."""
    named = [
        (event.start, event.end, _spell(event.name))
        for event in events
        if event.thread == thread and event.annotation and not event.is_async and communication_name(event.name)
    ]
    named += [(s.start, s.end, s.name) for s in spans if s.thread == thread and s.kind == COMMUNICATION]
    outermost: list[Interval] = []
    for start, end, name in sorted(named, key=lambda mark: (mark[0], -mark[1])):
        if not outermost or start >= outermost[-1].end_seconds:
            outermost.append(Interval(COMMUNICATION, name, start, end))
    return outermost


def _spell(text: str) -> str:
    """``"all_reduce bucket 3"`` as ``"all-reduce, bucket 3"``; of another sentence the collective's name."""
    name = communication_name(text) or text
    start = re.match(r"[\s_-]?".join(name.split("-")) + r"\b[\s,:]*", text, re.IGNORECASE)
    detail = text[start.end() :] if start else ""
    return f"{name}, {detail}" if detail else name


def _communication(events: list[Event], spans: list[Span]) -> list[Interval]:
    threads = {event.thread for event in events} | {span.thread for span in spans}
    marks = {thread: _marks(thread, events, spans) for thread in threads}
    # A send or receive is reported on the thread that launched it, a collective on the thread that does it: the one is
    # part of an annotation if it begins inside one of its own thread, the other if one of its name covers it anywhere.
    of_thread = {thread: _Cover(own) for thread, own in marks.items()}
    found = [mark for own in marks.values() for mark in own]
    of_name = {
        name: _Cover([mark for mark in found if mark.name.split(",")[0] == name])
        for name in {mark.name.split(",")[0] for mark in found}
    }
    nothing = _Cover([])
    for event in events:
        if not (event.is_async and event.name.startswith(_BACKENDS)):
            continue
        name = communication_name(event.name.partition(":")[2]) or event.name
        begun_inside = of_thread[event.thread].holds(event.start, event.start)
        if not begun_inside and not of_name.get(name, nothing).holds(event.start, event.end):
            found.append(Interval(COMMUNICATION, name, event.start, event.end))
    return found


class _Cover:
    """Answers whether one of many intervals holds a stretch of time."""

    def __init__(self, those: list[Interval]) -> None:
        ordered = sorted((each.start_seconds, each.end_seconds) for each in those)
        self.starts = [start for start, _ in ordered]
        self.latest_ends = list(accumulate((end for _, end in ordered), max))

    def holds(self, start: float, end: float) -> bool:
        before = bisect_right(self.starts, start)
        return before > 0 and end <= self.latest_ends[before - 1]


def _compute(thread: int, events: list[Event], spans: list[Span]) -> list[Interval]:
    own = [event for event in events if event.thread == thread and not event.is_async]
    marks = [(mark.start_seconds, mark.end_seconds) for mark in _marks(thread, events, spans)]
    calls = [(event.start, event.end) for event in own if event.name.startswith(_NOT_COMPUTE)]
    named = [span for span in spans if span.thread == thread and span.kind == COMPUTE]
    whole = [(span.start, span.end) for span in named]
    operators = [
        event
        for event in own
        if not event.annotation and not event.name.startswith((*_NOT_COMPUTE, _ENGINE)) and not _is_node(event)
    ]
    labelled = _label(_outermost(operators), own, [span for span in spans if span.thread == thread])
    blockers = sorted([*marks, *calls, *whole])
    found = [
        Interval(COMPUTE, span.name, *piece) for span in named for piece in difference([(span.start, span.end)], marks)
    ]
    joined: dict[str, list[Piece]] = {}
    for start, end, name in _bridge(labelled, blockers):
        joined.setdefault(name, []).append((start, end))
    for name, pieces in joined.items():
        found += (Interval(COMPUTE, name, *piece) for piece in difference(pieces, blockers))
    return found


def _is_node(event: Event) -> bool:
    """A node of autograd's graph, forward (a class's own function, ``_Row``) or backward: operators have a namespace.

    It holds operators, and may wait for a message in between.
    """
    return event.name.startswith("torch::autograd::") or "::" not in event.name


def _outermost(operators: list[Event]) -> list[Event]:
    kept: list[Event] = []
    for event in operators:
        if not kept or event.start >= kept[-1].end:
            kept.append(event)
    return kept


def _label(operators: list[Event], own: list[Event], spans: list[Span]) -> list[tuple[float, float, str]]:
    """Each operator with the name of its phase: what a span says, else an annotation, else the engine."""
    phases: list[tuple[float, float, int, str]] = [(s.start, s.end, 2, s.name) for s in spans if s.kind == PHASE]
    for event in own:
        if event.name.startswith((_ENGINE, *_REDUCER)):
            phases.append((event.start, event.end, 0, "backward"))
        elif event.annotation and (name := _phase_name(event.name)):
            phases.append((event.start, event.end, 1, name))
    phases.sort(reverse=True)
    open_now: list[tuple[float, float, int, str]] = []
    labelled = []
    for event in operators:
        while phases and phases[-1][0] <= event.start:
            open_now.append(phases.pop())
        open_now = [phase for phase in open_now if phase[1] > event.start]
        best = max(open_now, key=lambda phase: (phase[2], phase[0]), default=None)
        labelled.append((event.start, event.end, best[3] if best else "compute"))
    return labelled


def _phase_name(text: str) -> str | None:
    if text.startswith("Optimizer."):
        return "optimizer"
    words = text.lower().replace("_", " ").replace("-", " ")
    head = words.split(",")[0].strip()
    return text if head in _PHASES else "forward" if head.endswith(".forward") else None


def _bridge(pieces: list[tuple[float, float, str]], blockers: list[Piece]) -> list[tuple[float, float, str]]:
    """Join neighbours of one name over the interpreter's pauses, unless a call to communicate lies between."""
    starts = [start for start, _ in blockers]
    joined: list[tuple[float, float, str]] = []
    for start, end, name in pieces:
        if joined and joined[-1][2] == name and start - joined[-1][1] <= INTERPRETER_SECONDS:
            calls_between = bisect_left(starts, start) - bisect_left(starts, joined[-1][1])
            if not calls_between:
                joined[-1] = (joined[-1][0], end, name)
                continue
        joined.append((start, end, name))
    return joined
