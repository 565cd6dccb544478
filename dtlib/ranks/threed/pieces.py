"""What of a model a rank of a mesh has: pieces of its parameters, where they lie, and which elements count here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch.distributed as dist
from torch import Tensor, nn

from dtlib.ranks.shared.split import Split, splits_of
from dtlib.ranks.zero import Zero


@dataclass(frozen=True)
class Place:
    """Where a rank's part of a parameter lies in the whole model's: under `name`, cut as `split` says (None: whole).

    `shape` is that of the part, `rank` this one's in the group of the split, and `counts` says of consecutive slices of
    the flattened part whether they count here: an element that several ranks have counts on the first of them.
    """

    name: str
    shape: tuple[int, ...]
    split: Split | None
    rank: int
    counts: tuple[tuple[slice, bool], ...]

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape in the whole model."""
        if self.split is None:
            return self.shape
        return tuple(self.split.size if dim == self.split.dim else n for dim, n in enumerate(self.shape))


def places(stage: nn.Module, first_layer: int, *, is_first: bool) -> dict[int, Place]:
    """The place of each parameter of a stage, by its ``id``: `first_layer` is the number of its first layer, `is_first`
    whether the rank is the first of those that split it, on which counts what all of them have."""
    splits, found = splits_of(stage), dict[int, Place]()
    for name, parameter in stage.named_parameters():
        shape, (how, group) = tuple(parameter.shape), splits.get(name, (None, None))
        counts: tuple[tuple[slice, bool], ...] = ((slice(0, parameter.numel()), is_first),)
        rank = 0 if how is None else dist.get_rank(group)
        if how is not None:
            ends = list(accumulate(how.lengths(rank), initial=0))
            row = parameter.numel() // shape[0] if how.dim == 0 else parameter.numel() // ends[-1]
            counts = tuple(
                (slice(start * row, stop * row), not is_copy)  # copies are rows: they lie together
                for (start, stop), is_copy in zip(pairwise(ends), how.is_copy(rank), strict=True)
            )
        found[id(parameter)] = Place(_in_the_model(name, first_layer), shape, how, rank, counts)
    return found


def _in_the_model(name: str, first_layer: int) -> str:
    if not name.startswith("blocks."):
        return name
    _, layer, rest = name.split(".", 2)
    return f"blocks.{int(layer) + first_layer}.{rest}"


@dataclass(frozen=True)
class Piece:
    """Elements of a parameter, flat, from `start` of this rank's part on.

    `weight` are those that the optimizer steps as `stepped` (None: frozen), and `is_everywhere` says that all ranks of
    dp and cp have them.
    """

    parameter: int
    start: int
    weight: Tensor
    stepped: nn.Parameter | None
    is_everywhere: bool

    @property
    def gradient(self) -> Tensor | None:
        """Of the piece, flat; None if there is none."""
        grad = None if self.stepped is None else self.stepped.grad
        return None if grad is None else grad.view(-1)


def pieces(part: nn.Module) -> Iterator[Piece]:
    """What this rank has of a wrapped module: of what a `Zero` has spread its own, and all of the rest."""
    spread = set[int]()
    for shard in part.all_shards if isinstance(part, Zero) else ():
        kept = shard.chunk if shard.master is None else shard.master
        spread |= {id(parameter) for parameter in shard.params.values()}
        for index, piece in shard.pieces.items():
            number, start = id(shard.params[index]), shard.within(index).start
            yield Piece(number, start, kept[piece], shard.weights.get(index), is_everywhere=False)
    for parameter in part.module.parameters():
        if id(parameter) not in spread:
            stepped = parameter if parameter.requires_grad else None
            yield Piece(id(parameter), 0, parameter.detach().view(-1), stepped, is_everywhere=True)


def cut(flat: Tensor, start: int, place: Place) -> Iterator[tuple[Tensor, int, bool]]:
    """`flat`, which begins at `start` of a part, in views with their own starts: each counts here or does not."""
    for where, counts in place.counts:
        low, high = max(where.start, start), min(where.stop, start + len(flat))
        if low < high:
            yield flat[low - start : high - start], low, counts
