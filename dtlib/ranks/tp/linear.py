"""Linear layers that are split over the ranks of a group, with their communication behind their products.

Shapes: b sequences, s positions, n = b·s tokens, i inputs and o outputs of the whole layer, t ranks. What a rank has of
it is written as if t divided it; it need not.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dtlib.ranks.mesh import Group
from dtlib.ranks.shared.split import Ranges, Split, SplitModule, evenly
from dtlib.theory.valid import whole


class ColumnParallelLinear(SplitModule):
    """This rank's outputs of `linear`, which must be the same on all ranks of `group`: columns of Wᵀ are outputs.

    | | whole | this rank |
    |---|---|---|
    | input x | (b, s, i) | (b, s, i) |
    | weight W, bias | (o, i), o | (o/t, i), o/t |
    | output y | (b, s, o) | (b, s, o/t) |

    - forward: y_r = x W_rᵀ + bias_r, nothing sent;
    - input gradient: Σ over the ranks of dy_r W_r, an all-reduce of b·s·i elements, behind the next line;
    - weight gradient: dW_r = dy_rᵀ x, nothing sent.

    For the backward pass it keeps x. `rows` are each rank's outputs, by default even slices. The last `shared_rows` of
    this rank's are on all ranks of `sharers` too, so their gradients are summed over them. ``ValueError`` where there
    are fewer outputs than ranks. Source: Shoeybi et al. 2019, arXiv 1909.08053, section 3.
    """

    def __init__(
        self,
        linear: nn.Linear,
        group: Group = None,
        *,
        rows: tuple[Ranges, ...] | None = None,
        shared_rows: int = 0,
        sharers: Group = None,
    ) -> None:
        super().__init__()
        t = _size("out_features", linear.out_features, group)
        self.group, self.splits = group, {}
        self.shared_rows, self.sharers = shared_rows, sharers
        rows = evenly(linear.out_features, t) if rows is None else rows
        self.take("weight", linear.weight, Split(0, rows))
        self.take("bias", linear.bias, Split(0, rows))

    def forward(self, x_bsi: Tensor) -> Tensor:
        """This rank's outputs (b, s, o/t)."""
        return _Column.apply(x_bsi, self.weight, self.bias, self)


class RowParallelLinear(SplitModule):
    """`linear`, the same on all ranks of `group`, of inputs that lie on different ranks: rows of Wᵀ are inputs.

    | | whole | this rank |
    |---|---|---|
    | input x | (b, s, i) | (b, s, i/t) |
    | weight W, bias | (o, i), o | (o, i/t), o |
    | output y | (b, s, o) | (b, s, o) |

    - forward: y = Σ over the ranks of x_r W_rᵀ, an all-reduce of b·s·o elements, then + bias, once;
    - input gradient: dx_r = dy W_r, nothing sent;
    - weight gradient: dW_r = dyᵀ x_r, nothing sent; that of the bias is the same on all ranks.

    For the backward pass it keeps x_r. The product is cut into `chunks` of tokens: one is summed while the next is
    computed (1: nothing overlaps). `columns` are each rank's inputs, by default even slices. ``ValueError`` for fewer
    inputs than ranks, or chunks below 1. Source: Shoeybi et al. 2019, arXiv 1909.08053, section 3.
    """

    def __init__(
        self, linear: nn.Linear, group: Group = None, *, columns: tuple[Ranges, ...] | None = None, chunks: int = 1
    ) -> None:
        super().__init__()
        t = _size("in_features", linear.in_features, group)
        self.group, self.splits, self.chunks = group, {}, whole("chunks", chunks, 1)
        self.take("weight", linear.weight, Split(1, evenly(linear.in_features, t) if columns is None else columns))
        self.bias = linear.bias

    def forward(self, x_bsi: Tensor) -> Tensor:
        """All outputs (b, s, o), on every rank."""
        return _Row.apply(x_bsi, self.weight, self.bias, self)


def _size(name: str, features: int, group: Group) -> int:
    t = dist.get_world_size(group)
    if features < t:
        raise ValueError(f"{name} must be at least the number of ranks in group, {t}, not {features}")
    return t


class _Done:
    def wait(self) -> None:
        """There is nothing to wait for."""


def _start_sum(tensor: Tensor, group: Group) -> Any:
    """Begin to sum `tensor` over the ranks of `group`, in place: all that the linear layers ever send.

    Activations that lie split between the layers (sequence parallelism) would have a reduce-scatter here, and an
    all-gather at the other end of the pair.
    """
    return _Done() if dist.get_world_size(group) == 1 else dist.all_reduce(tensor, group=group, async_op=True)


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, x_bsi: Tensor, w_oi: Tensor, bias_o: Tensor | None, layer: ColumnParallelLinear
    ) -> Tensor:
        needs_x, needs_w, *_ = context.needs_input_grad
        context.layer = layer
        context.save_for_backward(x_bsi if needs_w else None, w_oi if needs_x else None)
        return F.linear(x_bsi, w_oi, bias_o)

    @staticmethod
    def backward(context: Any, dy_bso: Tensor) -> Any:
        (x_bsi, w_oi), layer, dx_ni, dw_oi, dbias_o, sums = context.saved_tensors, context.layer, None, None, None, []
        dy_no = dy_bso.flatten(0, -2)
        if context.needs_input_grad[0]:
            dx_ni = dy_no @ w_oi
            sums.append(_start_sum(dx_ni, layer.group))
        if context.needs_input_grad[1]:
            dw_oi = dy_no.t() @ x_bsi.flatten(0, -2)
        if context.needs_input_grad[2]:
            dbias_o = dy_no.sum(0)
        if layer.shared_rows:
            shared = [each[-layer.shared_rows :] for each in (dw_oi, dbias_o) if each is not None]
            sums += [_start_sum(each, layer.sharers) for each in shared]
        for each in sums:
            each.wait()
        dx_bsi = None if dx_ni is None else dx_ni.unflatten(0, dy_bso.shape[:-1])
        return dx_bsi, dw_oi, dbias_o, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x_bsi: Tensor, w_oi: Tensor, bias_o: Tensor | None, layer: RowParallelLinear) -> Tensor:
        needs_x, needs_w, *_ = context.needs_input_grad
        context.save_for_backward(x_bsi if needs_w else None, w_oi if needs_x else None)
        x_ni = x_bsi.flatten(0, -2)
        y_no, sums = x_ni.new_empty(len(x_ni), len(w_oi)), []
        for start, stop in zip(*_chunks(len(x_ni), layer.chunks), strict=True):
            torch.mm(x_ni[start:stop], w_oi.t(), out=y_no[start:stop])
            sums.append(_start_sum(y_no[start:stop], layer.group))
        for each in sums:
            each.wait()
        if bias_o is not None:
            y_no += bias_o
        return y_no.unflatten(0, x_bsi.shape[:-1])

    @staticmethod
    def backward(context: Any, dy_bso: Tensor) -> Any:
        x_bsi, w_oi = context.saved_tensors
        dy_no, dx_bsi, dw_oi, dbias_o = dy_bso.flatten(0, -2), None, None, None
        if context.needs_input_grad[0]:
            dx_bsi = (dy_no @ w_oi).unflatten(0, dy_bso.shape[:-1])
        if context.needs_input_grad[1]:
            dw_oi = dy_no.t() @ x_bsi.flatten(0, -2)
        if context.needs_input_grad[2]:
            dbias_o = dy_no.sum(0)
        return dx_bsi, dw_oi, dbias_o, None


def _chunks(n: int, chunks: int) -> tuple[range, list[int]]:
    """Where chunks of `n` tokens start and stop; never an empty one."""
    size = max(1, -(-n // chunks))
    starts = range(0, n, size)
    return starts, [min(start + size, n) for start in starts]
