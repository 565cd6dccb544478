"""The ranks of other nodes that own the same chunks, where only a part of all ranks splits the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, nn

from dtlib.ranks.dp.base import _broadcast, _refuse_unlike_ranks


def check(replicas: dist.ProcessGroup | None, group: dist.ProcessGroup | None) -> None:
    """``ValueError`` unless `replicas` is None, or holds this rank and no other one of `group`."""
    if replicas is None:
        return
    if dist.get_rank(replicas) < 0:
        raise ValueError(f"replicas must contain this rank ({dist.get_rank()}), and does not")
    both = set(_ranks(replicas)) & set(_ranks(group))
    if both != {dist.get_rank()}:
        others = sorted(both - {dist.get_rank()})
        raise ValueError(f"replicas must share this rank alone with group, and shares {others} too")


def join(replicas: dist.ProcessGroup | None, module: nn.Module) -> int:
    """Give all replicas the weights and buffers of the first; returns how many there are."""
    if replicas is None:
        return 1
    _refuse_unlike_ranks(module, next(module.parameters()).device, replicas)
    share([tensor.detach() for tensor in (*module.parameters(), *module.buffers())], replicas)
    return dist.get_world_size(replicas)


def share(tensors: Sequence[Tensor], replicas: dist.ProcessGroup | None) -> None:
    """Send `tensors` from the first replica to the others."""
    if replicas is not None and tensors:
        _broadcast(tensors, replicas)


def is_first(replicas: dist.ProcessGroup | None) -> bool:
    """Whether this rank is the first of those that own the same chunks."""
    return replicas is None or dist.get_rank(replicas) == 0


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    return dist.get_process_group_ranks(group) if group is not None else list(range(dist.get_world_size()))
