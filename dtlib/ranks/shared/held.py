"""What of a model's parameters a rank holds: how they are cut, which elements it has, and which of them count here.

Whoever splits, shards or places parameters says it in these words; norms and checkpoints read them. An element that
several ranks have counts on one of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import TypeAlias

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dtlib.ranks.mesh import Group

from .replicas import group_of
from .split import Split, splits_of

Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes in a whole tensor."""


@dataclass(frozen=True)
class Place:
    """Where a rank's part of a parameter lies in the whole model's: under `name`, cut as `splits` say (none: whole).

    `shape` is that of the part; beside each split stands this rank's number in its group, and `counts` says of
    consecutive slices of the flattened part whether they count here or on another rank of that group.
    """

    name: str
    shape: tuple[int, ...]
    splits: tuple[tuple[Split, int], ...] = ()
    counts: tuple[tuple[slice, bool], ...] = ((slice(None), True),)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape in the whole model."""
        sizes = {split.dim: split.size for split, _ in self.splits}
        return tuple(sizes.get(dim, n) for dim, n in enumerate(self.shape))


def places(model: nn.Module, *, is_first: bool = True) -> dict[int, Place]:
    """The place of each parameter of `model` by its ``id``, as long as its shape is there: `is_first` says whether the
    rank is the first of those that split the model, on which counts what all of them have."""
    splits, found = splits_of(model), dict[int, Place]()
    for name, parameter in model.named_parameters():
        shape, cuts = tuple(parameter.shape), tuple((how, dist.get_rank(group)) for how, group in splits.get(name, ()))
        if len(cuts) != 1:  # what is split twice, experts, has no copies
            found[id(parameter)] = Place(name, shape, cuts, ((slice(None), is_first or len(cuts) > 1),))
            continue
        ((how, rank),) = cuts
        ends = list(accumulate(how.lengths(rank), initial=0))
        row = parameter.numel() // (shape[0] if how.dim == 0 else ends[-1])
        counts = tuple(
            (slice(start * row, stop * row), not is_copy)  # copies are rows: they lie together
            for (start, stop), is_copy in zip(pairwise(ends), how.is_copy(rank), strict=True)
        )
        found[id(parameter)] = Place(name, shape, cuts, counts)
    return found


@dataclass(frozen=True)
class Held:
    """Elements of a parameter, or of a buffer, that this rank has: `weight` is all of its part, in its shape, or flat
    those from `start` on.

    `optimizer` steps them as `stepped` (None: they are frozen). `is_first` says whether the rank is the first of those
    that have the same elements.
    """

    place: Place
    weight: Tensor
    start: int = 0
    stepped: nn.Parameter | None = None
    optimizer: Optimizer | None = None
    is_first: bool = True

    def slices(self, tensor: Tensor) -> Iterator[tuple[Tensor, int, bool]]:
        """`tensor`, laid out as `weight`, in views with their own starts: each counts here or on another rank."""
        if len(self.place.counts) == 1:
            yield tensor, self.start, self.is_first and self.place.counts[0][1]
            return
        flat = tensor.view(-1)
        for where, counts in self.place.counts:
            low, high = max(where.start, self.start), min(where.stop, self.start + len(flat))
            if low < high:
                yield flat[low - self.start : high - self.start], low, self.is_first and counts


def held_whole(
    module: nn.Module, where: Mapping[int, Place], optimizer: Optimizer, group: Group, but: Collection[int] = ()
) -> Iterator[Held]:
    """The parameters of `module`, all `but` some by ``id``, which the ranks of `group` have alike, or those that one
    belongs to; they lie `where` it says."""
    stepped = {id(p) for each in optimizer.param_groups for p in each["params"]}
    for p in module.parameters():
        if id(p) not in but:
            is_first = dist.get_rank(group_of(p, group)) == 0
            yield Held(where[id(p)], p.detach(), 0, p if id(p) in stepped else None, optimizer, is_first)


def held_besides(module: nn.Module, group: Group) -> Iterator[Held]:
    """Buffers, and whatever else of tensors is in the state of `module`."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, value in module.state_dict().items():
        if name not in parameters and isinstance(value, Tensor):
            yield Held(Place(name, tuple(value.shape)), value, is_first=dist.get_rank(group) == 0)


def boxes(tensor: Tensor, start: int, place: Place) -> Iterator[tuple[Box, Tensor]]:
    """The boxes of `tensor`, which is a part that lies as `place` says or flat its elements from `start` on, each with
    a view of them."""
    if tensor.shape == place.shape:
        yield from _in_the_whole((0,) * tensor.dim(), tensor, place)
        return
    at = 0
    for offsets, sizes in rectangles(start, start + len(tensor), place.shape):
        yield from _in_the_whole(offsets, tensor[at : at + prod(sizes)].view(sizes), place)
        at += prod(sizes)


def rectangles(start: int, stop: int, shape: tuple[int, ...]) -> Iterator[Box]:
    """Elements [start, stop) of a tensor of that shape, row after row: of a matrix the end of a row, rows, and the
    beginning of one."""
    if len(shape) < 2:
        yield (start,) * len(shape), (stop - start,) * len(shape)
        return
    row = prod(shape[1:])
    while start < stop:
        number, offset = divmod(start, row)
        if offset == 0 and stop - start >= row:
            rows = (stop - start) // row
            yield (number, *(0,) * (len(shape) - 1)), (rows, *shape[1:])
            start += rows * row
        else:
            end = min(row, offset + stop - start)
            for offsets, sizes in rectangles(offset, end, shape[1:]):
                yield (number, *offsets), (1, *sizes)
            start += end - offset


def _in_the_whole(
    offsets: tuple[int, ...], view: Tensor, place: Place, splits: int | None = None
) -> Iterator[tuple[Box, Tensor]]:
    """A box of a part, cut where neighbours in the part are none in the whole: undoes the last of its `splits`, and
    then those before (default: all)."""
    splits = len(place.splits) if splits is None else splits
    if not splits:
        yield (offsets, tuple(view.shape)), view
        return
    split, rank = place.splits[splits - 1]
    dim, ends = split.dim, accumulate(split.lengths(rank), initial=0)
    for (low, high), there in zip(pairwise(ends), split.ranges[rank], strict=True):
        first, last = max(low, offsets[dim]), min(high, offsets[dim] + view.shape[dim])
        if first < last:
            part = view.narrow(dim, first - offsets[dim], last - first)
            moved = (*offsets[:dim], first - low + there.start, *offsets[dim + 1 :])
            yield from _in_the_whole(moved, part, place, splits - 1)
