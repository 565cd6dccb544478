"""The other way: trade tokens for heads, attend to all tokens with a few heads, and trade back.

Shapes: b sequences, a heads of queries, g of keys and values, s positions, d entries of a head, N ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtlib.ranks.mesh import Group
from dtlib.theory.cp.traffic import refuse_heads

from .layout import Layout
from .ring import attend, refuse_shapes
from .tiles import Mask


def ulysses_attention(
    q_basd: Tensor, k_bgsd: Tensor, v_bgsd: Tensor, layout: Layout, mask: Mask | None = None
) -> Tensor:
    """What `ring_attention` gives, by two all-to-alls: all tokens of a/N heads on each rank, and back.

    | | before and after | in between |
    |---|---|---|
    | queries, result | (b, a, s/N, d) | (b, a/N, s, d) |
    | keys, values | (b, g, s/N, d) | (b, max(g/N, 1), s, d) |

    - forward: (N−1)/N of the rank's queries, keys, values and results are sent;
    - input gradient: as much again;
    - kept: queries, keys, values and results of its heads.

    With fewer heads of keys than ranks each is sent to all ranks that need it. ``ValueError`` as `ring_attention`, and
    for heads that do not go round: N must divide a, and divide g or be a multiple of it. Source: Jacobs et al. 2023,
    arXiv 2309.14509.
    """
    group = layout.group
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    refuse_shapes(q_basd, k_bgsd, v_bgsd, layout)
    a, g = q_basd.shape[1], k_bgsd.shape[1]
    refuse_heads(a, g, n)
    if g < n:
        k_bgsd, v_bgsd = (each.repeat_interleave(n // g, 1) for each in (k_bgsd, v_bgsd))
    lengths = [layout.length(each) for each in range(n)]
    heads = [each.shape[1] // n for each in (q_basd, k_bgsd, v_bgsd)]
    by_rank = torch.cat([_by_rank(each, n) for each in (q_basd, k_bgsd, v_bgsd)], 2)  # one message for all three
    q_basd, k_bgsd, v_bgsd = _Trade.apply(by_rank, lengths, rank, group).split(heads, 1)
    tokens_of_all = [each for own in layout.ranges for each in own]
    y_basd = attend(q_basd, k_bgsd, v_bgsd, None, [tokens_of_all], mask or Mask())
    return _TradeBack.apply(y_basd, lengths, rank, group).transpose(0, 1).flatten(1, 2)


def _by_rank(x_basd: Tensor, n: int) -> Tensor:
    """Heads in the order of the ranks that get them: (n, b, a/n, s, d)."""
    return x_basd.unflatten(1, (n, -1)).transpose(0, 1)


def _to_heads(x: Tensor, lengths: list[int], rank: int, group: Group) -> Tensor:
    """An all-to-all: (N, b, a/N, s/N, d), a slice for each rank, to all tokens (b, a/N, s, d)."""
    n, b, heads, _, d = x.shape
    arrived = x.new_empty(b * heads * d * sum(lengths))
    sizes = [b * heads * d * each for each in lengths]
    dist.all_to_all_single(arrived, x.contiguous().view(-1), sizes, [sizes[rank]] * n, group=group)
    parts = [part.view(b, heads, each, d) for part, each in zip(arrived.split(sizes), lengths, strict=True)]
    return torch.cat(parts, 2)


def _to_tokens(x_basd: Tensor, lengths: list[int], rank: int, group: Group) -> Tensor:
    """The all-to-all back: (b, a/N, s, d) to (N, b, a/N, s/N, d), the heads of each rank."""
    b, heads, _, d = x_basd.shape
    n, own = len(lengths), lengths[rank]
    sizes = [b * heads * d * each for each in lengths]
    leaving = torch.cat([part.flatten() for part in x_basd.split(lengths, 2)])
    arrived = x_basd.new_empty(n * sizes[rank])
    dist.all_to_all_single(arrived, leaving, [sizes[rank]] * n, sizes, group=group)
    return arrived.view(n, b, heads, own, d)


class _Trade(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, *how: Any) -> Tensor:
        context.how = how
        return _to_heads(x, *how)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        return _TradeBack.apply(gradient, *context.how), None, None, None


class _TradeBack(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, *how: Any) -> Tensor:
        context.how = how
        return _to_tokens(x, *how)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        return _Trade.apply(gradient, *context.how), None, None, None
