"""`lab.race`: who is faster, in one run in which all take turns; `lab.fastest`: what one piece of work takes."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dtlib.lab.launch import context
from dtlib.theory.units import format_seconds
from dtlib.theory.valid import whole

from .html import table_html

Seconds = dict[str, tuple[float, ...]]


class Ratio(NamedTuple):
    """The median of the ratios of all rounds, and the quartiles below and above it."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} – {self.high:.3f})"


@dataclass(frozen=True, repr=False)
class Race:
    """What each contender took, round by round: `seconds` of the slowest rank, `cpu_seconds` of all ranks together."""

    seconds: Seconds
    cpu_seconds: Seconds

    def median(self, name: str) -> float:
        """The median time of a turn of `name`, in seconds. Compare medians of one race alone."""
        return float(np.median(self._of(self.seconds, name)))

    def ratio(self, name: str, over: str) -> Ratio:
        """How long `name` takes, `over` another in the same round."""
        return _ratio(self._of(self.seconds, name), self._of(self.seconds, over))

    def cpu_ratio(self, name: str, over: str) -> Ratio:
        """The same of the processor time of all ranks together."""
        return _ratio(self._of(self.cpu_seconds, name), self._of(self.cpu_seconds, over))

    def _of(self, times: Seconds, name: str) -> Any:
        if name not in times:
            raise ValueError(f"name must be one of the contenders {', '.join(times)}, not {name!r}")
        return np.array(times[name])

    @property
    def table(self) -> str:
        """A line a contender: the median turn, over the first contender's, the middle half of that."""
        return "\n".join(f"{name:<24} {step:>12} {over:>8} {half:>18}" for name, step, over, half in self._rows())

    def _rows(self) -> Iterator[tuple[str, str, str, str]]:
        first = next(iter(self.seconds))
        yield "contender", "median turn", f"/ {first}", "middle half"
        for name in self.seconds:
            median, low, high = self.ratio(name, first)
            yield name, format_seconds(self.median(name)), f"{median:.3f}", f"{low:.3f} – {high:.3f}"

    def __repr__(self) -> str:
        return self.table

    def _repr_html_(self) -> str:
        head, *rows = self._rows()
        return table_html(head, rows)


def race(
    contenders: Mapping[str, Callable[[], Any]], *, rounds: int = 9, warm_up: int = 1, calls_per_turn: int = 1
) -> Race:
    """Call each of `contenders` in turn, round by round, and compare what they took; the same result on every rank.

    In each round all have one turn of `calls_per_turn` calls, in an order that is drawn anew and is the same on all
    ranks, so that a slow moment of the machine falls on all of them. A turn starts when all ranks are there, and ends
    when the last is done; what its work on a GPU takes is in it. The first `warm_up` rounds do not count. Call it on
    all ranks inside `lab.run`, or where there are no ranks at all. Nothing of it crosses the network of the ranks.

    Ratios of one run are worth something; times of two runs, or of two machines, are not to be compared.
    ``ValueError`` where there is no contender, or for a number out of range; ``TypeError`` for what cannot be called.
    """
    if not contenders:
        raise ValueError("contenders must be at least one function by its name, not none")
    for name, call in contenders.items():
        if not callable(call):
            raise TypeError(f"contenders must be functions by their names, and {name!r} is {call!r}")
    rounds, warm_up = whole("rounds", rounds, 1), whole("warm_up", warm_up, 0)
    calls_per_turn = whole("calls_per_turn", calls_per_turn, 1)
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for number in range(warm_up + rounds):
        for name in random.Random(number).sample(list(contenders), len(contenders)):
            turn = _turn(contenders[name], calls_per_turn)
            if number >= warm_up:
                took[name].append(turn)
    by_rank = [json.loads(each) for each in _exchange(json.dumps(took).encode())]
    all_times = {name: np.array([rank[name] for rank in by_rank]) for name in contenders}  # ranks, rounds, 2
    return Race(
        seconds={name: tuple(times[:, :, 0].max(0).tolist()) for name, times in all_times.items()},
        cpu_seconds={name: tuple(times[:, :, 1].sum(0).tolist()) for name, times in all_times.items()},
    )


def fastest(work: Callable[[], Any], *, repeats: int = 5) -> float:
    """Seconds that the fastest of `repeats` calls of `work` took: other work on the machine only adds.

    Inside `lab.run` all ranks call it, and begin each call together; each gets its own time. What its work on a GPU
    takes is in it. ``ValueError`` for `repeats` below 1.
    """
    return min(_turn(work, 1)[0] for _ in range(whole("repeats", repeats, 1)))


def _turn(call: Callable[[], Any], calls: int) -> tuple[float, float]:
    _synchronize()
    _exchange(b"")
    start, cpu = time.perf_counter(), time.process_time()
    for _ in range(calls):
        call()
    _synchronize()
    return time.perf_counter() - start, time.process_time() - cpu


def _exchange(payload: bytes) -> list[bytes]:
    return context.current("lab.race()").exchange(payload) if context.inside_rank() else [payload]


def _synchronize() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _ratio(times: Any, over: Any) -> Ratio:
    return Ratio(*(float(each) for each in np.quantile(times / over, [0.5, 0.25, 0.75])))
