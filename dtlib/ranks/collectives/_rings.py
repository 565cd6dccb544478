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

_LEAD = 2  # one at least


def all_reduce_among(peers: Peers, members: Sequence[int], buffer: torch.Tensor, op: str) -> None:
    """Ring all-reduce of a flat `buffer` in place among `members`, ranks of the group in ring order."""
    n = len(members)
    if n > 1 and peers.pipelined:
        _in_pieces(peers, members, buffer, op, range(2 * (n - 1)))
    else:
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
    result = buffer[bounds[here] : bounds[here + 1]] if out is None else out
    if n == 1:
        return result if out is None else result.copy_(buffer)
    if peers.pipelined:
        _in_pieces(peers, members, buffer, op, range(n - 1), out)
    else:
        _scatter_in_batches(peers, members, buffer, op, out)
        if op == "mean":
            result.div_(n)
    return result


def all_gather_among(peers: Peers, members: Sequence[int], buffer: torch.Tensor) -> None:
    """Ring all-gather in a flat `buffer` in place among `members`: each fills in its own chunk and gets the others'."""
    n = len(members)
    if n > 1 and peers.pipelined:
        _in_pieces(peers, members, buffer, "sum", range(n - 1, 2 * (n - 1)))
    elif n > 1:
        _gather_in_batches(peers, members, buffer)


def _neighbours(peers: Peers, members: Sequence[int]) -> tuple[int, int, int, int]:
    n, here = len(members), members.index(peers.rank)
    return n, here, members[(here - 1) % n], members[(here + 1) % n]


def _in_pieces(
    peers: Peers, members: Sequence[int], buffer: torch.Tensor, op: str, steps: range, out: torch.Tensor | None = None
) -> None:
    """Those `steps` of the 2(n − 1) of an all-reduce: the first half is its reduce-scatter, the second its all-gather.

    In step s chunk here − 2 − s arrives, and is passed on in the next. In the first half it is added to what is here.
    The sum grows in `buffer`; where there is an `out` in the scratch buffer that the chunk came in, and the whole one
    there. In the second half what arrives is final and goes to its place, where this rank's part is needed no more: it
    has reached the right neighbour, or the sum would not be whole.
    """
    n, here, left, right = _neighbours(peers, members)
    bounds = chunk_bounds(buffer.numel(), n)

    def pieces(step: int) -> list[tuple[int, int]]:
        chunk = (here - 2 - step) % n
        return segments(bounds[chunk], bounds[chunk + 1], buffer.element_size(), added=steps[0] < n - 1)

    incoming = [piece for step in steps for piece in pieces(step)]
    to_add = incoming[: sum(len(pieces(step)) for step in steps if step < n - 1)]
    first_whole, first_kept = len(to_add) - len(pieces(n - 2)), len(incoming) - len(pieces(steps[-1]))
    outgoing = [buffer[start:stop] for start, stop in pieces(steps[0] - 1)]
    own = len(outgoing)
    longest = max((stop - start for start, stop in to_add), default=0)
    ahead = pieces_ahead(to_add, buffer.element_size()) if to_add else len(incoming)
    # Piece p leaves when p − lead have arrived. A send that is started when its receive stands is this thread's work,
    # beside the library's own, which takes in what arrives; one that is started before is left to that thread as well.
    lead = min(_LEAD, own) if to_add else own
    # Where sums grow in scratch buffers, one is free for a new receive once its send, started before, is done. The
    # right neighbour needs a chunk's pieces from here before it comes to that one, so with a chunk's worth of
    # buffers beyond those posted ahead nobody waits in a circle.
    from_scratch = out is not None and n > 2
    longest_chunk = len(pieces(here - 2))  # chunk 0
    num_buffers = min(len(to_add), ahead + (longest_chunk if from_scratch else 0))
    scratch = new_scratch(buffer, num_buffers * longest).view(num_buffers, longest)
    landings, receives, sends = list[torch.Tensor](), list[Any](), list[Any]()

    def receive_next() -> None:
        if (index := len(receives)) < len(incoming):
            if from_scratch and index >= num_buffers:
                sends[own + index - num_buffers].wait()
                sends[own + index - num_buffers] = None  # gloo waits for ever where it is asked twice
            start, stop = incoming[index]
            added = index < len(to_add)
            landings.append(scratch[index % num_buffers, : stop - start] if added else buffer[start:stop])
            receives.append(peers.receive(landings[index], left))

    for _ in range(ahead):
        receive_next()
    sends += [peers.send(piece, right) for piece in outgoing[:lead]]
    for index, (start, stop) in enumerate(incoming):
        receives[index].wait()
        total = landings[index]
        if index < len(to_add):
            is_whole = index >= first_whole
            if out is None:
                total = buffer[start:stop]
            elif is_whole:
                total = out[start - bounds[here] : stop - bounds[here]]
            combine(buffer[start:stop], landings[index], op, out=total)
            if is_whole and op == "mean":
                total.div_(n)
        if index < first_kept:
            outgoing.append(total)
        receive_next()
        if index + lead < len(outgoing):
            sends.append(peers.send(outgoing[index + lead], right))
    wait_for(each for each in sends if each)


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
