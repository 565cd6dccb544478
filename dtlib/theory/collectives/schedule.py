"""Every algorithm as data: rounds of transfers, run by `simulate` on numpy rows and by `dtlib.ranks` for real.

In one round a rank sends at most one message and receives at most one, so the number of rounds is the number
of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from dtlib.theory import valid

from .chunks import chunk_bounds, floor_log2


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message: rank `source` sends ``buffer[start:stop]`` to rank `target`.

    There it is combined with what stands at the same place (`combine`), or replaces it. In an all-to-all it
    is written to a second buffer instead, at `place`.
    """

    source: int
    target: int
    start: int
    stop: int
    combine: bool = False
    place: int | None = None


Round = tuple[Transfer, ...]
Schedule = tuple[Round, ...]

ALGORITHMS = (
    "naive_all_reduce",
    "ring_all_reduce",
    "tree_all_reduce",
    "recursive_doubling_all_reduce",
    "halving_doubling_all_reduce",
    "two_level_all_reduce",
    "ring_reduce_scatter",
    "ring_all_gather",
    "pairwise_all_to_all",
    "tree_broadcast",
    "tree_reduce",
)
"""The names that `schedule`, `traffic` and `simulate` know; `dtlib.ranks.collectives` has a function for each."""

ROOTED = ("tree_broadcast", "tree_reduce")
"""Those of them that take a `src` rank: where the broadcast starts, or where the reduced buffer ends."""

MOST_RANKS = 512
"""A ring's schedule grows with the square of the ranks: half a million messages here."""


def schedule(algorithm: str, num_elements: int, n: int, *, ranks_per_node: int | None = None, src: int = 0) -> Schedule:
    """The rounds of `algorithm` on `n` ranks for a full buffer of `num_elements`, without messages of length zero.

    `ranks_per_node` belongs to ``two_level_all_reduce`` alone, `src` to ``tree_broadcast`` and
    ``tree_reduce`` (their root). Raises ``ValueError`` for an unknown name, an option that does not belong,
    a number out of range, or more than `MOST_RANKS` ranks: `traffic` counts for more.
    """
    num_elements, n, options = checked(algorithm, num_elements, n, ranks_per_node, src)
    valid.at_most("n", n, MOST_RANKS)
    rounds = _BUILDERS[algorithm](num_elements, n, **options)
    kept = (tuple(t for t in transfers if t.start < t.stop) for transfers in rounds)
    return tuple(transfers for transfers in kept if transfers)


def checked(
    algorithm: str, num_elements: int, n: int, ranks_per_node: int | None, src: int
) -> tuple[int, int, dict[str, int]]:
    """The same arguments, validated: the two numbers as ints, and the options that `algorithm` takes."""
    if algorithm not in _BUILDERS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, not {algorithm!r}")
    num_elements, n = valid.whole("num_elements", num_elements, 0), valid.ranks(n)
    if (algorithm == "two_level_all_reduce") != (ranks_per_node is not None):
        raise ValueError(f"ranks_per_node is for two_level_all_reduce: {ranks_per_node!r} with {algorithm}")
    src = valid.rank_of("src", src, n)
    if src and algorithm not in ROOTED:
        raise ValueError(f"src is for {' and '.join(ROOTED)}: {src} with {algorithm}")
    options = {} if ranks_per_node is None else {"ranks_per_node": valid.node_size(n, ranks_per_node)}
    return num_elements, n, options | ({"src": src} if algorithm in ROOTED else {})


# Rings over some of the ranks and a part of the buffer, so that two of them make a two-level all-reduce


def _ring_scatter(members: Sequence[int], start: int, stop: int) -> list[list[Transfer]]:
    """Rank members[i] ends with the sum of chunk i; chunk c starts at the rank after its home and goes round."""
    n, bounds = len(members), [start + at for at in chunk_bounds(stop - start, len(members))]
    return [[_hop(members, i, bounds, (i - 1 - step) % n, combine=True) for i in range(n)] for step in range(n - 1)]


def _ring_gather(members: Sequence[int], start: int, stop: int) -> list[list[Transfer]]:
    """Rank members[i] starts with chunk i and passes on what it received last."""
    n, bounds = len(members), [start + at for at in chunk_bounds(stop - start, len(members))]
    return [[_hop(members, i, bounds, (i - step) % n) for i in range(n)] for step in range(n - 1)]


def _hop(members: Sequence[int], i: int, bounds: list[int], chunk: int, combine: bool = False) -> Transfer:
    return Transfer(members[i], members[(i + 1) % len(members)], bounds[chunk], bounds[chunk + 1], combine)


def _side_by_side(parts: Sequence[list[list[Transfer]]]) -> list[list[Transfer]]:
    """Groups of ranks that work at the same time: round k of the whole is round k of every part."""
    return [[t for part in step for t in part] for step in zip_longest(*parts, fillvalue=[])]


# The algorithms ------------------------------------------------------------------------------------------------------


def _naive(num_elements: int, n: int) -> list[list[Transfer]]:
    up = [[Transfer(rank, 0, 0, num_elements, combine=True)] for rank in range(1, n)]
    return up + [[Transfer(0, rank, 0, num_elements)] for rank in range(1, n)]


def _reduce_scatter(num_elements: int, n: int) -> list[list[Transfer]]:
    return _ring_scatter(range(n), 0, num_elements)


def _all_gather(num_elements: int, n: int) -> list[list[Transfer]]:
    return _ring_gather(range(n), 0, num_elements)


def _ring(num_elements: int, n: int) -> list[list[Transfer]]:
    return _reduce_scatter(num_elements, n) + _all_gather(num_elements, n)


def _broadcast(num_elements: int, n: int, src: int) -> list[list[Transfer]]:
    """In round k the ranks that have it serve those 2ᵏ below the top of the tree, widest gap first."""
    gaps = [1 << level for level in reversed(range((n - 1).bit_length()))]
    return [
        [Transfer((place + src) % n, (place + gap + src) % n, 0, num_elements) for place in range(0, n - gap, 2 * gap)]
        for gap in gaps
    ]


def _reduce(num_elements: int, n: int, src: int) -> list[list[Transfer]]:
    """A broadcast run backwards."""
    return [
        [Transfer(t.target, t.source, t.start, t.stop, combine=True) for t in transfers]
        for transfers in reversed(_broadcast(num_elements, n, src))
    ]


def _tree(num_elements: int, n: int) -> list[list[Transfer]]:
    return _reduce(num_elements, n, 0) + _broadcast(num_elements, n, 0)


def _folded(num_elements: int, n: int, core: list[list[Transfer]]) -> list[list[Transfer]]:
    """`core` on the largest power of two of ranks, with the ranks beyond it folded in before and served after."""
    power = 1 << floor_log2(n)
    if power == n:
        return core
    pairs = [(rank, rank - power) for rank in range(power, n)]
    return [
        [Transfer(extra, partner, 0, num_elements, combine=True) for extra, partner in pairs],
        *core,
        [Transfer(partner, extra, 0, num_elements) for extra, partner in pairs],
    ]


def _recursive_doubling(num_elements: int, n: int) -> list[list[Transfer]]:
    power = 1 << floor_log2(n)
    core = [
        [Transfer(rank, rank ^ (1 << level), 0, num_elements, combine=True) for rank in range(power)]
        for level in range(floor_log2(n))
    ]
    return _folded(num_elements, n, core)


def _halving_doubling(num_elements: int, n: int) -> list[list[Transfer]]:
    """Halving: send the half that the partner keeps. Doubling: send all that is finished."""
    levels = floor_log2(n)
    bounds = chunk_bounds(num_elements, 1 << levels)

    def block(rank: int, level: int) -> tuple[int, int]:  # the 2^level chunks around rank's own
        first = rank >> level << level
        return bounds[first], bounds[first + (1 << level)]

    core = [
        [Transfer(r, r ^ (1 << level), *block(r ^ (1 << level), level), True) for r in range(1 << levels)]
        for level in reversed(range(levels))
    ]
    core += [[Transfer(r, r ^ (1 << level), *block(r, level)) for r in range(1 << levels)] for level in range(levels)]
    return _folded(num_elements, n, core)


def _two_level(num_elements: int, n: int, ranks_per_node: int) -> list[list[Transfer]]:
    nodes = [range(first, first + ranks_per_node) for first in range(0, n, ranks_per_node)]
    bounds = chunk_bounds(num_elements, ranks_per_node)
    across = [(range(place, n, ranks_per_node), bounds[place], bounds[place + 1]) for place in range(ranks_per_node)]
    return [
        *_side_by_side([_ring_scatter(node, 0, num_elements) for node in nodes]),
        *_side_by_side([_ring_scatter(*part) + _ring_gather(*part) for part in across]),
        *_side_by_side([_ring_gather(node, 0, num_elements) for node in nodes]),
    ]


def _all_to_all(num_elements: int, n: int) -> list[list[Transfer]]:
    """In round k a rank serves the one k places on; rank r's k-th chunk lands as chunk r at rank k."""
    bounds = chunk_bounds(num_elements, n)

    def message(rank: int, to: int) -> Transfer:
        length = bounds[to + 1] - bounds[to]
        return Transfer(rank, to, bounds[to], bounds[to + 1], place=rank * length)

    return [[message(rank, (rank + gap) % n) for rank in range(n)] for gap in range(1, n)]


_BUILDERS: dict[str, Callable[..., Any]] = {
    "naive_all_reduce": _naive,
    "ring_all_reduce": _ring,
    "tree_all_reduce": _tree,
    "recursive_doubling_all_reduce": _recursive_doubling,
    "halving_doubling_all_reduce": _halving_doubling,
    "two_level_all_reduce": _two_level,
    "ring_reduce_scatter": _reduce_scatter,
    "ring_all_gather": _all_gather,
    "pairwise_all_to_all": _all_to_all,
    "tree_broadcast": _broadcast,
    "tree_reduce": _reduce,
}
