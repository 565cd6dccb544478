"""The conjugate pair that stands where tensor parallelism has its all-reduces, and its halves without gradients.

Shapes: b sequences, s positions, h hidden, t ranks; rank r has positions r·s/t to (r+1)·s/t of each sequence. Source:
Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtlib.ranks.collectives import ring_all_gather, ring_reduce_scatter
from dtlib.ranks.mesh import Group
from dtlib.ranks.shared.alike import described, refuse_unlike_calls, size_of


def all_tokens(x_bsh: Tensor, group: Group = None) -> Tensor:
    """A ring all-gather: (b, s/t, h) on each rank to (b, s, h) on all, each sending (t−1)/t · bsh; no gradient."""
    if size_of(group) == 1:
        return x_bsh
    refuse_unlike_calls("x_bsh", described(x_bsh), group)
    x_sbh = ring_all_gather(x_bsh.transpose(0, 1).contiguous(), group=group)
    return x_sbh.transpose(0, 1).contiguous()


def summed_tokens(part_bsh: Tensor, group: Group = None) -> Tensor:
    """A ring reduce-scatter: the sum of the ranks' (b, s, h), of which each gets its (b, s/t, h); each sends (t−1)/t ·
    bsh; no gradient. ``ValueError`` unless the ranks divide s."""
    if size_of(group) == 1:
        return part_bsh
    refuse_length("part_bsh", part_bsh, group)
    refuse_unlike_calls("part_bsh", described(part_bsh), group)
    sum_sbh = ring_reduce_scatter(part_bsh.transpose(0, 1).contiguous(), group=group)
    return sum_sbh.transpose(0, 1).contiguous()


class GatherTokens(torch.autograd.Function):
    """Forward an all-gather; backward a reduce-scatter: each rank used all tokens, so gradients have t parts."""

    @staticmethod
    def forward(context: Any, x_bsh: Tensor, group: Group) -> Tensor:
        """All tokens."""
        context.group = group
        return x_bsh.view_as(x_bsh) if dist.get_world_size(group) == 1 else all_tokens(x_bsh, group)

    @staticmethod
    def backward(context: Any, gradient_bsh: Tensor) -> Any:
        """The sum of the ranks' gradients, of this rank's tokens."""
        return ScatterSum.apply(gradient_bsh, context.group), None


class ScatterSum(torch.autograd.Function):
    """Forward a reduce-scatter; backward an all-gather: a rank's part has a share in the tokens of all."""

    @staticmethod
    def forward(context: Any, part_bsh: Tensor, group: Group) -> Tensor:
        """This rank's tokens of the sum of the ranks' parts."""
        context.group = group
        return part_bsh.view_as(part_bsh) if dist.get_world_size(group) == 1 else summed_tokens(part_bsh, group)

    @staticmethod
    def backward(context: Any, gradient_bsh: Tensor) -> Any:
        """The gradients of all tokens."""
        return GatherTokens.apply(gradient_bsh, context.group), None


def gather_tokens(x_bsh: Tensor, group: Group = None) -> Tensor:
    """All tokens (b, s, h) from the ranks' (b, s/t, h); the gradient comes back summed and split."""
    return GatherTokens.apply(x_bsh, group)


def scatter_sum(part_bsh: Tensor, group: Group = None) -> Tensor:
    """This rank's tokens (b, s/t, h) of the sum of the ranks' parts (b, s, h); the gradient comes back gathered."""
    return ScatterSum.apply(part_bsh, group)


def refuse_length(name: str, x_bsh: Tensor, group: Group) -> None:
    """``ValueError`` unless the ranks of `group` divide the positions, dim 1, of `x_bsh`."""
    s, t = x_bsh.shape[1], dist.get_world_size(group)
    if s % t:
        raise ValueError(f"{name} must have a multiple of the number of ranks in group, {t}, of positions, not {s}")
