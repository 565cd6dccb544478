"""Buckets of gradients that travel while the backward pass is still running: what torch's DDP does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtlib.theory.dp import plan_buckets
from dtlib.theory.units import MiB

from .base import DataParallel


@dataclass
class _Bucket:
    """Neighbouring gradients, the flat buffer they travel in, and how many of them are still to come."""

    indices: list[int]
    flat: Tensor
    views: dict[int, Tensor]
    missing: int = field(init=False)
    work: dist.Work | None = None

    def __post_init__(self) -> None:
        self.missing = len(self.indices)


class BucketedDataParallel(DataParallel):
    """Average each bucket of gradients as soon as its last one is there. See `DataParallel`.

    `bucket_bytes` closes a bucket once it is that full; `first_bucket_bytes` the first one, smaller so that the link
    has something to do early. Buckets follow the reverse of the order in which the parameters were registered, and
    after the first backward pass the order in which gradients really became ready on rank 0. All ranks start
    their buckets in one order, whatever the order of readiness: collectives must match.

    `overlap=False` keeps everything but the time: all buckets start after the backward pass (a blocking variant to
    measure against). With `gradient_as_bucket_view` the gradients are views of the buffers, which saves one copy of
    them; without, each parameter keeps a gradient of its own. ``ValueError`` for a size below 1.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        bucket_bytes: int = 25 * MiB,
        first_bucket_bytes: int | None = MiB,
        overlap: bool = True,
        gradient_as_bucket_view: bool = True,
        group: dist.ProcessGroup | None = None,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
    ) -> None:
        plan_buckets([], bucket_bytes, first_bucket_bytes=first_bucket_bytes)  # refuse bad sizes before sending
        super().__init__(
            module,
            group=group,
            broadcast_buffers=broadcast_buffers,
            find_unused_parameters=find_unused_parameters,
        )
        self.bucket_bytes, self.first_bucket_bytes = bucket_bytes, first_bucket_bytes
        self.overlap, self.gradient_as_bucket_view = overlap, gradient_as_bucket_view
        self._next = 0  # the bucket that starts next
        self._order_is_observed = find_unused_parameters
        self._buckets: list[_Bucket] = []
        if self.world_size > 1:
            self._fill_buckets(list(reversed(range(len(self._params)))))

    @property
    def buckets(self) -> list[list[str]]:
        """The names of the parameters in each bucket, in the order in which buckets are sent."""
        return [[self._names[i] for i in bucket.indices] for bucket in self._buckets]

    def _fill_buckets(self, order: Sequence[int]) -> None:
        params = [self._params[i] for i in order]
        plan = plan_buckets(
            [p.numel() * _dtype(p).itemsize for p in params],
            self.bucket_bytes,
            first_bucket_bytes=self.first_bucket_bytes,
            kinds=[(_dtype(p), p.device) for p in params],
        )
        self._buckets = [self._bucket([order[i] for i in indices]) for indices in plan]
        self._where = {index: bucket for bucket in self._buckets for index in bucket.indices}

    def _bucket(self, indices: list[int]) -> _Bucket:
        params = [self._params[i] for i in indices]
        flat = torch.empty(sum(p.numel() for p in params), dtype=_dtype(params[0]), device=params[0].device)
        parts = flat.split([p.numel() for p in params])
        return _Bucket(
            indices, flat, {i: part.view(self._params[i].shape) for i, part in zip(indices, parts, strict=True)}
        )

    def _ready(self, index: int) -> None:
        self._pack(index)
        if self.overlap:
            self._start_full_buckets()

    @torch.no_grad()
    def _pack(self, index: int) -> None:
        """Put a gradient, already divided by N, where it travels."""
        bucket, parameter = self._where[index], self._params[index]
        view, grad = bucket.views[index], parameter.grad
        if grad is None:
            view.zero_()
        elif grad.dtype != view.dtype:
            raise RuntimeError(
                f"the gradient of {self._names[index]!r} is {grad.dtype}, and was to be {view.dtype} when the module "
                "was wrapped: set grad_dtype, or make the optimizer that does, before"
            )
        elif grad is view:  # it was accumulated in its place
            view.mul_(1 / self.world_size)
        else:
            torch.mul(grad, 1 / self.world_size, out=view)
        if self.gradient_as_bucket_view or grad is None:
            parameter.grad = view if self.gradient_as_bucket_view else view.clone()
        bucket.missing -= 1

    def _start_full_buckets(self) -> None:
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            bucket = self._buckets[self._next]
            bucket.work = dist.all_reduce(bucket.flat, group=self.group, async_op=True)
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
                for index, view in bucket.views.items():
                    self._params[index].grad.copy_(view)
        if not self._order_is_observed:
            self._order_is_observed = True
            self._follow_rank_0()

    def _abandon(self) -> None:
        self._wait()

    def _wait(self) -> None:
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()
            bucket.work, bucket.missing = None, len(bucket.indices)
        self._next = 0

    def _follow_rank_0(self) -> None:
        """Fill the buckets anew, in the order in which gradients became ready on rank 0."""
        order = [*self._arrived, *(i for i in range(len(self._params)) if i not in self._arrived)]
        observed = torch.tensor(order, dtype=torch.int32, device=self._params[0].device)
        dist.broadcast(observed, src=0 if self.group is None else dist.get_global_rank(self.group, 0), group=self.group)
        if observed.tolist() != [i for bucket in self._buckets for i in bucket.indices]:
            self._fill_buckets(observed.tolist())


def _dtype(parameter: Tensor) -> torch.dtype:
    """Of its gradient."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype
