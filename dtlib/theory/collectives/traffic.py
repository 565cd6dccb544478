"""Exact integers: what each rank sends for any length and any number of ranks, as closed forms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from dtlib.theory import valid

from . import doubling, ring, tree, two_level
from .chunks import chunk_elements, chunk_start, floor_log2
from .schedule import checked

MOST_RANKS = 65_536
"""`traffic` counts rank by rank, and answers in a second up to here."""


@dataclass(frozen=True)
class Traffic:
    """What one collective puts on the wire.

    `sent_bytes` has the payload that each rank sends, in rank order (without protocol headers), `steps` the
    rounds in which something travels.
    """

    sent_bytes: tuple[int, ...]
    steps: int

    @property
    def total_bytes(self) -> int:
        """All ranks together."""
        return sum(self.sent_bytes)


def traffic(
    algorithm: str,
    num_elements: int,
    itemsize: int,
    n: int,
    *,
    ranks_per_node: int | None = None,
    src: int = 0,
) -> Traffic:
    """What `algorithm` sends for a full buffer of `num_elements` of `itemsize` bytes on `n` ranks: exact integers.

    Chunks are cut as `chunk_bounds` cuts. For ``ring_all_gather`` the full buffer is the gathered one; for
    ``pairwise_all_to_all`` it is what one rank holds before. Raises ``ValueError`` as `schedule` does, and for
    more than `MOST_RANKS` ranks.
    """
    num_elements, n, options = checked(algorithm, num_elements, n, ranks_per_node, src)
    valid.at_most("n", n, MOST_RANKS)
    itemsize = valid.whole("itemsize", itemsize, 1)
    sent = tuple(itemsize * _SENT_ELEMENTS[algorithm](num_elements, n, rank, **options) for rank in range(n))
    steps = _STEPS[algorithm](n, **{k: v for k, v in options.items() if k != "src"}) if num_elements else 0
    return Traffic(sent, steps)


def sent_bytes(algorithm: str, num_elements: int, itemsize: int, n: int, rank: int, **options: int) -> int:
    """The payload bytes that rank `rank` alone sends; arguments and errors as for `traffic`."""
    n = valid.ranks(n)
    rank = valid.rank_of("rank", rank, n)
    return traffic(algorithm, num_elements, itemsize, n, **options).sent_bytes[rank]


def _scatter(elements: int, n: int, rank: int) -> int:
    return elements - chunk_elements(elements, n, rank)  # all but the chunk it keeps


def _gather(elements: int, n: int, rank: int) -> int:
    return elements - chunk_elements(elements, n, rank + 1)  # all but the chunk its neighbour started with


def _ring(elements: int, n: int, rank: int) -> int:
    return _scatter(elements, n, rank) + _gather(elements, n, rank)


def _naive(elements: int, n: int, rank: int) -> int:
    return elements * (n - 1 if rank == 0 else 1)


def _children(n: int, place: int) -> int:
    """Of a binomial tree with `n` places: place p serves p + 2ᵏ for each 2ᵏ below its own lowest bit."""
    levels = (place & -place).bit_length() - 1 if place else (n - 1).bit_length()
    return sum(place + (1 << level) < n for level in range(levels))


def _broadcast(elements: int, n: int, rank: int, src: int) -> int:
    return elements * _children(n, (rank - src) % n)


def _reduce(elements: int, n: int, rank: int, src: int) -> int:
    return elements * (rank != src)


def _tree(elements: int, n: int, rank: int) -> int:
    return _broadcast(elements, n, rank, 0) + _reduce(elements, n, rank, 0)


def _fold(elements: int, n: int, rank: int) -> int:
    """A rank beyond the power of two sends all to its partner, which sends the result back."""
    power = 1 << floor_log2(n)
    return elements * (rank >= power or rank < n - power)


def _recursive_doubling(elements: int, n: int, rank: int) -> int:
    inside = rank < 1 << floor_log2(n)
    return _fold(elements, n, rank) + inside * floor_log2(n) * elements


def _halving_doubling(elements: int, n: int, rank: int) -> int:
    levels = floor_log2(n)
    if rank >= 1 << levels:
        return _fold(elements, n, rank)
    start = partial(chunk_start, elements, 1 << levels)
    halving = elements - chunk_elements(elements, 1 << levels, rank)
    blocks = [(rank >> level << level, 1 << level) for level in range(levels)]
    doubling = sum(start(first + size) - start(first) for first, size in blocks)
    return _fold(elements, n, rank) + halving + doubling


def _two_level(elements: int, n: int, rank: int, ranks_per_node: int) -> int:
    node, place = divmod(rank, ranks_per_node)
    part = chunk_elements(elements, ranks_per_node, place)
    return _ring(elements, ranks_per_node, place) + _ring(part, n // ranks_per_node, node)


_SENT_ELEMENTS: dict[str, Callable[..., int]] = {
    "naive_all_reduce": _naive,
    "ring_all_reduce": _ring,
    "tree_all_reduce": _tree,
    "recursive_doubling_all_reduce": _recursive_doubling,
    "halving_doubling_all_reduce": _halving_doubling,
    "two_level_all_reduce": _two_level,
    "ring_reduce_scatter": _scatter,
    "ring_all_gather": _gather,
    "pairwise_all_to_all": _scatter,  # all but the chunk for itself
    "tree_broadcast": _broadcast,
    "tree_reduce": _reduce,
}

_STEPS: dict[str, Any] = {
    name: getattr(module, f"{name}_steps")
    for module in (ring, tree, doubling, two_level)
    for name in _SENT_ELEMENTS
    if hasattr(module, f"{name}_steps")
}
