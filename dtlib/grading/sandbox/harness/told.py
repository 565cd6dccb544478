"""What a rank sends by its own account, for machines that grant no private network: there nobody can look at the wire.

Calls on a process group are noted with what they send if each collective meets its lower bound. No call is waited for,
so this tells who sent what in which order, and not when anybody stood waiting.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

_MOST = 4000
# By the name of a call: what a rank sends of what it puts in, so often as a whole (-1: to each other rank) and so often
# in N−1 of N parts, and the methods of a process group that make it in torch 2.11 and 2.13.
_CALLS = {
    "send": (1.0, 0.0, ("send",)),
    "all_reduce": (0.0, 2.0, ("allreduce", "allreduce_coalesced")),
    "broadcast": (0.0, 1.0, ("broadcast",)),
    "reduce": (0.0, 1.0, ("reduce",)),
    "all_gather": (-1.0, 0.0, ("allgather", "allgather_coalesced", "_allgather_base", "all_gather_single")),
    "gather": (0.0, 1.0, ("gather",)),
    "scatter": (0.0, 1.0, ("scatter",)),
    "all_to_all": (0.0, 1.0, ("alltoall", "alltoall_base", "all_to_all_single")),
}


@contextmanager
def telling() -> Iterator[list[list[Any]]]:
    """Note what this process sends in the block: headers as of the wire, ``[kind, rank, peer, op, which, bytes]``."""
    log: list[list[Any]] = []
    inside = threading.local()
    with ExitStack() as patches:
        for op, (whole, shares, names) in _CALLS.items():
            for name in (each for each in names if hasattr(dist.ProcessGroup, each)):
                noted = _noting(getattr(dist.ProcessGroup, name), log, inside, op, whole, shares)
                patches.enter_context(mock.patch.object(dist.ProcessGroup, name, noted))
        yield log


def _noting(
    original: Any, log: list[list[Any]], inside: threading.local, op: str, whole: float, shares: float
) -> Callable[..., Any]:
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(inside, "call", False) and len(log) < _MOST:
            n, rank = dist.get_world_size(), dist.get_rank()
            sizes = [size for size in map(_num_bytes, args[:2]) if size is not None]
            factor = (n - 1 if whole < 0 else whole) + shares * (n - 1) / n
            peer = int(args[1]) if op == "send" and len(args) > 1 else (rank + 1) % n
            log.append(["data", rank, peer, op, len(log), round(factor * min(sizes, default=0))])
        inside.call = True
        try:
            return original(group, *args, **kwargs)
        finally:
            inside.call = False

    return call


def _num_bytes(tree: Any) -> int | None:
    """The bytes of a tensor, or of tensors in lists; None for anything else."""
    if isinstance(tree, torch.Tensor):
        return tree.numel() * tree.element_size()
    sizes = [_num_bytes(each) for each in tree] if isinstance(tree, list | tuple) else []
    return None if not sizes or None in sizes else sum(size for size in sizes if size is not None)
