"""Ring reduce-scatter and all-gather among some of a group's ranks, on flat buffers.

On the CPU a chunk travels in pieces: while one is being added, the next is on its way. Receives are posted before
the first sends are started: where both neighbours are the same rank, one connection carries both ways, and word that a
receive is ready would wait behind the data, which on a slow link takes as long as the data. On an accelerator each step
is one batch of a send and a receive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dtlib.ranks.shared.peers import Peers, combine, new_scratch, pieces_ahead, segments, wait_for
from dtlib.theory.collectives import chunk_bounds


def all_reduce_among(peers: Peers, members: Sequence[int], buffer: torch.Tensor, op: str) -> None:
    """Ring all-reduce of a flat `buffer` in place among `members`, ranks of the group in ring order."""
    reduce_scatter_among(peers, members, buffer, op)
    all_gather_among(peers, members, buffer)


def reduce_scatter_among(
    peers: Peers, members: Sequence[int], buffer: torch.Tensor, op: str, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Ring reduce-scatter of a flat `buffer` among `members`; returns this rank's chunk of the result.

    With `out` that is where the result goes, and `buffer` is only read: each partial sum grows in the scratch
    buffer that it arrived in. Without, partial sums grow in `buffer`, whose own chunk is the result: fewer
    scratch buffers are needed and stay in the cache, so it is the faster way where `buffer` is to be
    overwritten anyway.
    """
    n, here = len(members), members.index(peers.rank)
    bounds = chunk_bounds(buffer.numel(), n)
    own = buffer[bounds[here] : bounds[here + 1]]
    if n == 1:
        result = own if out is None else out.copy_(own)
    else:
        scatter = _scatter_in_segments if peers.pipelined else _scatter_in_batches
        scatter(peers, members, buffer, op, out)
        result = own if out is None else out
    return result.div_(n) if op == "mean" else result


def all_gather_among(peers: Peers, members: Sequence[int], buffer: torch.Tensor) -> None:
    """Ring all-gather in a flat `buffer` in place among `members`: each fills in its own chunk and gets the others'."""
    if len(members) > 1:
        gather = _gather_in_segments if peers.pipelined else _gather_in_batches
        gather(peers, members, buffer)


def _neighbours(peers: Peers, members: Sequence[int]) -> tuple[int, int, int, int]:
    n, here = len(members), members.index(peers.rank)
    return n, here, members[(here - 1) % n], members[(here + 1) % n]


def _scatter_in_segments(
    peers: Peers, members: Sequence[int], buffer: torch.Tensor, op: str, out: torch.Tensor | None
) -> None:
    n, here, left, right = _neighbours(peers, members)
    bounds = chunk_bounds(buffer.numel(), n)

    def pieces(chunk: int) -> list[tuple[int, int]]:
        return segments(bounds[chunk % n], bounds[chunk % n + 1], buffer.element_size(), added=True)

    incoming = [piece for step in range(n - 1) for piece in pieces(here - 2 - step)]
    first_own = len(incoming) - len(pieces(here))
    # Where sums grow in scratch buffers, one is free for a new receive once its send is done. The right
    # neighbour needs a chunk's pieces from here before it comes to that one, so with a chunk's worth of
    # buffers beyond those posted ahead nobody waits in a circle.
    from_scratch = out is not None and n > 2
    longest = max((stop - start for start, stop in incoming), default=0)
    ahead = pieces_ahead(incoming, buffer.element_size())
    num_buffers = min(len(incoming), ahead + (len(pieces(0)) if from_scratch else 0))
    scratch = new_scratch(buffer, num_buffers * longest).view(num_buffers, longest)
    sends: dict[int, Any] = {}
    receives: dict[int, Any] = {}

    def post(index: int) -> None:
        if index < len(incoming):
            if from_scratch and index - num_buffers in sends:
                sends.pop(index - num_buffers).wait()
            start, stop = incoming[index]
            receives[index] = peers.receive(scratch[index % num_buffers, : stop - start], left)

    for index in range(ahead):
        post(index)
    started = [peers.send(buffer[start:stop], right) for start, stop in pieces(here - 1)]
    for index, (start, stop) in enumerate(incoming):
        receives.pop(index).wait()
        mine, partial = buffer[start:stop], scratch[index % num_buffers, : stop - start]
        if index < first_own:
            total = mine if out is None else partial
            combine(mine, partial, op, out=total)
            sends[index] = peers.send(total, right)
        else:
            combine(mine, partial, op, out=mine if out is None else out[start - bounds[here] : stop - bounds[here]])
        post(index + ahead)
    wait_for([*started, *sends.values()])


def _gather_in_segments(peers: Peers, members: Sequence[int], buffer: torch.Tensor) -> None:
    n, here, left, right = _neighbours(peers, members)
    bounds = chunk_bounds(buffer.numel(), n)

    def pieces(chunk: int) -> list[tuple[int, int]]:
        return segments(bounds[chunk % n], bounds[chunk % n + 1], buffer.element_size(), added=False)

    incoming = [piece for step in range(n - 1) for piece in pieces(here - 1 - step)]
    not_passed_on = len(pieces(here + 1))  # the right neighbour's own chunk ends its way here
    receives = [peers.receive(buffer[start:stop], left) for start, stop in incoming]
    sends = [peers.send(buffer[start:stop], right) for start, stop in pieces(here)]
    for index, (start, stop) in enumerate(incoming):
        receives[index].wait()
        if index < len(incoming) - not_passed_on:
            sends.append(peers.send(buffer[start:stop], right))
    wait_for(sends)


def _scatter_in_batches(
    peers: Peers, members: Sequence[int], buffer: torch.Tensor, op: str, out: torch.Tensor | None
) -> None:
    n, here, left, right = _neighbours(peers, members)
    chunks = buffer.tensor_split(n)
    leaving = chunks[here - 1]
    for step in range(n - 1):
        mine = chunks[(here - 2 - step) % n]
        partial = torch.empty_like(mine)
        wait_for(peers.exchange(leaving, right, partial, left))
        leaving = mine if out is None else out if step == n - 2 else partial
        combine(mine, partial, op, out=leaving)


def _gather_in_batches(peers: Peers, members: Sequence[int], buffer: torch.Tensor) -> None:
    n, here, left, right = _neighbours(peers, members)
    chunks = buffer.tensor_split(n)
    for step in range(n - 1):
        leaving, arriving = chunks[(here - step) % n], chunks[(here - 1 - step) % n]
        wait_for(peers.exchange(leaving, right, arriving, left))
