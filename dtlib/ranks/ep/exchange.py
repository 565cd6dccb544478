"""The way of tokens to experts on other ranks, and of their answers back.

Shapes: t tokens of this rank, h hidden, e experts of all ranks, k choices of a token; v rows that are sent, one for
each rank that a token visits, n rows that arrive, p pairs of such a row and an expert that it visits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dtlib.ranks.experts import Experts, Pairs, Routed, pairs_of
from dtlib.ranks.mesh import Group
from dtlib.ranks.shared.alike import refuse_unlike_calls, size_of
from dtlib.ranks.shared.split import evenly


@dataclass(frozen=True)
class Route:
    """How rows travelled: this rank's row j is a copy of its token ``token_v[j]``, `sent` and `received` are the
    numbers of rows to and from each rank of `group`, this one too, whose rows stay."""

    group: Group
    tokens: int
    token_v: Tensor
    sent: list[int]
    received: list[int]


class Arrived(NamedTuple):
    """What a dispatch brings to a rank: rows of tokens, which of its experts they visit, and the way back."""

    x_nh: Tensor
    pairs: Pairs
    route: Route


def dispatch(
    x_th: Tensor, routed: Routed, num_experts: int, group: Group = None, *, capacity_factor: float | None = None
) -> Arrived:
    """Send each token to the ranks of `group` whose experts it visits, one copy a rank.

    | | before | after |
    |---|---|---|
    | tokens | (t, h), any t a rank | (n, h), by rank and in the order of its tokens |
    | weights | (t, k) | (p,), expert by expert |

    - forward: three all-to-alls: how many rows and visits, which row each visit is of with its weight, then the rows;
    - input gradient: what comes back for each copy, added up; that is the way of `combine`;
    - weights' gradient: one number for each visit comes back.

    The experts lie in order, the first ``e mod N`` ranks have one more. All ranks must call it, with their own tokens.
    A `capacity_factor` is that of `pairs_of`: of this call's own tokens. ``ValueError`` before anything is sent for
    fewer experts than ranks, and for calls of another width or dtype than the others'.
    """
    n, me, (t, h) = size_of(group), dist.get_rank(group), x_th.shape
    lengths = [len(own) for (own,) in evenly("num_experts", num_experts, n)]
    said = f"(t, {h}) of {x_th.dtype}, {num_experts} experts" + ", which needs a gradient" * x_th.requires_grad
    refuse_unlike_calls("x_th", said, group)
    pairs = pairs_of(routed, num_experts, capacity_factor)
    visits = [sum(each) for each in _cut(pairs.counts_e, lengths)]
    rank_p = torch.arange(n, device=x_th.device).repeat_interleave(torch.tensor(visits, device=x_th.device))
    key_v, copy_p = (rank_p * t + pairs.row_p).unique(return_inverse=True)  # by rank, then by token
    first_n = torch.searchsorted(key_v, torch.arange(n + 1, device=x_th.device) * t)
    sent = first_n.diff()

    parts = zip(sent.tolist(), _cut(pairs.counts_e, lengths), strict=True)
    told = torch.tensor([number for rows, counts in parts for number in (rows, *counts)], device=x_th.device)
    heard = _exchange(told, [1 + each for each in lengths], [1 + lengths[me]] * n, group).view(n, -1)
    received, counts_ne = heard[:, 0], heard[:, 1:]
    arriving = counts_ne.sum(1).tolist()
    route = Route(group, t, key_v % max(t, 1), sent.tolist(), received.tolist())
    rows = start(x_th.index_select(0, route.token_v), route.sent, route.received, group)
    weights = start(pairs.weights_p, visits, arriving, group)
    place_p = _exchange(copy_p - first_n[rank_p], visits, arriving, group)

    row_p = place_p + (received.cumsum(0) - received).repeat_interleave(counts_ne.sum(1))
    expert_p = torch.arange(lengths[me], device=x_th.device).repeat(n).repeat_interleave(counts_ne.flatten())
    order_p = expert_p.argsort(stable=True)
    own = Pairs(row_p[order_p], wait(weights).index_select(0, order_p), counts_ne.sum(0).tolist())
    return Arrived(wait(rows), own, route)


def combine(y_nh: Tensor, route: Route, beside: Callable[[], Tensor] | None = None) -> Tensor:
    """Send the answers (n, h) of this rank's experts back where the rows came from, and add up what comes for each
    token: (t, h), zeros for one without a visit.

    - forward: one all-to-all, `dispatch` the other way;
    - input gradient: each answer gets its token's, by an all-to-all as `dispatch`.

    What is computed `beside`, (t, h), is added: forward and backward it is computed while rows are under way.
    """
    rows = start(y_nh, route.received, route.sent, route.group)
    y_th = y_nh.new_zeros(route.tokens, y_nh.shape[1]) if beside is None else beside()
    return _Added.apply(y_th, wait(rows), route.token_v)


class _Added(torch.autograd.Function):
    """`index_add_` that does not keep the rows, as torch's own does for their shape."""

    @staticmethod
    def forward(context: Any, y_th: Tensor, rows_vh: Tensor, token_v: Tensor) -> Tensor:
        context.save_for_backward(token_v)
        context.mark_dirty(y_th)
        return y_th.index_add_(0, token_v, rows_vh)

    @staticmethod
    @once_differentiable
    def backward(context: Any, dy_th: Tensor) -> Any:
        (token_v,) = context.saved_tensors
        return dy_th, dy_th.index_select(0, token_v), None


class Underway(NamedTuple):
    """Rows that are under way, and what to wait for."""

    arriving: Tensor
    trip: Trip


def start(rows: Tensor, sent: list[int], received: list[int], group: Group) -> Underway:
    """Begin an all-to-all with a gradient: ``sent[r]`` of the `rows` go to rank r, ``received[r]`` come from it."""
    trip = Trip(sent, received, group)
    return Underway(_Start.apply(rows, trip), trip)


def wait(underway: Underway) -> Tensor:
    """The rows that have arrived. Backward their gradients begin the way back here, and are awaited in `start`."""
    return _Wait.apply(*underway)


@dataclass
class Trip:
    """How many rows go to each rank and come from it, and the exchange that is under way."""

    sent: list[int]
    received: list[int]
    group: Group
    work: Any = None

    def leave(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Begin: where the rows will be."""
        arriving, rows = rows.new_empty(sum(received), *rows.shape[1:]), rows.contiguous()
        call = dist.all_to_all_single(arriving, rows, received, sent, group=self.group, async_op=True)
        self.work = call, arriving, rows  # which must live until they have left
        return arriving

    def arrive(self) -> Tensor:
        """Wait for them."""
        (call, arriving, _), self.work = self.work, None
        call.wait()
        return arriving


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, rows: Tensor, trip: Trip) -> Tensor:
        context.trip = trip
        return trip.leave(rows, trip.sent, trip.received)

    @staticmethod
    @once_differentiable
    def backward(context: Any, left: Tensor) -> Any:
        return context.trip.arrive(), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, arriving: Tensor, trip: Trip) -> Tensor:
        context.trip = trip
        trip.arrive()
        return arriving.view_as(arriving)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> Any:
        context.trip.leave(gradient, context.trip.received, context.trip.sent)
        return gradient, None  # what comes back instead has the shape of what was sent, which only `_Start` may return


def _exchange(numbers: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
    arrived = numbers.new_empty(sum(received))
    dist.all_to_all_single(arrived, numbers, received, sent, group=group)
    return arrived


def _cut(numbers: list[int], lengths: list[int]) -> list[list[int]]:
    """`numbers` in consecutive parts of these lengths."""
    each = iter(numbers)
    return [[next(each) for _ in range(length)] for length in lengths]


class Exchange(nn.Module):
    """The way to experts on other ranks, in the place of `ranks.experts.Here`."""

    def __init__(self, num_experts: int, group: Group, capacity_factor: float | None = None) -> None:
        super().__init__()
        self.num_experts, self.group, self.capacity_factor = num_experts, group, capacity_factor

    def forward(
        self, x_th: Tensor, routed: Routed, experts: Experts, shared: Callable[[Tensor], Tensor] | None
    ) -> Tensor:
        """What the experts of all ranks answer to each of this rank's tokens (t, h), the shared ones too."""
        x_nh, pairs, route = dispatch(x_th, routed, self.num_experts, self.group, capacity_factor=self.capacity_factor)
        return combine(experts(x_nh, pairs), route, None if shared is None else partial(shared, x_th))
