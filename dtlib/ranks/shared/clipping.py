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
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Scale `chunks` in place so that their norm over the ranks of `group` is at most `max_norm`; returns the norm.

    (Σ over ranks Σ over elements |g|^p)^(1/p), the maximum for p = ∞: one all-reduce of 8 bytes, exact as each element
    lies on one rank alone. float64, 0-dimensional, on all ranks the same. ``ValueError`` for a negative `max_norm` or a
    `norm_type` that is not above 0, ``RuntimeError`` for a norm that is not finite if `error_if_nonfinite`.
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm must be at least 0, not {max_norm!r}")
    if not norm_type > 0:
        raise ValueError(f"norm_type must be above 0 (math.inf for the largest entry), not {norm_type!r}")
    norms = [_norm(chunk, norm_type) for chunk in chunks if chunk.numel()]
    device = chunks[0].device if chunks else None
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
    for chunk in chunks:
        chunk.mul_((max_norm / (total + 1e-6)).clamp(max=1.0))
    return total


def _norm(chunk: Tensor, norm_type: float) -> Tensor:
    dtype = torch.float64 if chunk.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(chunk, norm_type, dtype=dtype).double()  # type: ignore[no-any-return]
