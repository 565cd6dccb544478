"""A run that fails, event by event. It knows no formula: times of failures come from a seed, or are given."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

import numpy as np

from dtlib.theory.valid import at_most, number, row, whole

from .goodput import Split

KINDS = tuple(field.name for field in fields(Split))
_MOST = 100_000


@dataclass(frozen=True)
class Span:
    """What a run did from `start` to `end`, in seconds of the run: one of `KINDS`."""

    start: float
    end: float
    kind: str


@dataclass(frozen=True)
class Run:
    """A run from its start to its last save: its `spans`, one after another, and when something `failed`."""

    spans: tuple[Span, ...]
    failed: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.spans[-1].end

    @property
    def split(self) -> Split:
        """Its seconds by kind."""
        return Split(**{kind: sum(s.end - s.start for s in self.spans if s.kind == kind) for kind in KINDS})

    @property
    def goodput(self) -> float:
        """The share of lasting work."""
        return self.split.goodput


def simulate(
    work: float,
    interval: float,
    save: float,
    mtbf: float | None = None,
    *,
    restart: float = 0,
    detect: float = 0,
    write: float = 0,
    seed: int = 0,
    failures: Iterable[float] | None = None,
) -> Run:
    """A run of `work` seconds of lasting work, saved after each `interval` of it, and at its end.

    It stands for `save` seconds; with `write` the save is whole only so many seconds later, while the run works on. A
    failure takes the run back to the newest whole save (or its start), `detect` and `restart` seconds later; one while
    nothing runs changes nothing, one in a restart begins it again. Failures are exponential, of mean distance `mtbf`,
    or at the times given in `failures`, seconds from the start. ``ValueError`` for one of neither or of both, and where
    the run has more than 100,000 intervals or failures.
    """
    total = number("work", work, positive=True)
    tau, stall = number("interval", interval, positive=True), number("save", save)
    back, unseen, later = number("restart", restart), number("detect", detect), number("write", write)
    coming = _times(mtbf, failures, whole("seed", seed, 0))
    intervals = at_most("work over interval", max(1, math.ceil(total / tau - 1e-9)), _MOST)
    spans: list[Span] = []
    failed: list[float] = []
    now, kept, strikes = 0.0, 0, next(coming)

    def add(kind: str, end: float) -> None:
        nonlocal now
        if end > now:
            spans.append(Span(now, end, kind))
            now = end

    while True:
        first, start = kept, now
        while kept < intervals:  # up to the next failure
            end = start + (min((kept + 1) * tau, total) - first * tau) + (kept + 1 - first) * stall
            if end + later > strikes:
                break
            add("work", end - stall)
            add("save", end)
            kept += 1
        if kept == intervals:
            add("save", now + later)
            return Run(tuple(spans), tuple(failed))
        add("lost", strikes)
        while True:  # the restart may fail too
            failed.append(strikes)
            if len(failed) > _MOST:
                raise ValueError(f"mtbf must be long enough for the run to end, not {mtbf!r} with these times")
            add("detect", strikes + unseen)
            strikes = next(time for time in coming if time >= now)
            if now + back <= strikes:
                break
            add("restart", strikes)
        add("restart", now + back)


def _times(mtbf: float | None, given: Iterable[float] | None, seed: int) -> Iterator[float]:
    if (mtbf is None) == (given is None):
        raise ValueError("mtbf or failures must be given, and not both")
    if given is not None:
        times = list(given)
        yield from sorted(row("failures", times)) if times else ()
        yield from itertools.repeat(float("inf"))
    mean, rng, now = number("mtbf", mtbf, positive=True), np.random.default_rng(seed), 0.0
    while True:
        now += rng.exponential(mean)
        yield now
