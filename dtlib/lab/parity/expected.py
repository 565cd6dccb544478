"""What one process finds: on the whole batch, on each part of it, and with each operation a little off."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dtlib.theory import units
from dtlib.theory.decompose import decompose

from .mesh import Axes
from .pieces import Array, Told, flattened
from .rounding import Allowed, OtherDice, Perturbed, eps_of

Cut = int | Callable[..., Any]
COARSE = 1e-4
"""Spacings above this hide factors: those of bfloat16 and float16."""
RUNS, MORE_RUNS, MOST_RUNS = 4, 12, 48
"""Perturbed runs; those where a coarse dtype hides factors (`matched`); those where something seems to be hidden."""


@dataclass
class Expected:
    """The reference's tensors in their order, what is known of each, and what the parts of the batch contribute to it.

    `parts` are the places of the parts: where they lie on the axes that split the batch, and which micro-batch. Of a
    name in `shares` the whole is the sum over parts of share × what the reference finds on this part alone, and
    `contributed` has the terms of the sum. `alone` has what the reference finds on each part, of all names; `pieces`
    of those of which a part gives a piece, as of activations.
    """

    whole: dict[str, Array]
    told: dict[str, Told]
    parts: list[dict[str, int]] = field(default_factory=list)
    data: tuple[str, ...] = ()
    contributed: dict[str, list[Array]] = field(default_factory=dict)
    alone: dict[str, list[Array]] = field(default_factory=dict)
    pieces: dict[str, list[Array]] = field(default_factory=dict)
    shares: Array | None = None
    allowed: dict[str, Allowed] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)
    perturbed: dict[str, Array] = field(default_factory=dict)
    noticed: list[str] = field(default_factory=list)
    eps: float = 0.0
    source: Reference | None = None

    @property
    def copy_bytes(self) -> int:
        """One copy of all tensors, in float64."""
        return sum(each.num_bytes for each in self.told.values())


class Reference:
    """Runs the reference, always with the same seed, and refuses one that does not begin anew."""

    def __init__(self, reference: Callable[..., Any], batch: Sequence[Any], seed: int) -> None:
        self.reference, self.batch, self.seed = reference, tuple(batch), seed

    def __call__(self, batch: Sequence[Any] | None = None) -> dict[str, tuple[Told, Array]]:
        """What it returns for a batch: the whole one where none is given."""
        torch.manual_seed(self.seed)
        return flattened(self.reference(*(self.batch if batch is None else batch)), who="reference")

    def whole(self) -> Expected:
        """On the whole batch. ``ValueError`` where a second call gives something else."""
        found, again = self(), self()
        for name, (_, values) in found.items():
            if name not in again or not np.array_equal(values, again[name][1], equal_nan=True):
                raise ValueError(
                    f"reference must begin anew at each call: called again, with the same seed, {name!r} differs. "
                    "Build the model inside, or load its weights and forget its gradients first"
                )
        wrong = [name for name, (_, values) in found.items() if not np.isfinite(values).all()]
        if wrong:
            raise ValueError(f"reference must return finite numbers, and {wrong[0]!r} has others")
        if not found:
            raise ValueError("reference must return at least one tensor, and returned none")
        return Expected({n: v for n, (_, v) in found.items()}, {n: t for n, (t, _) in found.items()})

    def measure(self, expected: Expected, unit: float, num_runs: int | None = None) -> None:
        """Fill in how far each result may be off, and how much it depends on the random stream. `unit` is the spacing
        of the coarsest dtype of the parallel step."""
        runs = []
        for number in range(num_runs or (MORE_RUNS if unit > COARSE else RUNS)):
            with Perturbed(number, unit):
                runs.append(self())
        with OtherDice():
            other = self()
        expected.eps, expected.source = unit, self
        for name, right in expected.whole.items():
            eps = max(unit, eps_of(expected.told[name].dtype))
            expected.allowed[name] = Allowed.of(right, [r[name][1] for r in runs], eps)
            expected.perturbed[name] = np.stack([(r[name][1] - right).ravel() for r in runs])
            if name in other and other[name][1].shape == right.shape:
                expected.noise[name] = float(np.linalg.norm(other[name][1] - right))

    def split(self, expected: Expected, axes: Axes, cuts: Mapping[str, Cut], micro_batches: int) -> None:
        """Fill in what each part of the batch contributes. A name whose whole is no sum over parts has none."""
        expected.data = tuple(cuts)
        names = [*cuts, "micro_batch"]
        sizes = [axes.sizes[axis] for axis in cuts] + [micro_batches]
        places = [dict(zip(names, at, strict=True)) for at in product(*map(range, sizes))]
        if len(places) < 2 or not self.batch:
            return
        found = [self(_part(self.batch, place, axes, cuts, micro_batches)) for place in places]
        lines = {}
        for name, right in expected.whole.items():
            parts = [each[name][1] for each in found if name in each and each[name][1].shape == right.shape]
            if len(parts) == len(places) and all(np.isfinite(each).all() for each in parts):
                lines[name] = parts
        expected.parts, expected.alone = places, lines
        expected.pieces = {name: [each[name][1].ravel() for each in found] for name in expected.whole
                           if name not in lines and all(name in each for each in found)}  # fmt: skip
        expected.shares = _shares(expected, lines)
        if expected.shares is None:
            expected.noticed.append(
                "no result is a sum over the parts of the batch: what each contributes is not known"
            )
            return
        for name, parts in lines.items():
            terms = [share * part for share, part in zip(expected.shares, parts, strict=True)]
            off = expected.allowed[name].beyond(np.sum(terms, 0).ravel(), expected.whole[name].ravel())
            if off <= 1:
                expected.contributed[name] = [each.ravel() for each in terms]


def _part(batch: Sequence[Any], place: Mapping[str, int], axes: Axes, cuts: Mapping[str, Cut], m: int) -> list[Any]:
    """The batch of one part: cut by one axis after another, and then into micro-batches by rows."""
    for axis, cut in cuts.items():
        batch = _cut(batch, cut, place[axis], axes.sizes[axis])
    return list(_cut(batch, 0, place["micro_batch"], m))


def _cut(batch: Sequence[Any], cut: Cut, index: int, n: int) -> Sequence[Any]:
    if callable(cut):
        return tuple(cut(*batch, index, n))
    return [each.tensor_split(n, cut)[index] if isinstance(each, Tensor) and each.dim() > cut else each
            for each in batch]  # fmt: skip


def _shares(expected: Expected, lines: Mapping[str, list[Array]]) -> Array | None:
    """With which share each part counts: what most names say whose parts are apart from each other."""
    told = []
    for name, parts in lines.items():
        columns = np.stack([each.ravel() for each in parts], 1)
        if columns.shape[0] < 2 * len(parts) or not columns.any():
            continue
        sizes = np.linalg.svd(columns, compute_uv=False)
        close = max(1e-9, 4 * expected.allowed[name].share(expected.whole[name]))
        found = decompose(expected.whole[name], parts, rtol=max(1e-6, 10 * close))
        if found is None or sizes[-1] <= 1e-3 * sizes[0]:
            continue
        right = expected.whole[name].ravel()
        if expected.eps <= COARSE or np.linalg.norm(columns @ found - right) <= close / 8 * np.linalg.norm(right):
            told.append((close * sizes[0] / sizes[-1], found))
    if not told:
        return None
    told.sort(key=lambda each: each[0])
    error = told[0][0]
    shares: Array = np.median([found for _, found in told[: max(3, len(told) // 4)]], 0)
    if expected.eps > COARSE:  # each name says little, and all together enough
        every = np.stack([found for _, found in told])
        shares = np.median(every, 0)
        error = float(np.median(np.abs(every - shares).max(1))) / abs(float(shares.mean()))
    mean = float(shares.mean())
    return np.full_like(shares, mean) if np.abs(shares - mean).max() <= max(1e-9, 4 * error) * abs(mean) else shares


def enough(expected: Expected, axes: Axes, parts: int, unit: float, memory_bytes: float | None) -> int:
    """The bytes that a comparison holds at once beside the models; ``ValueError`` where that is more than allowed."""
    coarsest = max([unit, *(eps_of(told.dtype) for told in expected.told.values())])
    runs = MOST_RUNS if coarsest > COARSE else RUNS
    needs = expected.copy_bytes * (3 + 2 * runs + 2 * parts + 2 * axes.world_size)
    limit = _free_bytes() if memory_bytes is None else memory_bytes
    if needs > limit:
        copy, many = (
            units.format_bytes(expected.copy_bytes),
            f"{runs} perturbed, {parts} parts, {axes.world_size} ranks",
        )
        raise ValueError(
            f"memory_bytes must be at least {units.format_bytes(needs)} for tensors of {copy} in float64 (one copy, "
            f"{many}), not {units.format_bytes(limit)}: compare fewer names, or a smaller model"
        )
    return needs


def _free_bytes() -> float:
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":") for line in file)
        return float(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return float("inf")
