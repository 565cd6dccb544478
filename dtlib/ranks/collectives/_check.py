"""What the collectives accept. Everything is refused here, before a byte is sent."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from dtlib.ranks.shared.peers import Peers

OPS = ("sum", "mean", "max")

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def movable(name: str, tensor: Any) -> None:
    """``ValueError`` unless `tensor` is a dense tensor of numbers (or of booleans) that can be sent."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, not {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ValueError(f"{name} must be a dense tensor, not one of layout {tensor.layout}")
    if tensor.dtype not in DTYPES and tensor.dtype != torch.bool:
        raise ValueError(f"{name} must be of dtype {_words(DTYPES)}, not {tensor.dtype}")


def writable(name: str, tensor: Any) -> None:
    """`movable`, and each element has memory of its own to be overwritten."""
    movable(name, tensor)
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise ValueError(f"{name} must not share memory between its elements (an expanded tensor does); clone it")


def receiving(name: str, tensor: Any, like: torch.Tensor, num_elements: int) -> None:
    """`writable`, contiguous, and of the length and `like`'s dtype and device that a result needs."""
    writable(name, tensor)
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, not of strides {tensor.stride()}")
    if (tensor.dtype, tensor.device) != (like.dtype, like.device) or tensor.numel() != num_elements:
        raise ValueError(
            f"{name} must have {num_elements} elements of {like.dtype} on {like.device}, "
            f"not {tensor.numel()} of {tensor.dtype} on {tensor.device}"
        )


def reducible(name: str, tensor: Any, op: Any) -> None:
    """`movable`, and `op` can be computed in its dtype."""
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, not {op!r}")
    movable(name, tensor)
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{name} must be of dtype {_words(DTYPES)}, not {tensor.dtype}")
    if op == "mean" and tensor.dtype not in FLOATS:
        raise ValueError(f"op must be sum or max for {tensor.dtype}: a mean of whole numbers is not whole")


def peers_of(call: str, tensor: torch.Tensor, group: Any, *options: Any, size: int | None = None) -> Peers:
    """The ranks of `group`; ``ValueError`` for a process outside of it.

    To compare what all ranks pass takes a round of its own, which would be measured with the others: so it is done
    where torch's debug level is DETAIL. ``ValueError`` then on every rank that is unlike the group's rank 0, and there.
    """
    peers = Peers(tensor.device, group)
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:
        what = f"{tuple(tensor.shape)}" if size is None else f"a part of {size} elements"
        mine = f"{call} of {what}, {', '.join(map(str, (tensor.dtype, *options)))}"
        everyone: list[Any] = [None] * peers.n
        dist.all_gather_object(everyone, mine, group=group)
        for rank, theirs in enumerate(everyone):
            if theirs != everyone[0]:
                raise ValueError(f"all ranks must ask for the same; rank {rank} asks for {theirs}, 0 for {everyone[0]}")
    return peers


def _words(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
