"""Reduce-scatter and all-gather that run while this thread computes: every rank talks to every other at once.

A ring hands partial sums on from rank to rank, so somebody has to wait for each of its N−1 steps. Here each rank sends
each other rank that one's chunk and is done: all messages are under way when the call returns, and the library's own
threads carry them. The bytes are those of the ring, (N−1)/N · D for each rank. The owner of a chunk adds all
contributions up in one precision; the price is room for those that arrive together, ⌈(N−1)/4⌉/N · D beside the buffer.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .peers import Peers, wait_for

NUM_PARTS = 4
"""In so many parts the others' chunks arrive where they are added up, so that room for one of them is enough."""

_FIRST_TAG = 1 << 20
"""Messages carry tags from here on, so that they never meet those of another algorithm on the same group."""


def gather(peers: Peers, full: Tensor, bounds: Sequence[int], number: int) -> Iterator[None]:
    """Fill `full`, flat and cut at `bounds`, with the other ranks' chunks; this rank's must be in its place.

    The first ``next`` starts it, and once it is exhausted all is there. `number` tells exchanges apart that are under
    way together.
    """
    chunks = _chunks(full, bounds)
    outgoing = [(chunks[peers.rank], rank) for rank in _others(peers)]
    incoming = [(chunks[rank], rank) for rank in reversed(_others(peers))]
    works = _start(peers, outgoing, incoming, _FIRST_TAG + 2 * number)
    yield
    wait_for(works)


def gather_parts(peers: Peers, own: Tensor, sizes: Sequence[int], number: int) -> Generator[None, None, Tensor]:
    """As `gather`, of flat tensors of these sizes, of which rank r has the r-th, its `own`; returns all."""
    ends = [*accumulate(sizes, initial=0)]
    full = own.new_empty(ends[-1])
    full[ends[peers.rank] : ends[peers.rank + 1]] = own
    yield from gather(peers, full, ends, number)
    return full


def scatter(peers: Peers, buffer: Tensor, bounds: Sequence[int], number: int) -> Iterator[None]:
    """Reduce-scatter `buffer`, flat and cut at `bounds`: in the end this rank's chunk holds the sum of all ranks'.

    The first ``next`` starts it; each further one waits for a part of what arrives, adds it up, and lets the next part
    come, of `NUM_PARTS` in all. `buffer` belongs to it until it is exhausted. Sums of short dtypes are taken in float32
    and rounded once.
    """
    tag, chunks, others = _FIRST_TAG + 2 * number + 1, _chunks(buffer, bounds), _others(peers)
    own = chunks[peers.rank]
    if not others:
        return  # the sum is there
    total = own.to(torch.promote_types(own.dtype, torch.float32))
    outgoing = [(chunks[rank], rank) for rank in others]
    num_rows = -(-len(others) // NUM_PARTS)
    room = own.new_empty((num_rows, own.numel()))
    sends = _start(peers, outgoing, [], tag) if peers.pipelined else []
    for at in range(0, len(others), num_rows):
        part = slice(at, at + num_rows)
        incoming = list(zip(room, others[::-1][part], strict=False))
        receives = _start(peers, [] if peers.pipelined else outgoing[part], incoming, tag)
        yield
        wait_for(receives)
        for row, _ in incoming:
            total += row
    wait_for(sends)
    if total is not own:
        own.copy_(total)


def swap(peers: Peers, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], number: int) -> Iterator[None]:
    """Send each other rank its own tensor, and fill `incoming`; see `gather`."""
    others = _others(peers)
    sends, receives = [(outgoing[rank], rank) for rank in others], [(incoming[rank], rank) for rank in others[::-1]]
    works = _start(peers, sends, receives, _FIRST_TAG + 2 * number + 1)
    yield
    wait_for(works)


def finish(exchange: Iterator[None]) -> None:
    """Wait until it is done."""
    for _ in exchange:
        pass


def _others(peers: Peers) -> list[int]:
    """The other ranks, each rank beginning with its right neighbour, so that not all knock at one door."""
    return [(peers.rank + step) % peers.n for step in range(1, peers.n)]


def _chunks(buffer: Tensor, bounds: Sequence[int]) -> Sequence[Tensor]:
    return buffer.split([stop - start for start, stop in pairwise(bounds)])


def _start(
    peers: Peers, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int
) -> list[Any]:
    """Start all of it; an empty tensor is neither sent nor received, which both sides know."""
    calls = [(dist.isend, tensor, rank) for tensor, rank in sends if tensor.numel()]
    calls += [(dist.irecv, tensor, rank) for tensor, rank in receives if tensor.numel()]
    if peers.pipelined or not calls:
        # A send whose receiver is not ready yet is left to the library's thread: sends go first.
        return [call(tensor, peers.global_ranks[rank], peers.group, tag) for call, tensor, rank in calls]
    batch = [dist.P2POp(call, tensor, peers.global_ranks[rank], peers.group, tag) for call, tensor, rank in calls]
    return list(dist.batch_isend_irecv(batch))
