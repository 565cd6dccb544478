"""Rings: each rank hears from the left and speaks to the right, and every link carries the same."""

from __future__ import annotations

from typing import Any

import torch

from dtlib.ranks.shared.peers import combine, flat, new_buffer, wait_for, write_back
from dtlib.theory.collectives import chunk_bounds
from dtlib.theory.valid import node_size

from . import _check
from ._rings import all_gather_among, all_reduce_among, reduce_scatter_among


@torch.no_grad()
def ring_all_reduce(tensor: torch.Tensor, op: str = "sum", *, group: Any = None) -> torch.Tensor:
    """Reduce `tensor` over the ranks of `group` in place, by a ring; returns `tensor`.

    A reduce-scatter leaves each rank with one finished chunk, an all-gather hands the chunks out. All ranks
    end with the same bits. `op` is sum, mean or max (no mean of integers). Sends `traffic("ring_all_reduce",
    ...)` bytes, 2(N−1)/N · D for equal chunks, in 2(N−1) steps. Raises ``ValueError`` before anything is sent
    for an unknown `op`, a dtype it cannot add, an expanded tensor, or a process outside of `group`.
    """
    _check.reducible("tensor", tensor, op)
    _check.writable("tensor", tensor)
    peers, buffer = _check.peers_of("ring_all_reduce", tensor, group, op), flat(tensor)
    all_reduce_among(peers, range(peers.n), buffer, op)
    return write_back(tensor, buffer)


@torch.no_grad()
def ring_reduce_scatter(
    tensor: torch.Tensor, op: str = "sum", *, out: torch.Tensor | None = None, group: Any = None
) -> torch.Tensor:
    """Reduce `tensor` over the ranks of `group`, and return this rank's chunk of the result: `out`, or a new tensor.

    `tensor` stays as it is. Its elements in row-major order are cut as `theory.collectives.chunk_bounds`
    cuts; rank r gets chunk r, flat, or of shape (A/N, ...) where `tensor` has shape (A, ...) and N divides A,
    as in torch. Sends `traffic("ring_reduce_scatter", ...)` bytes, (N−1)/N · D for equal chunks, in N−1
    steps. Raises ``ValueError`` before anything is sent for an unknown `op`, a dtype it cannot add, an `out`
    that is not contiguous or not of the chunk's dtype and length, or a process outside of `group`.
    """
    _check.reducible("tensor", tensor, op)
    peers, buffer = _check.peers_of("ring_reduce_scatter", tensor, group, op), flat(tensor)
    bounds = chunk_bounds(buffer.numel(), peers.n)
    own = bounds[peers.rank + 1] - bounds[peers.rank]
    if out is not None:
        _check.receiving("out", out, tensor, own)
    chunk = new_buffer(buffer, own) if out is None else flat(out)
    reduce_scatter_among(peers, range(peers.n), buffer, op, chunk)
    if out is not None:
        return out
    if tensor.dim() > 1 and tensor.shape[0] % peers.n == 0:
        return chunk.view(tensor.shape[0] // peers.n, *tensor.shape[1:])
    return chunk


@torch.no_grad()
def ring_all_gather(
    chunk: torch.Tensor,
    *,
    num_elements: int | None = None,
    out: torch.Tensor | None = None,
    group: Any = None,
) -> torch.Tensor:
    """The chunks of all ranks of `group`, joined in rank order, on every rank: in `out`, or in a new tensor.

    Without `num_elements` every rank must pass a chunk of one shape (a, ...), and the result has shape (N·a,
    ...). With it, the result is flat and has that many elements, cut as `theory.collectives.chunk_bounds`
    cuts: rank r passes chunk r. Sends `traffic("ring_all_gather", ...)` bytes, (N−1)/N · D for the gathered
    D, in N−1 steps. Raises ``ValueError`` before anything is sent for a chunk of the wrong length, a dtype it
    cannot send, an `out` that is not contiguous or not of the result's dtype and length, or a process outside
    of `group`.
    """
    _check.movable("chunk", chunk)
    peers = _check.peers_of("ring_all_gather", chunk, group, size=num_elements)
    total = chunk.numel() * peers.n if num_elements is None else num_elements
    bounds = chunk_bounds(total, peers.n)
    start, stop = bounds[peers.rank], bounds[peers.rank + 1]
    if chunk.numel() != stop - start:
        raise ValueError(
            f"chunk must have {stop - start} elements, rank {peers.rank}'s share of num_elements={num_elements} "
            f"over {peers.n} ranks, not {chunk.numel()}"
        )
    if out is not None:
        _check.receiving("out", out, chunk, total)
    full = new_buffer(chunk, total) if out is None else flat(out)
    full[start:stop] = flat(chunk)
    all_gather_among(peers, range(peers.n), full)
    if out is not None:
        return out
    if num_elements is None and chunk.dim():
        return full.view(peers.n * chunk.shape[0], *chunk.shape[1:])
    return full


@torch.no_grad()
def two_level_all_reduce(
    tensor: torch.Tensor, op: str = "sum", *, ranks_per_node: int, group: Any = None
) -> torch.Tensor:
    """Reduce `tensor` over the ranks of `group` in place, sparing the links between nodes; returns `tensor`.

    Ranks 0 to g−1 of the group are the first node of g = `ranks_per_node`, and so on. Reduce-scatter inside
    the node, all-reduce of the own chunk with the ranks of the same place in the other nodes, all-gather
    inside the node. Sends as much as one ring, of which only 2(m−1)/m · D/g crosses to another of the m
    nodes, in 2(g−1) + 2(m−1) steps. Raises ``ValueError`` before anything is sent where `ring_all_reduce`
    does, or unless `ranks_per_node` divides the number of ranks.
    """
    _check.reducible("tensor", tensor, op)
    _check.writable("tensor", tensor)
    peers = _check.peers_of("two_level_all_reduce", tensor, group, op, ranks_per_node)
    ranks_per_node = node_size(peers.n, ranks_per_node)
    buffer = flat(tensor)
    node, place = divmod(peers.rank, ranks_per_node)
    inside = range(node * ranks_per_node, (node + 1) * ranks_per_node)
    across = range(place, peers.n, ranks_per_node)
    bounds = chunk_bounds(buffer.numel(), ranks_per_node)
    own = buffer[bounds[place] : bounds[place + 1]]
    reduce_scatter_among(peers, inside, buffer, "max" if op == "max" else "sum")
    all_reduce_among(peers, across, own, "max" if op == "max" else "sum")
    if op == "mean":
        own.div_(peers.n)
    all_gather_among(peers, inside, buffer)
    return write_back(tensor, buffer)


@torch.no_grad()
def parallel_rings_all_reduce(
    tensor: torch.Tensor, op: str = "sum", *, ranks_per_node: int, group: Any = None
) -> torch.Tensor:
    """Reduce `tensor` over the ranks of `group` in place, by every rank's port to other nodes; returns `tensor`.

    One ring leaves a node by one rank alone. Here are g = `ranks_per_node` rings with a g-th of the tensor each: ring k
    visits the ranks of each node from place k on, so each leaves by another rank. Ranks 0 to g−1 of the group are the
    first node, and so on. Sends as much as one ring, of which a g-th crosses to another node, in as many steps. Raises
    ``ValueError`` as `two_level_all_reduce` does.
    """
    _check.reducible("tensor", tensor, op)
    _check.writable("tensor", tensor)
    peers = _check.peers_of("parallel_rings_all_reduce", tensor, group, op, ranks_per_node)
    n, g = peers.n, node_size(peers.n, ranks_per_node)
    buffer = flat(tensor)
    rings = [[node * g + (k + i) % g for node in range(n // g) for i in range(g)] for k in range(g)]
    chunks = [part.tensor_split(n) for part in buffer.tensor_split(g)]
    for gathers in (False, True):
        for step in range(n - 1):
            arriving, receives, sends = [], [], []
            for ring, parts in zip(rings, chunks, strict=True):
                here = ring.index(peers.rank)
                mine = parts[(here - 2 + gathers - step) % n]
                arriving.append((mine, mine if gathers else torch.empty_like(mine)))
                receives.append((arriving[-1][1], ring[here - 1]))
                sends.append((parts[(here - 1 + gathers - step) % n], ring[(here + 1) % n]))
            posted = [peers.receive(*each) for each in receives if each[0].numel()]
            wait_for([*posted, *(peers.send(*each) for each in sends if each[0].numel())])
            for mine, partial in arriving if not gathers else ():
                combine(mine, partial, op, out=mine)
    if op == "mean":
        buffer.div_(n)
    return write_back(tensor, buffer)
