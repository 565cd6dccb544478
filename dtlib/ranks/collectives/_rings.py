"""Ring reduce-scatter and all-gather among some of a group's ranks, on flat buffers.

Both are walks along one ring: in step s of the 2(n − 1) of an all-reduce chunk here − 2 − s arrives from the left, and
goes on to the right in the next. In the first half, the reduce-scatter, it is added to what is here. In the second, the
all-gather, it is whole and goes to its place, where this rank's part is needed no more: it has reached the right
neighbour, or the sum would not be whole.

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
    _walk(peers, members, buffer, op, range(2 * len(members) - 2))


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
    _walk(peers, members, buffer, op, range(n - 1), out)
    if out is None:
        return buffer.tensor_split(n)[here]
    return out.copy_(buffer) if n == 1 else out


def all_gather_among(peers: Peers, members: Sequence[int], buffer: torch.Tensor) -> None:
    """Ring all-gather in a flat `buffer` in place among `members`: each fills in its own chunk and gets the others'."""
    _walk(peers, members, buffer, "sum", range(len(members) - 1, 2 * len(members) - 2))


def _walk(
    peers: Peers, members: Sequence[int], buffer: torch.Tensor, op: str, steps: range, out: torch.Tensor | None = None
) -> None:
    if steps:
        (_in_pieces if peers.pipelined else _in_batches)(peers, members, buffer, op, steps, out)


def _in_pieces(
    peers: Peers, members: Sequence[int], buffer: torch.Tensor, op: str, steps: range, out: torch.Tensor | None
) -> None:
    n, here = len(members), members.index(peers.rank)
    left, right = members[here - 1], members[(here + 1) % n]
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
        arrived = landings[index]
        if index < len(to_add):
            is_whole = index >= first_whole
            place = None if out is None else out[start - bounds[here] : stop - bounds[here]] if is_whole else arrived
            arrived = _add(buffer[start:stop], arrived, op, place, n if is_whole else 1)
        if index < first_kept:
            outgoing.append(arrived)
        receive_next()
        if index + lead < len(outgoing):
            sends.append(peers.send(outgoing[index + lead], right))
    wait_for(each for each in sends if each)


def _in_batches(
    peers: Peers, members: Sequence[int], buffer: torch.Tensor, op: str, steps: range, out: torch.Tensor | None
) -> None:
    n, here = len(members), members.index(peers.rank)
    chunks = buffer.tensor_split(n)
    leaving = chunks[(here - 1 - steps[0]) % n]
    for step in steps:
        mine, is_whole = chunks[(here - 2 - step) % n], step == n - 2
        arrived = torch.empty_like(mine) if step < n - 1 else mine
        wait_for(peers.exchange(leaving, members[(here + 1) % n], arrived, members[here - 1]))
        place = None if out is None else out if is_whole else arrived
        leaving = _add(mine, arrived, op, place, n if is_whole else 1) if step < n - 1 else arrived


def _add(mine: torch.Tensor, arrived: torch.Tensor, op: str, place: torch.Tensor | None, n: int) -> torch.Tensor:
    """The sum of both, where `mine` is or in its `place`; of a mean, whole when `n` have been added, the n-th part."""
    total = mine if place is None else place
    combine(mine, arrived, op, out=total)
    return total.div_(n) if op == "mean" and n > 1 else total
