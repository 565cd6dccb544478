"""Send and receive between the ranks of one group, and the few things every algorithm does with them."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

ADDED_BYTES = 1024 * 1024
MOVED_BYTES = 4 * 1024 * 1024
"""Long messages travel in pieces of these sizes: the first on a way where they are added up, the second elsewhere.

While one piece is being added, the next is on its way. Smaller pieces overlap better and stay in the cache,
but each costs a handshake and two changes of thread, about 60 µs of processor time over TCP. Where nothing is
added there is less to overlap.
"""

SCRATCH_BYTES = 2 * 1024 * 1024
"""Receives of pieces to be added are posted ahead as far as this much scratch memory goes, two at least.

A receive that is posted early lets its sender start at once, and keeps this thread and the library's own from
waiting for each other in the middle. More scratch memory than a core's cache holds is read from outside of it.
"""

HUGE_PAGE_BYTES = 2 * 1024 * 1024
KEPT_BYTES = 32 * 1024 * 1024
"""A new result asks for huge pages from the first size on, scratch memory from the second."""


class Peers:
    """The other ranks of `group`, addressed by their rank in it.

    `rank` and `n` are this process's place in it and its size. `pipelined` says that long messages travel in
    pieces with receives posted ahead, which the CPU's libraries are fast at; on an accelerator a step is one
    batch. Raises ``ValueError`` when the process is not in the group, or no group has been initialised.
    """

    def __init__(self, device: torch.device, group: Any = None) -> None:
        self.pipelined = device.type == "cpu"
        self.group = group
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ValueError(f"group must contain the calling process, global rank {dist.get_rank()}; it does not")
        self.global_ranks = dist.get_process_group_ranks(group)
        self.n = len(self.global_ranks)

    def send(self, tensor: torch.Tensor, to: int) -> Any:
        """Start sending a contiguous tensor; the result has ``wait()``."""
        return dist.isend(tensor, self.global_ranks[to], group=self.group)

    def receive(self, tensor: torch.Tensor, source: int) -> Any:
        """Start receiving into a contiguous tensor; the result has ``wait()``."""
        return dist.irecv(tensor, self.global_ranks[source], group=self.group)

    def exchange(self, outgoing: torch.Tensor, to: int, incoming: torch.Tensor, source: int) -> list[Any]:
        """Start a receive and a send as one batch, so that they run side by side on every backend.

        An empty tensor is neither sent nor received.
        """
        pairs = [(dist.irecv, incoming, source), (dist.isend, outgoing, to)]
        batch = [
            dist.P2POp(call, tensor, self.global_ranks[peer], self.group)
            for call, tensor, peer in pairs
            if tensor.numel()
        ]
        return list(dist.batch_isend_irecv(batch)) if batch else []


def wait_for(requests: Iterable[Any]) -> None:
    """Wait until every started send or receive is done."""
    for request in requests:
        request.wait()


def segments(start: int, stop: int, itemsize: int, *, added: bool) -> list[tuple[int, int]]:
    """Cut ``[start, stop)`` into pieces that are `added` up on their way, or only moved: none when it is empty.

    Sender and receiver cut the same range, so they agree without talking.
    """
    step = max(1, (ADDED_BYTES if added else MOVED_BYTES) // itemsize)
    return [(at, min(at + step, stop)) for at in range(start, stop, step)]


def pieces_ahead(pieces: list[tuple[int, int]], itemsize: int) -> int:
    """How many receives of `pieces` to be added are posted before the first is waited for."""
    longest = max((stop - start for start, stop in pieces), default=0)
    return min(len(pieces), max(2, SCRATCH_BYTES // max(1, longest * itemsize)))


def new_buffer(like: torch.Tensor, num_elements: int) -> torch.Tensor:
    """An uninitialised flat tensor of `like`'s dtype and device, for a result.

    Memory that is new to the process costs a page fault for every 4 KiB when it is first written: 30 ms for
    64 MiB on a small virtual machine, as much as sending them. Huge pages of 2 MiB make that 3 ms where the
    system grants them.
    """
    num_bytes = num_elements * like.element_size()
    if like.device.type != "cpu" or num_bytes < HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return like.new_empty(num_elements)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=like.dtype)


def new_scratch(like: torch.Tensor, num_elements: int) -> torch.Tensor:
    """An uninitialised flat tensor of `like`'s dtype and device, to be thrown away soon.

    The C library hands the same memory out again and again, except for sizes that it maps anew each time.
    """
    if num_elements * like.element_size() < KEPT_BYTES:
        return like.new_empty(num_elements)
    return new_buffer(like, num_elements)


def combine(here: torch.Tensor, arrived: torch.Tensor, op: str, out: torch.Tensor) -> None:
    """Write the sum (for a mean too: it is divided once, at the end) or the maximum of two tensors to `out`."""
    if op == "max":
        torch.maximum(here, arrived, out=out)
    else:
        torch.add(here, arrived, out=out)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in row-major order as a 1-D tensor that shares `tensor`'s memory if it can, or is a copy."""
    return tensor.detach().contiguous().view(-1)


def write_back(tensor: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Put a flat `result` into `tensor`, unless it is the same memory; returns `tensor`."""
    if tensor.data_ptr() != result.data_ptr() or not tensor.is_contiguous():
        tensor.detach().copy_(result.view(tensor.shape))
    return tensor
