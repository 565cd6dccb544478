"""The axes of a mesh, and which ranks stand together on some of them. Nothing here is sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations, product
from math import prod
from typing import Any

from dtlib.theory.valid import whole

DATA_AXES = ("dp", "ddp", "data", "fsdp", "dp_replicate", "dp_shard", "replicate", "shard", "batch", "cp", "ep")
"""Axes whose ranks read other data, unless `split` says so."""


class Axes:
    """Names and sizes; the last axis varies fastest, as in `ranks.mesh.Mesh` and torch's ``DeviceMesh``."""

    def __init__(self, given: Any) -> None:
        names = getattr(given, "mesh_dim_names", None)
        given = dict(zip(names, given.shape, strict=True)) if names else getattr(given, "axes", given)
        if isinstance(given, int) and not isinstance(given, bool):
            given = {"dp": given}
        if not isinstance(given, Mapping) or not given or not all(isinstance(name, str) for name in given):
            raise ValueError(f'mesh must map names of axes to sizes, as {{"dp": 2, "tp": 2}} does, not {given!r}')
        self.sizes = {name: whole(f"the size of axis {name}", size, 1) for name, size in given.items()}
        self.places = [dict(zip(self.sizes, at, strict=True)) for at in product(*map(range, self.sizes.values()))]

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return prod(self.sizes.values())

    def size(self, axes: Iterable[str]) -> int:
        """The product of some sizes."""
        return prod(self.sizes[axis] for axis in axes)

    def subsets(self) -> list[tuple[str, ...]]:
        """All choices of axes with more than one rank, the smallest first."""
        long = [name for name, size in self.sizes.items() if size > 1]
        return [some for k in range(1, len(long) + 1) for some in combinations(long, k)]

    def group(self, rank: int, axes: Iterable[str], among: Iterable[int]) -> list[int]:
        """Those of `among` that differ from `rank` along `axes` alone, in order."""
        along, here = set(axes), self.places[rank]
        return [r for r in among if all(self.places[r][a] == here[a] for a in self.sizes if a not in along)]

    def apart(self, ranks: Iterable[int]) -> tuple[str, ...]:
        """The axes along which some of `ranks` differ."""
        some = [self.places[r] for r in ranks]
        return tuple(name for name in self.sizes if len({each[name] for each in some}) > 1)

    def parting(self, some: Iterable[int], every: Iterable[int]) -> tuple[str, ...]:
        """The axes along which `some` stand at other places than `every`."""
        few, all_of = ([self.places[r] for r in ranks] for ranks in (some, every))
        return tuple(name for name in self.sizes if {at[name] for at in few} != {at[name] for at in all_of})

    def words(self, rank: int) -> str:
        """A rank, and where it stands."""
        at = ", ".join(f"{name} {self.places[rank][name]}" for name, size in self.sizes.items() if size > 1)
        return f"rank {rank}" + (f" ({at})" if at else "")
