"""Tensor parallelism on a page: the conjugate pair, and an MLP of which each rank has a slice.

Shapes: b sequences, s positions, h hidden, f width of the MLP, t ranks. Source: Shoeybi et al. 2019, arXiv 1909.08053,
section 3.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dtlib.ranks.mesh import Group
from dtlib.ranks.model import MLP
from dtlib.ranks.shared.alike import described, refuse_unlike_calls, size_of
from dtlib.ranks.shared.parts import slice_of


class CopyToRanks(torch.autograd.Function):
    """Forward nothing; backward an all-reduce. Each rank computes with the same x, so x's gradient has t parts."""

    @staticmethod
    def forward(context: Any, x_bsh: Tensor, group: Group) -> Tensor:
        """x itself."""
        context.group = group
        return x_bsh.view_as(x_bsh)

    @staticmethod
    def backward(context: Any, gradient_bsh: Tensor) -> Any:
        """The sum of the ranks' gradients."""
        return SumOverRanks.apply(gradient_bsh, context.group), None


class SumOverRanks(torch.autograd.Function):
    """Forward an all-reduce; backward nothing. Each rank's part is one term of the sum, so each gets all of its
    gradient."""

    @staticmethod
    def forward(context: Any, part_bsh: Tensor, group: Group) -> Tensor:
        """The sum of the ranks' parts, on all of them."""
        context.group = group
        total_bsh = part_bsh.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total_bsh, group=group)
        return total_bsh

    @staticmethod
    def backward(context: Any, gradient_bsh: Tensor) -> Any:
        """The gradient itself."""
        return CopyToRanks.apply(gradient_bsh, context.group), None


def copy_to_ranks(x_bsh: Tensor, group: Group = None) -> Tensor:
    """`x_bsh`, which all ranks of `group` have alike and now use differently; its gradient is summed over them."""
    refuse_unlike_calls("x_bsh", described(x_bsh), group)
    return CopyToRanks.apply(x_bsh, group)


def sum_over_ranks(part_bsh: Tensor, group: Group = None) -> Tensor:
    """The sum of the parts that the ranks of `group` have; each part gets the gradient of the sum."""
    refuse_unlike_calls("part_bsh", described(part_bsh), group)
    return SumOverRanks.apply(part_bsh, group)


class SimpleMLP(nn.Module):
    """The rank's slice of `mlp` (`ranks.model`, with a GELU), which must be the same on all ranks of `group`.

    | | whole | this rank |
    |---|---|---|
    | `up`, bias | (f, h), f | (f/t, h), f/t |
    | `down`, bias | (h, f), h | (h, f/t), h |

    A column of `up` is one entry of the f in the middle, and the GELU takes each by itself: so ranks meet only where
    `down` adds them up. Its bias is added once, after the sum. ``ValueError`` for an MLP with SwiGLU or without biases.
    """

    def __init__(self, mlp: MLP, group: Group = None) -> None:
        super().__init__()
        if mlp.swiglu or mlp.up.bias is None:
            raise ValueError("mlp must have a GELU and biases here; ParallelMLP splits the others too")
        self.group, t, rank = group, size_of(group), dist.get_rank(group)
        self.up_fh = slice_of(mlp.up.weight.detach().tensor_split(t)[rank].clone(), group)
        self.up_bias_f = slice_of(mlp.up.bias.detach().tensor_split(t)[rank].clone(), group)
        self.down_hf = slice_of(mlp.down.weight.detach().tensor_split(t, dim=1)[rank].clone(), group)
        self.down_bias_h = nn.Parameter(mlp.down.bias.detach().clone())

    def forward(self, x_bsh: Tensor) -> Tensor:
        """What the whole MLP gives for `x_bsh`, on all ranks: one all-reduce here, one in the backward pass."""
        y_bsf = F.linear(copy_to_ranks(x_bsh, self.group), self.up_fh, self.up_bias_f)
        part_bsh = F.linear(F.gelu(y_bsf, approximate="tanh"), self.down_hf)
        return sum_over_ranks(part_bsh, self.group) + self.down_bias_h
