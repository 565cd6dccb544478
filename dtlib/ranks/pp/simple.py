"""A pipeline in few lines: one loop that carries out a rank's forward and backward passes, whatever their order.

Shapes: b sequences in a micro-batch, s positions, h hidden. Source: Huang et al. 2019, arXiv 1811.06965.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dtlib.theory.pp import Action


def simple_pipeline(
    actions: Iterable[Action], stage: Callable[[Tensor], Tensor], inputs: Sequence[Tensor],
    losses: Sequence[Callable[[Tensor], Tensor]], shape: Sequence[int], dtype: torch.dtype = torch.float32,
) -> None:  # fmt: skip
    """Carry out the F and B of `actions` on this rank, one stage a rank; gradients are in ``.grad`` afterwards.

    Rank 0 takes micro-batch i from `inputs`; the last rank puts what `stage` gives through ``losses[i]``, its share of
    the loss. Between two ranks travel tensors of `shape` and `dtype`, with a tag that says of which micro-batch.
    """
    n, rank, held, sent = dist.get_world_size(), dist.get_rank(), {}, []

    def from_rank(other: int, i: int) -> Tensor:
        arriving = torch.empty(*shape, dtype=dtype)
        dist.recv(arriving, other, tag=i)
        return arriving

    for kind, _, i, _ in actions:
        if kind == "F":
            x = from_rank(rank - 1, i).requires_grad_() if rank else inputs[i]
            y = stage(x) if rank < n - 1 else losses[i](stage(x))
            held[i] = x, y
            if rank < n - 1:
                sent.append(dist.isend(y.detach(), rank + 1, tag=i))
        else:
            x, y = held.pop(i)
            y.backward(from_rank(rank + 1, i) if rank < n - 1 else None)
            if rank:
                sent.append(dist.isend(x.grad, rank - 1, tag=i))
    for message in sent:
        message.wait()
