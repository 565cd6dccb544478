"""Reduce-scatter and all-gather that run while this thread computes: every rank talks to every other at once.

A ring hands partial sums on from rank to rank, so somebody has to wait for each of its N−1 steps. Here each rank sends
each other rank that one's chunk and is done: all messages are under way when the call returns, and the library's own
threads carry them. The bytes are those of the ring, (N−1)/N · D for each rank. The owner of a chunk has all
contributions in hand and adds them up in one precision; the price is room for them, (N−1)/N · D beside the buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtlib.ranks.shared.peers import Peers

_FIRST_TAG = 1 << 20
"""Messages carry tags from here on, so that they never meet those of another algorithm on the same group."""


def start_gather(peers: Peers, full: Tensor, bounds: Sequence[int], number: int) -> list[Any]:
    """Start to fill `full`, flat and cut at `bounds`, with the other ranks' chunks; this rank's must be in its place.
    Returns what to wait for. `number` tells exchanges apart that are under way together."""
    chunks = _chunks(full, bounds)
    outgoing = [(chunks[peers.rank], rank) for rank in _others(peers)]
    incoming = [(chunks[rank], rank) for rank in reversed(_others(peers))]
    return _start(peers, outgoing, incoming, _FIRST_TAG + 2 * number)


def start_scatter(peers: Peers, buffer: Tensor, bounds: Sequence[int], number: int) -> tuple[list[Any], Tensor]:
    """Start to send each rank its chunk of `buffer`: what to wait for, and where this rank's arrives, a row from each
    other rank. `buffer` is read until all of it has been waited for."""
    chunks = _chunks(buffer, bounds)
    room = buffer.new_empty((peers.n - 1, chunks[peers.rank].numel()))
    outgoing = [(chunks[rank], rank) for rank in _others(peers)]
    incoming = list(zip(room.unbind(), reversed(_others(peers)), strict=True)) if room.numel() else []
    return _start(peers, outgoing, incoming, _FIRST_TAG + 2 * number + 1), room


def add_up(own: Tensor, room: Tensor) -> None:
    """Add the rows of `room` to `own`. Sums of short dtypes are taken in float32 and rounded once."""
    if not room.numel():
        return
    if own.dtype in (torch.bfloat16, torch.float16):
        own.copy_(own.float() + room.sum(0, dtype=torch.float32))
        return
    while len(room) > 1:  # the last half is added to the first: in place, and in few operations
        half = len(room) // 2
        room[:half] += room[len(room) - half :]
        room = room[: len(room) - half]
    own += room[0]


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
