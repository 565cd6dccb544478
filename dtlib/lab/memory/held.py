"""`lab.memory`: how many bytes the tensors of a process hold, what for, and when there were most of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dtlib.lab.html import table_html
from dtlib.theory.units import format_bytes

from .storages import MEMORY_KINDS, KindBytes
from .tracker import Tracker

_DETAILS = ("marks", "modules", "ops")


@dataclass(frozen=True)
class Moment:
    """One line of the timeline: what was held when something happened.

    `phase` is what happened: ``"forward"``, ``"forward done"``, ``"backward"``, ``"backward done"``, ``"recompute"``
    or ``"recompute done"`` of `module`, ``"step"`` or ``"step done"`` of an optimizer, ``"op ..."``, or the text of a
    mark (`module` is empty). `peak` is the highest total in bytes since the moment before, so that nothing in between
    is lost.
    """

    module: str
    phase: str
    held: KindBytes
    peak: int

    @property
    def label(self) -> str:
        """Who and what, such as ``"blocks.0 forward done"``."""
        return f"{self.module} {self.phase}".strip()


class Memory:
    """The bytes of a process's tensors in a block of `lab.memory`. Inside the block it follows them; afterwards it
    stays as it was at the end, and can be sent home from a rank."""

    def __init__(self, tracker: Tracker, detail: str) -> None:
        self._tracker: Tracker | None = tracker
        self._detail = detail
        self._now = KindBytes()
        self._moments: list[Moment] = []
        self._peak = self._recent = tracker.total
        self._at_peak = tracker.by_kind()
        self._waiting = False

    @property
    def now(self) -> KindBytes:
        """What is held now, or was at the end of the block."""
        if self._tracker is None:
            return self._now
        _let_others_finish()
        return self._tracker.by_kind()

    @property
    def peak(self) -> int:
        """The most bytes that were held at one time, all kinds together."""
        return self._peak

    @property
    def at_peak(self) -> KindBytes:
        """What was held at the first moment of the peak."""
        if self._waiting and self._tracker:
            self.peak_is(self._tracker.by_kind())
        return self._at_peak

    @property
    def timeline(self) -> tuple[Moment, ...]:
        """What was held when, in order."""
        return tuple(self._moments)

    @property
    def table(self) -> str:
        """A line a kind: bytes at the peak and now."""
        return "\n".join(f"{kind:<12} {at_peak:>14} {now:>14}" for kind, at_peak, now in self._rows())

    def mark(self, label: str) -> None:
        """Put a line called `label` into the timeline. ``RuntimeError`` after the end of the block."""
        if self._tracker is None:
            raise RuntimeError(f"mark({label!r}) comes after the end of the block of lab.memory()")
        _let_others_finish()
        self._add("", str(label))

    def label(self, kind: str, *tensors: Tensor) -> None:
        """Count `tensors` as `kind`, whatever they look like: master weights as ``"optimizer"``, say.

        ``ValueError`` for a kind that is none, ``TypeError`` for what is no tensor, ``RuntimeError`` after the block.
        """
        if kind not in MEMORY_KINDS:
            raise ValueError(f"kind must be one of {', '.join(MEMORY_KINDS)}, not {kind!r}")
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                raise TypeError(f"tensors must be tensors, not {tensor!r}")
        if self._tracker is None:
            raise RuntimeError("label(...) comes after the end of the block of lab.memory()")
        for tensor in tensors:
            self._tracker.owners.label(kind, tensor)
            self._tracker.hold(tensor)

    # What the tracker tells

    def grown(self, total: int) -> None:
        """More than before; see `tracker.Listener`."""
        self._recent = max(self._recent, total)
        if total > self._peak:
            self._peak, self._waiting = total, True

    def is_waiting(self) -> bool:
        """Whether a peak wants its kinds."""
        return self._waiting

    def peak_is(self, held: KindBytes) -> None:
        """What the peak was made of."""
        self._at_peak, self._waiting = held, False

    def event(self, module: str, phase: str) -> None:
        """Something happened; what `detail` leaves out is passed over."""
        if self._detail == "ops" or (self._detail == "modules" and not phase.startswith("op ")):
            self._add(module, phase)

    def was_there(self, kind: str, num_bytes: int) -> None:
        """Put bytes that were there from the start into all that has been recorded."""
        self._peak += num_bytes
        self._recent += num_bytes
        self._at_peak = self._at_peak.plus(kind, num_bytes)
        self._moments = [
            replace(moment, held=moment.held.plus(kind, num_bytes), peak=moment.peak + num_bytes)
            for moment in self._moments
        ]

    def end(self) -> None:
        """Take the last reading."""
        self._now, self._at_peak = self.now, self.at_peak
        self._tracker = None

    def _add(self, module: str, phase: str) -> None:
        assert self._tracker is not None
        held = self._tracker.by_kind()
        self._moments.append(Moment(module, phase, held, max(self._recent, held.total)))
        self._recent = held.total

    # How it looks

    def _rows(self) -> Iterator[tuple[str, str, str]]:
        yield "", "at the peak", "now" if self._tracker else "at the end"
        at_peak, now = self.at_peak, self.now
        for kind in MEMORY_KINDS:
            yield kind, format_bytes(getattr(at_peak, kind)), format_bytes(getattr(now, kind))
        yield "total", format_bytes(at_peak.total), format_bytes(now.total)

    def __repr__(self) -> str:
        return self.table

    def _repr_html_(self) -> str:
        head, *rows = self._rows()
        return table_html(head, rows)


def _let_others_finish() -> None:
    """A collective that is over may still be held for a moment by the thread that ran it."""
    if dist.is_available() and dist.is_initialized() and dist.get_backend() != "fake":
        time.sleep(0.001)


_active: Tracker | None = None


@contextmanager
def memory(*held: Any, detail: str = "modules") -> Iterator[Memory]:
    """Follow the bytes of this process's tensors, by kind, through a block; see `KindBytes` for the kinds.

    Everything that is created in the block counts, to the byte and until it is freed. Of what was there before: the
    modules, optimizers and tensors in `held` (also in lists and dictionaries), and any module that is called and any
    optimizer that steps in the block, count from its start; another tensor counts from the first operation that
    touches it. A module with a method ``tensors_by_kind()`` tells what else it has: pairs of a tensor and its kind.
    Bytes are those of storages: views, transposes and tied parameters count once, and a small view keeps a large
    storage alive.

    The timeline has a line for each `Memory.mark`, and with ``detail="modules"`` for the start and the end of each
    module and each optimizer step too, with ``"ops"`` for every operation. ``"marks"`` is the fastest. Blocks may be
    nested, to have the peak of a part.

    What an operation or a communication library needs inside itself and frees before it returns is not seen, and
    neither are the operations of other threads, except of the backward pass. Under fake tensors it counts what the
    real ones would hold.

    Raises ``TypeError`` for something in `held` that has no tensors, ``ValueError`` for an unknown `detail`.
    """
    global _active
    check_detail(detail)
    owners = list(_owners(held))
    outermost = _active is None
    tracker = Tracker() if _active is None else _active
    if outermost:
        tracker.start()
        _active = tracker
    result = None
    try:
        for owner in owners:
            tracker.hold(owner)
        result = Memory(tracker, detail)
        tracker.listeners.append(result)
        yield result
    finally:
        if result is not None:
            result.end()
            tracker.listeners.remove(result)
        if outermost:
            _active = None
            tracker.stop()


def check_detail(detail: str) -> None:
    """``ValueError`` for what is no `detail` of `memory`."""
    if detail not in _DETAILS:
        raise ValueError(f"detail must be one of {', '.join(_DETAILS)}, not {detail!r}")


def is_recording() -> bool:
    """Whether this process is in a block of `lab.memory`."""
    return _active is not None


def _owners(held: Any) -> Iterator[nn.Module | Optimizer | Tensor]:
    for each in held:
        if isinstance(each, nn.Module | Optimizer | Tensor):
            yield each
        elif isinstance(each, dict):
            yield from _owners(each.values())
        elif isinstance(each, list | tuple):
            yield from _owners(each)
        else:
            raise TypeError(f"held must be modules, optimizers and tensors, not {each!r}")
