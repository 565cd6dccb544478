"""The norm of a gradient of which each element counts once, on whatever axes it lies."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor, nn

from dtlib.ranks.dp import DataParallel
from dtlib.ranks.shared.split import splits_of
from dtlib.ranks.zero import Zero

Ranges = list[tuple[slice, bool]]
"""Where elements lie in a flattened parameter, and whether they count on this rank."""


def counted_ranges(stage: nn.Module, *, is_first: bool) -> dict[int, Ranges]:
    """By the ``id`` of each parameter of a stage: what of it counts on this rank of tp, and not on another one too.

    Slices count where they lie, keys and values that several ranks have on the first of them, and what all ranks have
    on the one that `is_first` among them.
    """
    splits, found = splits_of(stage), dict[int, Ranges]()
    for name, parameter in stage.named_parameters():
        everything = slice(0, parameter.numel())
        if name not in splits:
            found[id(parameter)] = [(everything, is_first)]
            continue
        how, group = splits[name]
        rank = dist.get_rank(group)
        if not any(how.is_copy(rank)):
            found[id(parameter)] = [(everything, True)]
            continue
        start, row, ranges = 0, parameter[0].numel(), []  # copies are rows: they lie together
        for length, is_copy in zip(how.lengths(rank), how.is_copy(rank), strict=True):
            ranges.append((slice(start, start + length * row), not is_copy))
            start += length * row
        found[id(parameter)] = ranges
    return found


def gradients(part: DataParallel, counted: dict[int, Ranges], *, is_first: bool) -> Iterator[tuple[Tensor, bool]]:
    """This rank's gradients of a wrapped module in views, each with whether its elements count.

    Pieces that a `Zero` has spread count where they are; what all ranks have on the one that `is_first` among them.
    """
    if isinstance(part, Zero):
        for shard in part.shards:
            for index, weight in shard.weights.items():
                if weight.grad is not None:
                    yield from _cut(weight.grad, shard.within(index).start, counted[id(shard.params[index])])
        return
    for parameter in part.parameters():
        if parameter.grad is not None:
            for view, counts in _cut(parameter.grad.view(-1), 0, counted[id(parameter)]):
                yield view, counts and is_first


def _cut(flat: Tensor, start: int, ranges: Ranges) -> Iterator[tuple[Tensor, bool]]:
    """What of a flat gradient, which begins at `start` of its parameter, lies in each range."""
    for where, counts in ranges:
        low, high = max(where.start - start, 0), min(where.stop - start, len(flat))
        if low < high:
            yield flat[low:high], counts
