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
from torch.autograd.function import once_differentiable

from dtlib.ranks.mesh import Group
from dtlib.ranks.shared.alike import described, refuse_unlike_calls, size_of
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
        self.group, self.splits = group, {}
        self.shared_rows, self.sharers = shared_rows, sharers
        rows = evenly("out_features", linear.out_features, size_of(group)) if rows is None else rows
        self.take("weight", linear.weight, Split(0, rows))
        self.take("bias", linear.bias, Split(0, rows))

    def forward(self, x_bsi: Tensor) -> Tensor:
        """This rank's outputs (b, s, o/t)."""
        refuse_unlike_calls("x_bsi", described(x_bsi), self.group)
        inputs = _as_autocast(x_bsi, self.weight, self.bias)
        with torch.autocast(x_bsi.device.type, enabled=False):
            return _Column.apply(*inputs, self)

    def enter(self, x_bsi: Tensor) -> tuple[Tensor, Tensor]:
        """What is multiplied, and what of it is kept for `again`: both the input."""
        return x_bsi, x_bsi

    def again(self, kept_bsi: Tensor) -> Tensor:
        """What was multiplied, for the gradient of the weights."""
        return kept_bsi

    def start_sum(self, dx_bsi: Tensor) -> tuple[Tensor, list[Any]]:
        """Begin to sum the input's gradient over the ranks: where it will be, and what to wait for."""
        return dx_bsi, _start_sum(dx_bsi, self.group)


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
        t = size_of(group)
        columns = evenly("in_features", linear.in_features, t) if columns is None else columns
        self.group, self.splits, self.chunks = group, {}, whole("chunks", chunks, 1)
        self.take("weight", linear.weight, Split(1, columns))
        self.bias = linear.bias

    def forward(self, x_bsi: Tensor) -> Tensor:
        """All outputs (b, s, o), on every rank."""
        refuse_unlike_calls("x_bsi of rows", described(x_bsi, but_last=True), self.group)
        inputs = _as_autocast(x_bsi, self.weight, self.bias)
        with torch.autocast(x_bsi.device.type, enabled=False):
            return _Row.apply(*inputs, self)


def _as_autocast(*tensors: Tensor | None) -> list[Tensor | None]:
    """`tensors` in the dtype in which autocast multiplies them, if it is on: it does not see what we write out."""
    device = next(each.device.type for each in tensors if each is not None)
    narrow = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    may = narrow is not None and all(each is None or each.dtype != torch.float64 for each in tensors)
    return [each.to(narrow) if may and each is not None else each for each in tensors]


def _start_sum(tensor: Tensor, group: Group) -> list[Any]:
    """Begin to sum `tensor` over the ranks of `group`, in place, and say what to wait for: all that the layers send."""
    return [] if dist.get_world_size(group) == 1 else [dist.all_reduce(tensor, group=group, async_op=True)]


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, x_bsi: Tensor, w_oi: Tensor, bias_o: Tensor | None, layer: ColumnParallelLinear
    ) -> Tensor:
        needs_x, needs_w, *_ = context.needs_input_grad
        context.layer = layer
        all_bsi, kept_bsi = layer.enter(x_bsi)
        context.save_for_backward(kept_bsi if needs_w else None, w_oi if needs_x else None)
        return F.linear(all_bsi, w_oi, bias_o)

    @staticmethod
    @once_differentiable
    def backward(context: Any, dy_bso: Tensor) -> Any:
        (x_bsi, w_oi), layer, dx_bsi, sums = context.saved_tensors, context.layer, None, []
        dy_no, (needs_x, needs_w, needs_bias) = dy_bso.flatten(0, -2), _asked_for(context)
        if needs_x:
            dx_bsi, sums = layer.start_sum((dy_no @ w_oi).unflatten(0, dy_bso.shape[:-1]))
        dw_oi, dbias_o = _weight_gradients(dy_no, layer.again(x_bsi) if needs_w else None, needs_bias)
        if layer.shared_rows:
            for each in (dw_oi, dbias_o):
                sums += [] if each is None else _start_sum(each[-layer.shared_rows :], layer.sharers)
        for work in sums:
            work.wait()
        return dx_bsi, dw_oi, dbias_o, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x_bsi: Tensor, w_oi: Tensor, bias_o: Tensor | None, layer: RowParallelLinear) -> Tensor:
        needs_x, needs_w, *_ = context.needs_input_grad
        context.save_for_backward(x_bsi if needs_w else None, w_oi if needs_x else None)
        x_ni, sums = x_bsi.flatten(0, -2), []
        y_no = x_ni.new_empty(len(x_ni), len(w_oi))
        size = max(1, -(-len(x_ni) // layer.chunks))
        for x_ci, y_co in zip(x_ni.split(size), y_no.split(size), strict=True):
            torch.mm(x_ci, w_oi.t(), out=y_co)
            sums += _start_sum(y_co, layer.group)
        for work in sums:
            work.wait()
        if bias_o is not None:
            y_no += bias_o
        return y_no.unflatten(0, x_bsi.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(context: Any, dy_bso: Tensor) -> Any:
        (x_bsi, w_oi), (needs_x, needs_w, needs_bias) = context.saved_tensors, _asked_for(context)
        dx_bsi = dy_bso @ w_oi if needs_x else None
        return dx_bsi, *_weight_gradients(dy_bso.flatten(0, -2), x_bsi if needs_w else None, needs_bias), None


def _asked_for(context: Any) -> tuple[bool, bool, bool]:
    """Whether this backward pass wants the gradients of input, weight and bias. What needs one in general need not be
    asked for by a pass in two halves (`ranks.pp`): the input's, summed in the first half, is not summed again."""
    nodes = iter(node for node, _ in context.next_functions)  # of tensors
    needs_x, needs_w, needs_bias, _ = context.needs_input_grad
    x, w, bias = next(nodes), next(nodes), next(nodes, None)
    return needs_x and _is_wanted(x), needs_w and _is_wanted(w), needs_bias and _is_wanted(bias)


def _is_wanted(node: Any) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # a leaf of which torch.autograd.grad asks
        return True


def _weight_gradients(dy_no: Tensor, x_bsi: Tensor | None, bias: bool) -> tuple[Tensor | None, Tensor | None]:
    return None if x_bsi is None else dy_no.t() @ x_bsi.flatten(0, -2), dy_no.sum(0) if bias else None
