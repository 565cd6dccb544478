"""The norm of a gradient whose elements lie on different ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@torch.no_grad()
def clip_grad_norm(
    chunks: Sequence[Tensor],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    *,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """Scale `chunks` in place so that their norm over the ranks of `group` is at most `max_norm`; returns the norm.

    (Σ over ranks Σ over elements |g|^p)^(1/p), the maximum for p = ∞. Each element must lie on one rank alone.
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm must be at least 0, not {max_norm!r}")
    if not norm_type > 0:
        raise ValueError(f"norm_type must be above 0 (math.inf for the largest entry), not {norm_type!r}")
    norms = [_norm(chunk, norm_type) for chunk in chunks if chunk.numel()]
    mine = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.float64, device=device)
    if math.isinf(norm_type):
        total = mine.max()
        dist.all_reduce(total, op=dist.ReduceOp.MAX, group=group)
    else:
        total = mine.pow(norm_type).sum()
        dist.all_reduce(total, group=group)
        total = total.pow(1 / norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(f"the norm of the gradient is {total.item()}, and error_if_nonfinite=True asks to stop here")
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for chunk in chunks:
        chunk.mul_(factor)
    return total


def _norm(chunk: Tensor, norm_type: float) -> Tensor:
    dtype: Any = torch.float64 if chunk.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(chunk, norm_type, dtype=dtype).double()
