"""The conjugate pair: what a tensor-parallel layer does at its start, and at its end.

Source: Shoeybi et al. 2019, arXiv 1909.08053, section 3.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtlib.ranks.mesh import Group
from dtlib.ranks.shared.alike import described, refuse_unlike_calls


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
