"""`lab.fit_link`: what a message and a byte cost on this machine, and how well two numbers describe it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from dtlib.theory import units

from .html import table_html
from .launch import context, run

KiB, MiB = units.KiB, units.MiB
Collective = Callable[[Any], Any]
LINKS = ("own", "shared")
_BATCH_SECONDS = 4e-3  # short collectives are timed several in a row, for about this long
_MAX_BATCH = 64


class AlphaBeta(NamedTuple):
    """A link of two parameters: a step costs `alpha_seconds`, then bytes flow at `link_bytes_per_s`."""

    alpha_seconds: float
    link_bytes_per_s: float


def fit_alpha_beta(steps: Any, sent_bytes: Any, seconds: Any) -> AlphaBeta:
    """Fit seconds = α · steps + sent_bytes / B to measured points.

    `steps` and `sent_bytes` (numbers or arrays, of one rank on its path through the collective) and `seconds` (array)
    are broadcast to one shape. Every point counts by its *relative* error, so that microseconds weigh as much as
    seconds: the sum of (predicted / measured − 1)² is least among α ≥ 0, 1/B ≥ 0. Times that obey the model exactly
    give its parameters back. B is infinite where bytes turn out to cost nothing.

    Raises ``ValueError`` for times that are not positive, negative steps or bytes, and points that cannot tell α from
    B because they all have the same ratio of bytes to steps.
    """
    arrays = np.broadcast_arrays(*(np.asarray(each, dtype=np.float64) for each in (steps, sent_bytes, seconds)))
    count, size, took = (array.reshape(-1) for array in arrays)
    for name, array in (("steps", count), ("sent_bytes", size)):
        if not (np.all(np.isfinite(array)) and np.all(array >= 0)):
            raise ValueError(f"{name} must be finite numbers, at least 0")
    if took.size == 0 or not (np.all(np.isfinite(took)) and np.all(took > 0)):
        raise ValueError("seconds must be finite numbers above 0, one at least")
    features = np.stack([count / took, size / took], axis=1)
    scale = np.linalg.norm(features, axis=0)
    if took.size < 2 or not np.all(scale > 0) or np.linalg.svd(features / scale, compute_uv=False)[-1] < 1e-9:
        raise ValueError("the points cannot tell α from B: they need two different ratios of sent_bytes to steps")
    ones = np.ones(took.size)
    cost = np.linalg.lstsq(features / scale, ones, rcond=None)[0] / scale
    if np.any(cost < 0):  # the least squares of a negative cost lies on the boundary: one of the two is free
        alone = [
            np.array([features[:, 0] @ ones / scale[0] ** 2, 0]),
            np.array([0, features[:, 1] @ ones / scale[1] ** 2]),
        ]
        cost = min(alone, key=lambda one: float(np.sum((features @ one - 1) ** 2)))
    return AlphaBeta(float(cost[0]), 1 / float(cost[1]) if cost[1] > 0 else math.inf)


@dataclass(frozen=True)
class Point:
    """One measured collective: `world_size` ranks, a buffer of `full_bytes`.

    `steps` and `sent_bytes` are what its theory counts for one rank. `seconds` is the median over the repetitions of
    the time until the last rank had finished; a quarter of the repetitions took less than `low_seconds`, a quarter more
    than `high_seconds`. `fitted` is False for a point that was left out of the fit, to be predicted by it.
    """

    world_size: int
    full_bytes: int
    steps: float
    sent_bytes: float
    seconds: float
    low_seconds: float
    high_seconds: float
    fitted: bool = True


@dataclass(frozen=True, repr=False)
class LinkFit:
    """α and B of this machine for one collective, and every point that they were fitted on or are held against.

    With `link` ``"own"`` each rank has a link of `link_bytes_per_s` to itself, as in a cluster. With ``"shared"`` the
    bytes of all ranks together pass through one link of that rate: on a single machine the loopback device is memory
    copied by the same few cores, whoever sends.
    """

    alpha_seconds: float
    link_bytes_per_s: float
    link: str
    points: tuple[Point, ...]
    steps: Callable[[int], float] = field(compare=False)
    sent_bytes: Callable[[float, int], float] = field(compare=False)

    def predict(self, full_bytes: float, n: int) -> float:
        """Seconds that the fitted link takes for a buffer of `full_bytes` on `n` ranks."""
        carried = _carried(self.link, self.sent_bytes(full_bytes, n), n)
        return self.alpha_seconds * self.steps(n) + carried / self.link_bytes_per_s

    @property
    def errors(self) -> np.ndarray[Any, Any]:
        """Relative error of the prediction for each point, predicted / measured − 1: above 0 it is too slow."""
        return np.array([self.predict(p.full_bytes, p.world_size) / p.seconds - 1 for p in self.points])

    @property
    def left_out_errors(self) -> np.ndarray[Any, Any]:
        """The relative errors at the points that were left out of the fit."""
        return self.errors[[not point.fitted for point in self.points]]

    def refit(self, *, leave_out: Callable[[Point], bool] | None = None, link: str | None = None) -> LinkFit:
        """The same measurements fitted again: without the points that `leave_out` picks, or for another `link`.

        Points left out stay in the result, where `errors` shows how well they are predicted.
        """
        link = self.link if link is None else link
        points = tuple(replace(p, fitted=not (leave_out is not None and leave_out(p))) for p in self.points)
        return _fit(points, link, self.steps, self.sent_bytes)

    def __repr__(self) -> str:
        """What was fitted, then a line a point."""
        rows = [self._headline, *("  ".join(f"{cell:>12}" for cell in row) for row in [_COLUMNS, *self._rows()])]
        return "\n".join(rows)

    def _repr_html_(self) -> str:
        return table_html(_COLUMNS, self._rows(), caption=self._headline)

    @property
    def _headline(self) -> str:
        whose = "a link of its own for each rank" if self.link == "own" else "one link that all ranks share"
        off = np.abs(self.errors)
        words = (
            f"α = {units.format_seconds(self.alpha_seconds)} a step, B = {units.format_rate(self.link_bytes_per_s)}, "
            f"{whose}: off by {_percent(np.median(off))} in the median, {_percent(np.max(off))} at worst"
        )
        left_out = np.abs(self.left_out_errors)
        if left_out.size:
            words += f"; where it was not fitted {_percent(np.median(left_out))} and {_percent(np.max(left_out))}"
        return words

    def _rows(self) -> list[list[str]]:
        return [
            [
                str(point.world_size),
                units.format_bytes(point.full_bytes),
                units.format_seconds(point.seconds),
                units.format_seconds(self.predict(point.full_bytes, point.world_size)),
                ("-" if error < 0 else "+") + _percent(abs(error)),
                "yes" if point.fitted else "left out",
            ]
            for point, error in zip(self.points, self.errors, strict=True)
        ]


_COLUMNS = ["ranks", "buffer", "measured", "predicted", "error", "fitted"]


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.0f} %"


def _carried(link: str, sent_bytes: float, n: int) -> float:
    return sent_bytes * (n if link == "shared" else 1)


def _fit(points: tuple[Point, ...], link: str, steps: Any, sent_bytes: Any) -> LinkFit:
    if link not in LINKS:
        raise ValueError(f"link must be one of {', '.join(LINKS)}, not {link!r}")
    fitted = [point for point in points if point.fitted]
    if not fitted:
        raise ValueError("leave_out must leave points to fit")
    alpha, rate = fit_alpha_beta(
        [point.steps for point in fitted],
        [_carried(link, point.sent_bytes, point.world_size) for point in fitted],
        [point.seconds for point in fitted],
    )
    return LinkFit(alpha, rate, link, points, steps, sent_bytes)


def shift(tensor: Any) -> None:
    """Send `tensor` to the next rank while one of its size arrives from the rank before: a single step of a ring."""
    import torch
    import torch.distributed as dist

    rank, n = dist.get_rank(), dist.get_world_size()
    arriving = dist.irecv(torch.empty_like(tensor), (rank - 1) % n)
    leaving = dist.isend(tensor, (rank + 1) % n)
    arriving.wait()
    leaving.wait()


def fit_link(
    collective: Collective = shift,
    *,
    steps: Callable[[int], float] = lambda n: 1,
    sent_bytes: Callable[[float, int], float] = lambda full_bytes, n: full_bytes,
    sizes: Sequence[int] = (4 * KiB, 64 * KiB, 256 * KiB, MiB, 4 * MiB, 16 * MiB),
    world_sizes: Sequence[int] = (2, 4),
    link: str = "shared",
    repeats: int = 9,
    timeout_s: float = 120,
    network: str = "private",
) -> LinkFit:
    """Time a collective on this machine for several buffers and rank counts, and fit what a step and a byte cost.

    `collective` is called in every rank with a float32 tensor of each of the `sizes` (bytes, multiples of 4), on each
    of the `world_sizes`; the default is one exchange around a ring. ``steps(n)`` and ``sent_bytes(full_bytes, n)`` are
    its theory: messages one after another, and bytes that a rank sends. Each point is the median of `repeats` timings,
    taken in turns so that a slow moment of the machine does not fall on one size alone; the last rank counts. `link`
    says whether ranks have links of their own or share one (`LinkFit`).

    Returns a `LinkFit` with α, B, the points and the error at each: two numbers rarely describe a machine well, and the
    result says how badly. Raises ``ValueError`` for bad arguments before anything is started.
    """
    _at_least("repeats", repeats, 1)
    for n in _several("world_sizes", world_sizes):
        _at_least("world_sizes", n, 2)
    for size in _several("sizes", sizes):
        _at_least("sizes", size, 4)
        if size % 4:
            raise ValueError(f"sizes must be multiples of 4 bytes, not {size!r}")
    if link not in LINKS:
        raise ValueError(f"link must be one of {', '.join(LINKS)}, not {link!r}")
    points = []
    for n in world_sizes:
        by_rank = run(
            _time_collective, n, args=(collective, list(sizes), repeats), timeout_s=timeout_s, network=network
        )
        slowest = np.max(np.array(by_rank), axis=0)  # (ranks, sizes, repeats) -> (sizes, repeats)
        for size, took in zip(sizes, slowest, strict=True):
            low, middle, high = (float(q) for q in np.quantile(took, [0.25, 0.5, 0.75]))
            points.append(Point(n, size, float(steps(n)), float(sent_bytes(size, n)), middle, low, high))
    return _fit(tuple(points), link, steps, sent_bytes)


def _several(name: str, values: Iterable[int]) -> list[int]:
    several = list(values)
    if not several:
        raise ValueError(f"{name} must not be empty")
    return several


def _at_least(name: str, value: object, smallest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < smallest:
        raise ValueError(f"{name} must be whole numbers, at least {smallest}, not {value!r}")


def _time_collective(collective: Collective, sizes: list[int], repeats: int) -> list[list[float]]:
    """In a rank: for each size `repeats` timings of one collective, in seconds."""
    import torch
    import torch.distributed as dist

    tensors = [torch.ones(size // 4).zero_() for size in sizes]  # sums of zeros stay zeros, however often
    batches = []
    for tensor in tensors:
        collective(tensor)
        guess = torch.tensor([_seconds(collective, tensor, 2)])
        dist.broadcast(guess, 0)
        batches.append(max(1, min(_MAX_BATCH, math.ceil(_BATCH_SECONDS / guess.item()))))
    took: list[list[float]] = [[] for _ in sizes]
    for _ in range(repeats):
        for number, tensor in enumerate(tensors):
            took[number].append(_seconds(collective, tensor, batches[number]))
    return took


def _seconds(collective: Collective, tensor: Any, batch: int) -> float:
    context.barrier()
    start = time.perf_counter()
    for _ in range(batch):
        collective(tensor)
    return (time.perf_counter() - start) / batch
