"""The collectives that run a schedule as it stands: naive, trees, exchanges across powers of two, all-to-all."""

from __future__ import annotations

from typing import Any

import torch

from dtlib.ranks.shared.peers import flat, new_buffer, write_back
from dtlib.theory.collectives import chunk_bounds
from dtlib.theory.valid import rank_of

from . import _check
from ._rounds import run_schedule


@torch.no_grad()
def naive_all_reduce(tensor: torch.Tensor, op: str = "sum", *, group: Any = None) -> torch.Tensor:
    """Reduce `tensor` over the ranks of `group` in place, through rank 0; returns `tensor`.

    Everyone sends everything to rank 0, which adds it up and sends the result back to each: rank 0 sends
    (N−1)·D, in 2(N−1) steps with the full buffer. Raises ``ValueError`` as `ring_all_reduce` does.
    """
    return _all_reduce("naive_all_reduce", tensor, op, group)


@torch.no_grad()
def tree_all_reduce(tensor: torch.Tensor, op: str = "sum", *, group: Any = None) -> torch.Tensor:
    """Reduce `tensor` over the ranks of `group` in place, up and down a binomial tree; returns `tensor`.

    The root sends ⌈log₂ N⌉·D, in 2⌈log₂ N⌉ steps with the full buffer: for small tensors. Raises
    ``ValueError`` as `ring_all_reduce` does.
    """
    return _all_reduce("tree_all_reduce", tensor, op, group)


@torch.no_grad()
def recursive_doubling_all_reduce(tensor: torch.Tensor, op: str = "sum", *, group: Any = None) -> torch.Tensor:
    """Reduce `tensor` over the ranks of `group` in place, by exchanges across 1, 2, 4, … ranks; returns `tensor`.

    Each rank sends log₂(N)·D in log₂ N steps when N is a power of two; ranks beyond one first give all to a
    partner, and get the result from it. All ranks end with the same bits. Raises ``ValueError`` as
    `ring_all_reduce` does.
    """
    return _all_reduce("recursive_doubling_all_reduce", tensor, op, group)


@torch.no_grad()
def halving_doubling_all_reduce(tensor: torch.Tensor, op: str = "sum", *, group: Any = None) -> torch.Tensor:
    """Reduce `tensor` over the ranks of `group` in place, by Rabenseifner's algorithm; returns `tensor`.

    Each rank sends 2(N−1)/N · D in 2 log₂ N steps when N is a power of two; ranks beyond one first give all
    to a partner, and get the result from it. Raises ``ValueError`` as `ring_all_reduce` does.
    """
    return _all_reduce("halving_doubling_all_reduce", tensor, op, group)


@torch.no_grad()
def tree_reduce(tensor: torch.Tensor, op: str = "sum", *, dst: int = 0, group: Any = None) -> torch.Tensor:
    """Reduce `tensor` over the ranks of `group` into rank `dst` of the group, in place; returns `tensor`.

    What the other ranks hold afterwards are partial results. Every rank but `dst` sends D, in ⌈log₂ N⌉ steps.
    Raises ``ValueError`` as `ring_all_reduce` does, and for a `dst` that is not a rank of the group.
    """
    _check.reducible("tensor", tensor, op)
    _check.writable("tensor", tensor)
    peers, buffer = _check.peers_of("tree_reduce", tensor, group, op, dst), flat(tensor)
    dst = rank_of("dst", dst, peers.n)
    run_schedule(peers, "tree_reduce", buffer, op, src=dst)
    if op == "mean" and peers.rank == dst:
        buffer.div_(peers.n)
    return write_back(tensor, buffer)


@torch.no_grad()
def tree_broadcast(tensor: torch.Tensor, *, src: int = 0, group: Any = None) -> torch.Tensor:
    """Overwrite `tensor` on every rank of `group` with that of rank `src` of the group, in place; returns `tensor`.

    A binomial tree: the ranks that have it double in each of ⌈log₂ N⌉ steps; the root sends ⌈log₂ N⌉·D.
    Raises ``ValueError`` before anything is sent for a `src` that is not a rank of the group, a dtype it
    cannot send, an expanded tensor, or a process outside of `group`.
    """
    _check.movable("tensor", tensor)
    _check.writable("tensor", tensor)
    peers, buffer = _check.peers_of("tree_broadcast", tensor, group, src), flat(tensor)
    src = rank_of("src", src, peers.n)
    run_schedule(peers, "tree_broadcast", buffer, src=src)
    return write_back(tensor, buffer)


@torch.no_grad()
def pairwise_all_to_all(tensor: torch.Tensor, *, group: Any = None) -> torch.Tensor:
    """Chunk j of each rank's `tensor` goes to rank j of `group`: a transpose of ranks and chunks, as a new tensor.

    `tensor` stays as it is; all ranks must pass the same number of elements. Its elements in row-major order
    are cut as `theory.collectives.chunk_bounds` cuts. The result joins the chunks that came to this rank, in
    the order of their senders: flat, or of `tensor`'s shape (A, ...) where N divides A, as in torch. Sends
    all but the own chunk, (N−1)/N · D for equal chunks, in N−1 steps. Raises ``ValueError`` before anything
    is sent for a dtype it cannot send, or a process outside of `group`.
    """
    _check.movable("tensor", tensor)
    peers, buffer = _check.peers_of("pairwise_all_to_all", tensor, group), flat(tensor)
    bounds = chunk_bounds(buffer.numel(), peers.n)
    own = buffer[bounds[peers.rank] : bounds[peers.rank + 1]]
    second = new_buffer(buffer, peers.n * own.numel())
    second[peers.rank * own.numel() : (peers.rank + 1) * own.numel()] = own
    run_schedule(peers, "pairwise_all_to_all", buffer, second=second)
    if tensor.dim() > 1 and tensor.shape[0] % peers.n == 0:
        return second.view(tensor.shape)
    return second


def _all_reduce(algorithm: str, tensor: torch.Tensor, op: str, group: Any) -> torch.Tensor:
    _check.reducible("tensor", tensor, op)
    _check.writable("tensor", tensor)
    peers, buffer = _check.peers_of(algorithm, tensor, group, op), flat(tensor)
    run_schedule(peers, algorithm, buffer, op)
    if op == "mean":
        buffer.div_(peers.n)
    return write_back(tensor, buffer)
