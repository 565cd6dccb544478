"""Experts that are split over the ranks of a group by their width, as an MLP is.

Shapes: b sequences, s positions, h hidden, t tokens of them, k choices of a token, e experts, f width of one, r ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtlib.ranks.experts import Apart, Experts, MoE, Routed, Shared
from dtlib.ranks.mesh import Group
from dtlib.ranks.shared.split import Split, SplitModule, evenly

from .conjugate import copy_to_ranks, sum_over_ranks


class AroundExperts(Apart):
    """The conjugate pair around a layer of experts, of which each rank of `group` has a part of each.

    The router is whole, sees all tokens and says the same on all ranks, so what it hands back for them is one r-th on
    each. What a weight (t, k) is multiplied with has r parts: its gradient is summed over the ranks.
    """

    def __init__(self, group: Group) -> None:
        self.group = group

    def open(self, x_bsh: Tensor) -> Tensor:
        """All tokens, whose gradient is the sum over the ranks."""
        return copy_to_ranks(x_bsh, self.group)

    def enter(self, x_bsh: Tensor) -> tuple[Tensor, Tensor]:
        """For the router and for the experts."""
        all_bsh = self.open(x_bsh)
        return _Share.apply(all_bsh, dist.get_world_size(self.group)), all_bsh

    def weigh(self, routed: Routed) -> Routed:
        """`routed`, whose weights get their gradient from all ranks."""
        return routed._replace(weights_tk=copy_to_ranks(routed.weights_tk, self.group))

    def leave(self, y_bsh: Tensor) -> Tensor:
        """The sum of the ranks' answers."""
        return sum_over_ranks(y_bsh, self.group)


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, n: int) -> Tensor:
        context.n = n
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        return gradient / context.n, None


class OwnWidth(SplitModule, Experts):
    """This rank's part of each of `experts`, which must be the same on all ranks of `group`.

    | | whole | this rank |
    |---|---|---|
    | `up_ehf` | (e, h, f); gated (e, h, 2f) | (e, h, f/r); (e, h, 2f/r): as many of the gate as of the rest |
    | `down_efh` | (e, f, h) | (e, f/r, h) |

    What it answers is one term of r. ``ValueError`` where f is below r.
    """

    def __init__(self, experts: Experts, group: Group) -> None:
        nn.Module.__init__(self)
        self.group, self.splits, self.gated = group, {}, experts.gated
        f = experts.down_efh.shape[1]
        mine = evenly("expert_hidden", f, dist.get_world_size(group))
        columns = tuple((*each, range(each[0].start + f, each[0].stop + f)) for each in mine) if self.gated else mine
        self.take("up_ehf", experts.up_ehf, Split(2, columns))
        self.take("down_efh", experts.down_efh, Split(1, mine))


class OwnShared(OwnWidth, Shared):
    """The same of experts that every token visits."""


def split_experts(moe: MoE, group: Group, around: Callable[[Group], Apart] = AroundExperts) -> MoE:
    """Leave this rank's part of the width of each expert of `moe`, which is changed and returned; it is the same on all
    ranks of `group`.

    - forward: one all-reduce, b·s·h elements, behind the experts;
    - input gradient: one all-reduce, b·s·h elements, in front of them;
    - gradient of the experts' weights in a sum, t·k: one all-reduce.

    The way to experts on other ranks stays: each rank sends whole tokens to those that have its part of them.
    """
    moe.around = around(group)
    moe.experts = OwnWidth(moe.experts, group)
    if moe.shared is not None:
        moe.shared = OwnShared(moe.shared, group)
    return moe
