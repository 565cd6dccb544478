"""Reduce-scatter and all-gather that run while this thread computes: every rank talks to every other at once.

A ring hands partial sums on from rank to rank, so somebody has to wait for each of its N−1 steps. Here each rank sends
each other rank that one's chunk and is done: all messages are under way when the call returns, and the library's own
threads carry them. The bytes are those of the ring, (N−1)/N · D for each rank. The owner of a chunk has all
contributions in hand and adds them up in one precision; the price is room for them, (N−1)/N · D beside the buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtlib.ranks.collectives._peers import Peers, wait_for

_FIRST_TAG = 1 << 20
"""Messages carry tags from here on, so that they never meet those of another algorithm on the same group."""


class Gather:
    """An all-gather under way: `full`, flat and cut at `bounds`, fills with the other ranks' chunks.

    This rank's chunk must be in its place already. `number` tells exchanges apart that are under way together.
    """

    def __init__(self, peers: Peers, full: Tensor, bounds: Sequence[int], number: int) -> None:
        chunks = _chunks(full, bounds)
        others = _others(peers)
        self._works = _start(
            peers,
            [(chunks[peers.rank], rank) for rank in others],
            [(chunks[rank], rank) for rank in reversed(others)],
            tag=_FIRST_TAG + 2 * number,
        )

    def wait(self) -> None:
        """Return once every chunk is there and this rank's own has been handed over."""
        wait_for(self._works)
        self._works = []


class Scatter:
    """A reduce-scatter under way: this rank's chunk of `buffer`, flat and cut at `bounds`, becomes the sum.

    The other chunks are read until `wait` returns and stay as they are.
    """

    def __init__(self, peers: Peers, buffer: Tensor, bounds: Sequence[int], number: int) -> None:
        chunks = _chunks(buffer, bounds)
        self._own = chunks[peers.rank]
        others = _others(peers)
        self._parts = buffer.new_empty((len(others), self._own.numel()))  # what arrives, a row for each other rank
        arriving = self._parts.unbind() if self._own.numel() else ()
        self._works = _start(
            peers,
            [(chunks[rank], rank) for rank in others],
            list(zip(arriving, reversed(others), strict=False)),
            tag=_FIRST_TAG + 2 * number + 1,
        )

    @torch.no_grad()
    def wait(self) -> Tensor:
        """This rank's chunk, summed over the ranks: a view of the buffer. Sums of short dtypes are taken in
        float32 and rounded once."""
        wait_for(self._works)
        if self._parts.numel():
            if self._own.dtype in (torch.bfloat16, torch.float16):
                self._own.copy_(self._own.float() + self._parts.sum(0, dtype=torch.float32))
            else:
                parts = self._parts
                while len(parts) > 1:  # the last half is added to the first: in place, and in few operations
                    half = len(parts) // 2
                    parts[:half] += parts[len(parts) - half :]
                    parts = parts[: len(parts) - half]
                self._own += parts[0]
        self._works, self._parts = [], self._parts.new_empty(0)
        return self._own


def _others(peers: Peers) -> list[int]:
    """The other ranks, each rank beginning with its right neighbour, so that not all knock at one door."""
    return [(peers.rank + step) % peers.n for step in range(1, peers.n)]


def _chunks(buffer: Tensor, bounds: Sequence[int]) -> Sequence[Tensor]:
    chunks, at = list[Tensor](), 0
    for size, alike in groupby(stop - start for start, stop in pairwise(bounds)):
        count = len(list(alike))
        chunks += buffer[at : at + count * size].view(count, size).unbind()  # one operation, however many ranks
        at += count * size
    return chunks


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
