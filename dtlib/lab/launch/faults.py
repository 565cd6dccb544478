"""Faults for real, in a run of `lab.run`: a rank is killed, stopped or slowed, loses its cables or disk, or a bit.

A training function marks its steps with `lab.step`, and a fault happens where its rank marks its step, once. The
process that owns the ranks sends the signals, in which the rank itself has no part; bits and disk are its own.
"""

from __future__ import annotations

import math
import numbers
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import torch

from dtlib.theory.valid import whole

from . import context

SLICE_SECONDS = 0.01
"""For how long a slowed rank runs at a time: ten times what a timer misses by."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Fault:
    """What happens to `rank` when it marks `step`; ``ValueError`` unless both are whole numbers of at least 0."""

    rank: int
    step: int

    def __post_init__(self) -> None:
        whole("rank", self.rank, 0)
        whole("step", self.step, 0)

    def __repr__(self) -> str:
        given = ", ".join(f"{each.name}={getattr(self, each.name)!r}" for each in fields(self))
        return f"lab.{type(self).__name__.lower()}({given})"

    @property
    def told(self) -> str:
        """What happened to the rank, and when, as the end of a sentence about it."""
        return f"{self._what()} at step {self.step}"

    def _what(self) -> str:
        raise NotImplementedError


class Kill(Fault):
    """`rank` is killed (SIGKILL) where it marks `step`: at once, with nothing flushed, as when memory runs out.

    Its `RankError` names the signal and the step. The run ends with it, or goes on with ``return_exceptions=True``.
    """

    def _what(self) -> str:
        return f"was killed by signal {signal.SIGKILL:d} (SIGKILL)"


class Stop(Fault):
    """`rank` is stopped (SIGSTOP) where it marks `step`: it is there, its connections are open, and it says nothing.

    Nobody is told. Those who wait for it wait until the time is up, and `RankTimeout` names it and where they were.
    """

    def _what(self) -> str:
        return f"was stopped by signal {signal.SIGSTOP:d} (SIGSTOP)"


@dataclass(frozen=True, kw_only=True, repr=False)
class Slow(Fault):
    """From `step` on the card of `rank`, or its link, does one part in `factor` of what it did.

    A "card" runs 10 ms at a time and is stopped for the rest: what it computes takes `factor` times as long, where it
    had a core for itself; processes that it has started are not slowed. A "link" is both cables of a `lab.cluster`, in
    both directions, of which at least 1 kB/s is left. A later one takes the place of an earlier one. ``ValueError``
    unless `factor` is finite and above 1 and `of` one of the two.
    """

    factor: float
    of: str = "card"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.of not in ("card", "link"):
            raise ValueError(f'of must be "card" or "link", not {self.of!r}')
        number = float(self.factor) if isinstance(self.factor, numbers.Real) else math.nan
        if not 1 < number < math.inf:
            raise ValueError(f"factor must be a finite number above 1, not {self.factor!r}")

    def _what(self) -> str:
        share = f"one part in {self.factor:g} of"
        return f"began to run {share} the time" if self.of == "card" else f"had {share} the rate of its cables left"


class Cut(Fault):
    """The cables of `rank` in a `lab.cluster` are pulled where it marks `step`: it runs on, and no packet reaches it.

    No connection breaks, as nobody can say so: those who wait for the rank wait until the time is up.
    """

    def _what(self) -> str:
        return "had its cables pulled"


@dataclass(frozen=True, kw_only=True, repr=False)
class Flip(Fault):
    """One bit of one element of a tensor that `rank` holds is flipped where it marks `step`: no error, another number.

    `tensor` is a name in what the rank hands to `lab.step`, `element` the place in it, counted row by row, and `bit`
    counts from the least significant one: of a float32, 31 is the sign and 30 the highest bit of the exponent.
    ``TypeError`` unless `tensor` is a string, ``ValueError`` for a negative place, and on the rank if it is not there.
    """

    tensor: str
    bit: int
    element: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.tensor, str):
            raise TypeError(f"tensor must be the name of a tensor, not {self.tensor!r}")
        whole("bit", self.bit, 0)
        whole("element", self.element, 0)

    def _what(self) -> str:
        return f"was told to flip bit {self.bit} of element {self.element} of {self.tensor!r}"

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Flip the bit, in the memory of the tensor."""
        if self.tensor not in tensors:
            known = ", ".join(map(repr, tensors)) or "no tensor"
            raise ValueError(f"tensor must be one that lab.step is given, not {self.tensor!r}: it is given {known}")
        held = tensors[self.tensor].data  # past autograd, which would notice a tensor that was changed in place
        if self.element >= held.numel():
            raise ValueError(f"element must be below {held.numel()} in {self.tensor!r}, not {self.element}")
        if self.bit >= 8 * held.element_size():
            raise ValueError(f"bit must be below {8 * held.element_size()} in {self.tensor!r}, not {self.bit}")
        place = tuple(int(each) for each in np.unravel_index(self.element, held.shape))
        octets = held[place].reshape(1).view(torch.uint8)
        octet = self.bit // 8
        octets[octet if sys.byteorder == "little" else len(octets) - 1 - octet] ^= 1 << self.bit % 8


@dataclass(frozen=True, kw_only=True, repr=False)
class Fill(Fault):
    """From `step` on no file that `rank` writes gets longer than `room_bytes`, until it has returned or raised.

    What is written beyond is torn there, and an ``OSError`` says so: "File too large", and "No space left on device" of
    a disk that is full. ``ValueError`` unless `room_bytes` is a whole number of at least 0.
    """

    room_bytes: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("room_bytes", self.room_bytes, 0)

    def _what(self) -> str:
        return f"had no room left for files of more than {self.room_bytes} bytes"

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Limit this process: the signal that comes with it Python ignores."""
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(self.room_bytes), hard))


_OF_A_PROCESS, _BY_ITSELF = (Kill, Stop, Slow), (Flip, Fill)


def of_cables(fault: Fault) -> bool:
    """Whether it is not the rank that is struck, but what joins it to the others."""
    return isinstance(fault, Cut) or (isinstance(fault, Slow) and fault.of == "link")


def checked(faults: object, world_size: int, has_cables: bool) -> tuple[Fault, ...]:
    """`faults` as a tuple, or ``TypeError`` or ``ValueError`` that names what is wrong with them."""
    if not isinstance(faults, Sequence) or not all(type(each) in (*_OF_A_PROCESS, *_BY_ITSELF, Cut) for each in faults):
        kinds = "lab.kill, lab.stop, lab.slow, lab.cut, lab.fill and lab.flip"
        raise TypeError(f"faults must be a list of what {kinds} return, not {faults!r}")
    places = [(fault.rank, fault.step) for fault in faults if isinstance(fault, _OF_A_PROCESS)]
    for fault in faults:
        if fault.rank >= world_size:
            raise ValueError(f"rank must be below the world_size {world_size} in {fault!r}")
        if of_cables(fault) and not has_cables:
            raise ValueError(f"faults: {fault!r} needs a cluster, whose ranks have cables")
        if places.count((fault.rank, fault.step)) > 1:
            raise ValueError(
                f"faults must kill, stop or slow a rank once in a step, not {list(faults)!r} at step {fault.step}"
            )
    return tuple(faults)


def step(number: int, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
    """Mark the beginning of a rank's step `number`: the faults of ``lab.run(..., faults=...)`` happen here.

    `tensors` are those of which `lab.flip` may flip a bit, by name: a ``state_dict`` for one. A run without faults, and
    one under ``torchrun``, does nothing here. With faults the mark goes to the process that owns the ranks and back,
    past their network: `lab.wire` does not see it. To be called from the main thread of the rank.

    ``RuntimeError`` outside of `lab.run`; ``ValueError`` unless `number` is a whole number of at least 0, or where a
    tensor does not have the bit that is to be flipped; ``TypeError`` where `tensors` is no mapping.
    """
    here = context.current("lab.step()")
    whole("number", number, 0)
    if tensors is not None and not isinstance(tensors, Mapping):
        raise TypeError(f"tensors must be a mapping from names to tensors, not {tensors!r}")
    for fault in here.mark(int(number)) if here.mark else ():
        fault.apply(tensors or {})


@dataclass
class Duty:
    """When a process that is to run one part in `factor` of the time runs, and when it stands still.

    What a late turn took is made up for in the next ones. Times are those of one clock, in seconds.
    """

    factor: float
    since: float
    runs: bool = True
    owed: float = 0.0
    """For how long it has to stand still for what it ran."""

    def turn(self, now: float) -> bool:
        """Whether it is time to stop a process that runs, or to let one run that stands still."""
        passed, self.since = now - self.since, now
        self.owed += (self.factor - 1) * passed if self.runs else -passed
        due = self.owed >= (self.factor - 1) * SLICE_SECONDS if self.runs else self.owed <= 0
        self.runs ^= due
        return due

    def wait(self) -> float:
        """For how long no turn is due, from the last look on."""
        return SLICE_SECONDS - self.owed / (self.factor - 1) if self.runs else self.owed


@dataclass
class Striker:
    """Whoever owns the ranks has it strike them: `faults` one by one, as their ranks mark their steps."""

    faults: tuple[Fault, ...]
    cut: Callable[[int, float], None]
    """Leaves the cables of a rank one part in so much of their rate: of infinity nothing."""
    steps: dict[int, int] = field(default_factory=dict)
    """The last step that each rank marked."""
    happened: list[int] = field(default_factory=list)
    """Which of the faults did happen, in this order."""
    _slowed: dict[int, tuple[int, Duty]] = field(default_factory=dict)

    def mark(self, rank: int, pid: int, number: int) -> list[Flip | Fill]:
        """Strike `rank`, the process `pid`, which begins its step `number`: what it has to do by itself."""
        self.steps[rank] = number
        by_itself = []
        for index, fault in enumerate(self.faults):
            if index in self.happened or (fault.rank, fault.step) != (rank, number):
                continue
            self.happened.append(index)
            if of_cables(fault):
                self.cut(rank, float(getattr(fault, "factor", math.inf)))
            elif isinstance(fault, Slow):
                self._slowed[rank] = pid, Duty(float(fault.factor), time.monotonic())
            elif isinstance(fault, _BY_ITSELF):
                by_itself.append(fault)
            else:
                self._slowed.pop(rank, None)  # or the next turn would wake it
                os.kill(pid, signal.SIGKILL if isinstance(fault, Kill) else signal.SIGSTOP)
        return by_itself

    def turn(self, alive: Callable[[int], bool]) -> None:
        """Stop those slowed ranks that ran for long enough, and let those run that stood still."""
        self._slowed = {rank: each for rank, each in self._slowed.items() if alive(rank)}
        for pid, duty in self._slowed.values():
            if duty.turn(time.monotonic()):
                os.kill(pid, signal.SIGCONT if duty.runs else signal.SIGSTOP)

    def wait(self) -> float:
        """For how many seconds no slowed rank has a turn."""
        return min((duty.wait() for _, duty in self._slowed.values()), default=math.inf)

    def release(self, alive: Callable[[int], bool]) -> None:
        """Slow nobody any more."""
        for rank, (pid, _) in self._slowed.items():
            if alive(rank):
                os.kill(pid, signal.SIGCONT)
        self._slowed.clear()

    def killed(self, rank: int) -> Fault | None:
        """The fault that killed `rank`, if one did."""
        struck = (self.faults[index] for index in self.happened)
        return next((fault for fault in struck if isinstance(fault, Kill) and fault.rank == rank), None)
