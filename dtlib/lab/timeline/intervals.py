"""Arithmetic of time intervals: sets of half-open pieces (start, end), kept as sorted lists without
overlap."""

from __future__ import annotations

import math
from collections.abc import Iterable

Piece = tuple[float, float]


def union(pieces: Iterable[Piece], *, gap: float = 0.0) -> list[Piece]:
    """The points that lie in at least one piece, as sorted pieces that do not touch.

    Pieces that are at most `gap` apart are joined. Empty pieces vanish. A piece that ends before it starts,
    or whose ends are not finite, raises ``ValueError``.
    """
    joined: list[Piece] = []
    for start, end in sorted(pieces):
        if not (math.isfinite(start) and math.isfinite(end) and start <= end):
            raise ValueError(f"a piece must start before it ends, not ({start!r}, {end!r})")
        if start == end:
            continue
        if joined and start <= joined[-1][1] + gap:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def intersection(first: Iterable[Piece], second: Iterable[Piece]) -> list[Piece]:
    """The points that lie in a piece of `first` and in a piece of `second`."""
    left, right = union(first), union(second)
    common: list[Piece] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            common.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return common


def difference(first: Iterable[Piece], second: Iterable[Piece]) -> list[Piece]:
    """The points that lie in a piece of `first` and in none of `second`."""
    rest: list[Piece] = []
    holes = union(second)
    j = 0
    for start, end in union(first):
        while j < len(holes) and holes[j][1] <= start:
            j += 1
        k = j
        while k < len(holes) and holes[k][0] < end:
            if start < holes[k][0]:
                rest.append((start, holes[k][0]))
            start = max(start, holes[k][1])
            k += 1
        if start < end:
            rest.append((start, end))
    return rest


def length(pieces: Iterable[Piece]) -> float:
    """The length of the union of `pieces`: what overlaps counts once."""
    return math.fsum(end - start for start, end in union(pieces))


def pack(pieces: Iterable[Piece]) -> list[int]:
    """A lane for each piece, in the order given: no two of a lane overlap, and there are as few as can be.

    Lanes are numbered from 0.
    """
    given = list(pieces)
    ends: list[float] = []
    lanes = [0] * len(given)
    for number in sorted(range(len(given)), key=lambda index: given[index]):
        start, end = given[number]
        free = next((lane for lane, busy in enumerate(ends) if busy <= start), len(ends))
        if free == len(ends):
            ends.append(end)
        ends[free] = end
        lanes[number] = free
    return lanes
