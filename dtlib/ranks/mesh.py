"""The ranks of a job on named axes: who splits a matrix with whom, who a batch, who the layers.

``Mesh({"dp": 2, "tp": 4})`` places eight ranks in two rows of four: the last axis varies fastest, so ranks 0 to 3 split
one matrix, and belong on one node. Every parallelism takes its process groups from here, by the name of its axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from math import prod
from typing import Any, TypeAlias

import torch.distributed as dist

from dtlib.theory.valid import rank_of, whole

Group: TypeAlias = dist.ProcessGroup | None
"""A process group; None means all ranks."""


class Mesh:
    """Ranks on named axes, and a process group for those that differ along one of them, or along several.

    `axes` maps names to sizes, the axis of the farthest ranks first; a size of 1 is allowed. Before `group` is called
    nothing is sent, and where no process group stands `world_size` says how many ranks there are.

    ``ValueError`` for a name that is no name, a size below 1, or sizes whose product is not the number of ranks.
    """

    def __init__(self, axes: Mapping[str, int], world_size: int | None = None) -> None:
        if not isinstance(axes, Mapping) or not axes:
            raise ValueError(f'axes must map names to sizes, as {{"dp": 2, "tp": 4}} does, not {axes!r}')
        for name in axes:
            if not isinstance(name, str) or not name.isidentifier():
                raise ValueError(f"axes must have names such as dp or tp, not {name!r}")
        self.axes = {name: whole(f"the size of axis {name}", size, 1) for name, size in axes.items()}
        is_up = dist.is_available() and dist.is_initialized()
        n = whole("world_size", world_size, 1) if world_size is not None else dist.get_world_size() if is_up else None
        if n is not None and n != self.world_size:
            sizes = " × ".join(f"{name} {size}" for name, size in self.axes.items())
            raise ValueError(f"axes must have {n} ranks in all, not {sizes} = {self.world_size}")
        self._groups: dict[tuple[str, ...], Any] = {}

    @property
    def world_size(self) -> int:
        """Ranks in all: the product of the sizes."""
        return prod(self.axes.values())

    def size(self, *axes: str) -> int:
        """How many ranks differ along `axes` alone: the size of their group."""
        return prod(self.axes[axis] for axis in self._checked(axes))

    def coordinates(self, rank: int | None = None) -> dict[str, int]:
        """Where `rank` (default: this one) stands on each axis."""
        rest = self._rank(rank)
        places = {}
        for name, size in reversed(self.axes.items()):
            rest, places[name] = divmod(rest, size)
        return {name: places[name] for name in self.axes}

    def rank_at(self, **coordinates: int) -> int:
        """The rank that stands there; on an axis that is not named, where this rank stands (or 0 without a group)."""
        self._checked(tuple(coordinates))
        here = self.coordinates() if dist.is_initialized() else dict.fromkeys(self.axes, 0)
        rank = 0
        for name, size in self.axes.items():
            rank = rank * size + rank_of(name, coordinates.get(name, here[name]), size)
        return rank

    def ranks(self, *axes: str, rank: int | None = None) -> list[int]:
        """The ranks that differ from `rank` (default: this one) along `axes` alone, itself among them, in order."""
        along = self._checked(axes)
        places = self.coordinates(rank)
        ranges = [range(size) if name in along else [places[name]] for name, size in self.axes.items()]
        return [self._at(place) for place in product(*ranges)]

    def group(self, *axes: str) -> Any:
        """The process group of ``ranks(*axes)``, the same one at every call.

        All ranks of the job must ask for the groups that they need in one order: the first call for some axes is
        collective, and makes the groups of all ranks. All axes together are the whole job.
        """
        along = self._checked(axes)
        if along not in self._groups:
            if not dist.is_initialized():
                raise ValueError("a group needs torch.distributed: call init_process_group first")
            self._groups[along] = self._made(along)
        return self._groups[along]

    def _made(self, along: tuple[str, ...]) -> Any:
        if self.size(*along) == self.world_size:
            return dist.group.WORLD
        own = None
        for members in self._all(along):
            group = dist.new_group(members)  # every rank makes every group, as torch demands
            own = group if dist.get_rank() in members else own
        return own

    def _all(self, along: tuple[str, ...]) -> Iterator[list[int]]:
        """The ranks of every group along some axes."""
        others = [range(1) if name in along else range(size) for name, size in self.axes.items()]
        for place in product(*others):
            yield self.ranks(*along, rank=self._at(place))

    def _at(self, place: tuple[int, ...]) -> int:
        rank = 0
        for at, size in zip(place, self.axes.values(), strict=True):
            rank = rank * size + at
        return rank

    def _rank(self, rank: int | None) -> int:
        if rank is None and not dist.is_initialized():
            raise ValueError("rank must be given where torch.distributed does not say which one this is")
        return rank_of("rank", dist.get_rank() if rank is None else rank, self.world_size)

    def _checked(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """`axes` in the order of the mesh."""
        if not axes:
            raise ValueError(f"axes must be some of {', '.join(self.axes)}, not none")
        for axis in axes:
            if axis not in self.axes:
                raise ValueError(f"axis must be one of {', '.join(self.axes)}, not {axis!r}")
        if len(set(axes)) < len(axes):
            raise ValueError(f"axes must not name one twice, and {', '.join(axes)} do")
        return tuple(name for name in self.axes if name in axes)

    def __repr__(self) -> str:
        return f"Mesh({self.axes})"
