"""Buckets of gradients that travel while the backward pass is still running: what torch's DDP does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtlib.ranks.mesh import Group
from dtlib.theory.dp import plan_buckets
from dtlib.theory.units import MiB

from .base import DataParallel


class Started(Protocol):
    """What is under way, such as a ``dist.Work``."""

    def wait(self) -> Any:
        """Return once it is finished."""


@dataclass
class Bucket:
    """Neighbouring gradients in the buffer `flat`, in which they travel: a rank's, divided by the number of ranks.

    `views` are the parts of the buffer by the parameters' names, in their shapes. Buckets are filled anew after the
    first backward pass: what an exchange remembers, it remembers by these names.
    """

    flat: Tensor
    views: dict[str, Tensor]
    missing: int = field(init=False)  # gradients that are still to come
    started: Started | None = None
    group: Group = None  # that its parameters belong to

    def __post_init__(self) -> None:
        self.missing = len(self.views)


Exchange: TypeAlias = Callable[[Bucket, Group], Started | None]
"""What is done with a full bucket; see `BucketedDataParallel`."""


def all_reduce(bucket: Bucket, group: Group) -> Started | None:
    """The sum over the ranks: the mean gradient."""
    return dist.all_reduce(bucket.flat, group=group, async_op=True)


class BucketedDataParallel(DataParallel):
    """Average each bucket of gradients as soon as its last one is there. See `DataParallel`.

    `bucket_bytes` closes a bucket once it is that full; `first_bucket_bytes` the first one, smaller so that the link
    has something to do early. Buckets follow the reverse of the order in which the parameters were registered, and
    after the first backward pass the order in which gradients really became ready on rank 0. All ranks start
    their buckets in one order, whatever the order of readiness: collectives must match.

    `exchange` is what a bucket goes through: it is called once for each, in the same order on all ranks, and returns
    what to wait for (None: it is done). What it leaves in ``bucket.flat`` the gradients are; `all_reduce` their mean. A
    ``FloatingPointError`` of its is raised once all buckets are done, so that the step can be skipped.

    `overlap=False` keeps everything but the time: all buckets start after the backward pass (a blocking variant to
    measure against). With `gradient_as_bucket_view` the gradients are views of the buffers, which saves one copy of
    them; without, each parameter keeps a gradient of its own. ``ValueError`` for a size below 1, or an `exchange` that
    cannot be called.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        exchange: Exchange = all_reduce,
        bucket_bytes: int = 25 * MiB,
        first_bucket_bytes: int | None = MiB,
        overlap: bool = True,
        gradient_as_bucket_view: bool = True,
        group: dist.ProcessGroup | None = None,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
    ) -> None:
        plan_buckets([], bucket_bytes, first_bucket_bytes=first_bucket_bytes)  # refuse bad sizes before sending
        if not callable(exchange):
            raise ValueError(f"exchange must be a function of a bucket and a group, not {exchange!r}")
        super().__init__(
            module,
            group=group,
            broadcast_buffers=broadcast_buffers,
            find_unused_parameters=find_unused_parameters,
        )
        self.exchange, self.bucket_bytes, self.first_bucket_bytes = exchange, bucket_bytes, first_bucket_bytes
        self.overlap, self.gradient_as_bucket_view = overlap, gradient_as_bucket_view
        self._next = 0  # the bucket that starts next
        self._order_is_observed = find_unused_parameters
        self._numbers = {name: index for index, name in enumerate(self._names)}
        self._buckets: list[Bucket] = []
        if self.world_size > 1:
            self._fill_buckets(list(reversed(range(len(self._params)))))

    @property
    def buckets(self) -> list[list[str]]:
        """The names of the parameters in each bucket, in the order in which buckets are sent."""
        return [list(bucket.views) for bucket in self._buckets]

    def _fill_buckets(self, order: Sequence[int]) -> None:
        params = {i: self._params[i] for i in order}
        plan = in_buckets(params, self._groups, self.bucket_bytes, self.first_bucket_bytes, _dtype)
        self._buckets = [self._bucket(indices) for indices in plan]
        self._where = {name: bucket for bucket in self._buckets for name in bucket.views}

    def _bucket(self, indices: list[int]) -> Bucket:
        params = [self._params[i] for i in indices]
        flat = torch.empty(sum(p.numel() for p in params), dtype=_dtype(params[0]), device=params[0].device)
        each = zip(indices, flat.split([p.numel() for p in params]), strict=True)
        views = {self._names[i]: part.view(self._params[i].shape) for i, part in each}
        return Bucket(flat, views, group=self._groups[indices[0]])

    def _ready(self, index: int) -> None:
        self._pack(index)
        if self.overlap:
            self._start_full_buckets()

    @torch.no_grad()
    def _pack(self, index: int) -> None:
        """Put a gradient, already divided by N, where it travels."""
        name, parameter = self._names[index], self._params[index]
        bucket, grad = self._where[name], parameter.grad
        view = bucket.views[name]
        if grad is None:
            view.zero_()
        elif grad.dtype != view.dtype:
            raise RuntimeError(
                f"the gradient of {name!r} is {grad.dtype}, and was to be {view.dtype} when the module "
                "was wrapped: set grad_dtype, or make the optimizer that does, before"
            )
        elif grad is view:  # it was accumulated in its place
            view.mul_(1 / self.world_size)
        else:
            torch.mul(grad, 1 / self.world_size, out=view)
        if self.gradient_as_bucket_view or grad is None:
            parameter.grad = view if self.gradient_as_bucket_view else view.clone()
        bucket.missing -= 1

    @torch.no_grad()
    def _start_full_buckets(self) -> None:
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            bucket = self._buckets[self._next]
            bucket.started = self.exchange(bucket, bucket.group)
            self._next += 1

    @torch.no_grad()
    def _average(self, unused: Sequence[int]) -> None:
        for index in range(len(self._params)):
            if index not in self._arrived:
                self._pack(index)
        self._start_full_buckets()
        self._wait()
        if not self.gradient_as_bucket_view:
            for bucket in self._buckets:
                for name, view in bucket.views.items():
                    self._params[self._numbers[name]].grad.copy_(view)
        if not self._order_is_observed:
            self._order_is_observed = True
            self._follow_rank_0()

    def _abandon(self) -> None:
        self._wait()

    def _wait(self) -> None:
        error = None
        for bucket in self._buckets:
            try:
                if bucket.started is not None:
                    bucket.started.wait()
            except FloatingPointError as found:
                error = error or found
            bucket.started, bucket.missing = None, len(bucket.views)
        self._next = 0
        if error is not None:
            raise error

    def _follow_rank_0(self) -> None:
        """Fill the buckets anew, in the order in which gradients became ready on rank 0."""
        order = [*self._arrived, *(i for i in range(len(self._params)) if i not in self._arrived)]
        observed = torch.tensor(order, dtype=torch.int32, device=self._params[0].device)
        dist.broadcast(observed, src=0 if self.group is None else dist.get_global_rank(self.group, 0), group=self.group)
        if observed.tolist() != [self._numbers[name] for names in self.buckets for name in names]:
            self._fill_buckets(observed.tolist())


def in_buckets(
    params: Mapping[int, Tensor],
    groups: Sequence[Group],
    bucket_bytes: int,
    first_bucket_bytes: int | None,
    dtype_of: Callable[[Tensor], torch.dtype],
) -> list[list[int]]:
    """The numbers of `params`, which become ready in this order, in buckets of one dtype, device and group.

    Each group's are planned by themselves: elsewhere what belongs to another group may be of another size.
    """
    plan: list[list[int]] = []
    for group in dict.fromkeys(groups):
        own = {number: each for number, each in params.items() if groups[number] is group}
        sizes = [each.numel() * dtype_of(each).itemsize for each in own.values()]
        kinds = [(dtype_of(each), each.device) for each in own.values()]
        buckets = plan_buckets(sizes, bucket_bytes, first_bucket_bytes=first_bucket_bytes, kinds=kinds)
        plan += [[list(own)[place] for place in bucket] for bucket in buckets]
    order = {number: place for place, number in enumerate(params)}
    return sorted(plan, key=lambda bucket: order[bucket[-1]])


def _dtype(parameter: Tensor) -> torch.dtype:
    """Of its gradient."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype
