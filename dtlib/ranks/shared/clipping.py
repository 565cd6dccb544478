"""The norm of a gradient whose elements lie on different ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


@torch.no_grad()
def clip_grad_norm(
    chunks: Sequence[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    everywhere: Sequence[Tensor] = (),
    copies: Sequence[Tensor] = (),
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Scale the gradients in place so that their norm over the ranks of `group` is at most `max_norm`; returns it.

    (Σ |g|^p)^(1/p), the maximum for p = ∞, over each element once: `chunks` lie on this rank alone, `everywhere` is on
    all ranks alike, and `copies` are among the chunks of another rank. One all-reduce of 8 bytes, on `device` where a
    rank has no gradient. float64, 0-dimensional, on all ranks the same. ``ValueError`` for a negative `max_norm`, a
    `norm_type` that is not above 0 or a `group` without this rank, ``RuntimeError`` for a norm that is not finite if
    `error_if_nonfinite`.
    """
    if dist.get_rank(group) < 0:
        raise ValueError(f"group must contain this rank ({dist.get_rank()}), and does not")
    if not max_norm >= 0:
        raise ValueError(f"max_norm must be at least 0, not {max_norm!r}")
    if not norm_type > 0:
        raise ValueError(f"norm_type must be above 0 (math.inf for the largest entry), not {norm_type!r}")
    every = [*chunks, *everywhere, *copies]
    device = every[0].device if every else device
    mine, common = _norms(chunks, norm_type, device), _norms(everywhere, norm_type, device)
    if math.isinf(norm_type):
        total = mine.max()
        dist.all_reduce(total, op=dist.ReduceOp.MAX, group=group)
        total = torch.maximum(total, common.max())
    else:
        total = mine.pow(norm_type).sum()
        dist.all_reduce(total, group=group)
        total = (total + common.pow(norm_type).sum()).pow(1 / norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(f"the norm of the gradient is {total.item()}, and error_if_nonfinite=True asks to stop here")
    for gradient in every:
        gradient.mul_((max_norm / (total + 1e-6)).clamp(max=1.0))
    return total


def _norms(gradients: Sequence[Tensor], norm_type: float, device: torch.device | None) -> Tensor:
    """The norm of each, and a 0, in float64."""
    norms = [torch.zeros((), dtype=torch.float64, device=device)]
    with torch._C.DisableTorchFunctionSubclass():  # here a part's norm is one of many
        for gradient in gradients:
            if gradient.numel():
                dtype = torch.float64 if gradient.dtype == torch.float64 else torch.float32
                norms.append(torch.linalg.vector_norm(gradient, norm_type, dtype=dtype).double())
    return torch.stack(norms)
