"""A flat piece of a part of a matrix as boxes of the whole: three at most, the end of a row, rows, a row's beginning.

Where the part is made of several ranges of rows, as `tp` cuts queries, keys and values, each of them is cut by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

from torch import Tensor

from .pieces import Place

Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes in a whole tensor."""


def boxes(flat: Tensor, start: int, place: Place) -> Iterator[tuple[Box, Tensor]]:
    """The boxes of `flat`, elements from `start` on of a part that lies as `place` says, each with a view of them."""
    shape = place.shape if len(place.shape) > 1 else (place.shape[0], 1)
    for first, rows, column, columns in _rectangles(start, start + len(flat), shape[1]):
        for (row, height), (at, width), (shift, offset) in _in_the_whole(first, rows, column, columns, place):
            low = (row * shape[1] + at) - start
            view = flat[low : low + height * width].view(height, width)
            if len(place.shape) == 1:
                yield ((row + shift,), (height,)), view.view(height)
            else:
                yield ((row + shift, at + offset), (height, width)), view


def _rectangles(start: int, stop: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """Elements [start, stop) of a matrix of that width, row after row, as (row, rows, column, columns)."""
    while start < stop:
        row, column = divmod(start, width)
        rows = (stop - start) // width if column == 0 else 0
        length = rows * width if rows else min(width - column, stop - start)
        yield row, max(rows, 1), column, width if rows else length
        start += length


def _in_the_whole(row: int, rows: int, column: int, columns: int, place: Place) -> Iterator[Any]:
    """A rectangle of a part, cut where its neighbours are none in the whole: rows, columns, and how far both move."""
    if place.split is None:
        yield (row, rows), (column, columns), (0, 0)
        return
    ends = accumulate(place.split.lengths(place.rank), initial=0)
    for (low, high), there in zip(pairwise(ends), place.split.ranges[place.rank], strict=True):
        if place.split.dim == 0 and max(low, row) < min(high, row + rows):
            top = max(low, row)
            yield (top, min(high, row + rows) - top), (column, columns), (there.start - low, 0)
        elif place.split.dim == 1:
            if column < low or column + columns > high:
                raise ValueError(f"{place.name} must have columns that lie together on each rank")
            yield (row, rows), (column, columns), (0, there.start - low)
