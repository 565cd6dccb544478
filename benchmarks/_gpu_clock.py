"""How the benchmark of one card measures: each call by the card's own clock, with cold caches, in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

Work = Callable[[], Any]
CACHE_BYTES = 256 * 2**20  # several times the second-level cache of any card of today


class Spread(NamedTuple):
    """A quantity of several runs: its quartiles."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """The quartiles of at least two values."""
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))


class Clock:
    """Times work on a device. On a CPU it is for tests: there the host's clock will do."""

    def __init__(self, device: str = "cuda") -> None:
        self.device = torch.device(device)
        self.on_card = self.device.type == "cuda"
        self._other = torch.empty(CACHE_BYTES if self.on_card else 1, dtype=torch.uint8, device=device)
        self._generator = torch.Generator(device).manual_seed(0)

    def randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Random data: on zeros a card draws less power, and is faster."""
        return torch.randn(shape, generator=self._generator, device=self.device, dtype=dtype)

    def free(self) -> None:
        """Give back what was freed, so that a section does not meet the gaps of the one before."""
        if self.on_card:
            torch.cuda.empty_cache()

    def synchronise(self) -> None:
        """Wait until all that was started has ended."""
        if self.on_card:
            torch.cuda.synchronize()

    def alternated(
        self, works: Mapping[str, Work], *, rounds: int = 9, warm_up: int = 2, before: Work | None = None
    ) -> dict[str, list[float]]:
        """Seconds of each call: the works take turns, round by round, so that ratios are of one time.

        `before` is called before each, and its time does not count.
        """
        prepare = before or (lambda: None)
        for _ in range(warm_up):
            for work in works.values():
                prepare()
                work()
        self.synchronise()
        found: dict[str, list[Any]] = {name: [] for name in works}
        for _ in range(rounds):
            for name, work in works.items():
                prepare()
                found[name].append(self._marked(work))
        self.synchronise()
        return {name: [self._seconds(*each) for each in marks] for name, marks in found.items()}

    def spread(self, work: Work, *, rounds: int = 9, warm_up: int = 2, before: Work | None = None) -> Spread:
        """The seconds of one work alone."""
        return Spread.of(self.alternated({"": work}, rounds=rounds, warm_up=warm_up, before=before)[""])

    def _marked(self, work: Work) -> tuple[Any, Any]:
        self._other.zero_()  # what the work reads is not in a cache
        if not self.on_card:
            start = time.perf_counter()
            work()
            return start, time.perf_counter()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        return start, end

    def _seconds(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) / 1000 if self.on_card else max(end - start, 1e-9)


def ratio(above: list[float], below: list[float]) -> Spread:
    """The quartiles of a ratio, round by round."""
    return Spread.of([a / b for a, b in zip(above, below, strict=True)])
