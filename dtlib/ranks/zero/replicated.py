"""Stages 1 and 2: every rank keeps all weights, and updates its chunk of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dtlib.theory.dp import plan_buckets
from dtlib.theory.units import MiB

from ._exchange import Gather
from ._flat import Flat
from ._handles import Handles
from .base import MakeOptimizer, Zero


class _Replicated(Zero):
    """What stages 1 and 2 have in common: buckets of parameters, and a gather after the step."""

    def __init__(
        self,
        module: nn.Module,
        make_optimizer: MakeOptimizer,
        *,
        bucket_bytes: int = 25 * MiB,
        first_bucket_bytes: int | None = MiB,
        **options: Any,
    ) -> None:
        plan_buckets([], bucket_bytes, first_bucket_bytes=first_bucket_bytes)  # refuse bad sizes before sending
        self.bucket_bytes, self.first_bucket_bytes = bucket_bytes, first_bucket_bytes
        self._next = 0  # the bucket that starts next
        super().__init__(module, make_optimizer, **options)

    @property
    def buckets(self) -> list[list[str]]:
        """The names of the parameters in each bucket, in the order in which buckets are sent."""
        return [[self._names[i] for i in flat.indices] for flat in self._flats]

    def _lay_out(self) -> list[Flat]:
        order = list(reversed(range(len(self._params))))
        plan = plan_buckets(
            [self._params[i].numel() * self._params[i].element_size() for i in order],
            self.bucket_bytes,
            first_bucket_bytes=self.first_bucket_bytes,
            kinds=[(self._params[i].dtype, self._params[i].device) for i in order],
        )
        flats = []
        for number, bucket in enumerate(plan):
            indices = [order[i] for i in bucket]
            params = [self._params[i] for i in indices]
            flat = Flat(number, indices, params, self._peers.rank, self._peers.n)
            for index, parameter in zip(indices, params, strict=True):
                parameter.data = flat.view(flat.full, index)
            flats.append(flat)
        return flats

    def _begin(self) -> None:
        if not self._running:
            self._next = 0
        super()._begin()

    def _complete(self, flat: Flat) -> None:
        """Start the buckets in one order on all ranks, whatever the order of readiness: their waits must match."""
        if not (self._syncing and self.overlap):
            return
        while self._next < len(self._flats) and self._flats[self._next].missing == 0:
            self._start(self._flats[self._next])
            self._next += 1

    def _publish(self) -> None:
        gathers = [Gather(self._peers, flat.full, flat.bounds, flat.number) for flat in self._flats]
        for gather in gathers:
            gather.wait()

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the wrapped module, and into master copies. Every rank must load the same state: nothing is
        sent."""
        result = super().load_state_dict(*args, **kwargs)
        with torch.no_grad():
            for flat in self._flats:
                flat.give_master()
        return result


class ZeroStage1(_Replicated):
    """ZeRO stage 1: the states of the optimizer are split among the ranks. See `Zero` for the arguments.

    | kept by a rank of N | bytes |
    |---|---|
    | weights | Ψ · width |
    | gradients | Ψ · width |
    | master copy and optimizer states | of Ψ/N elements, one more at most for each bucket |

    - **backward**: gradients are collected in buckets. A full one is reduce-scattered while the backward pass goes on,
      (N−1)/N · Ψ · width bytes sent in all. Buckets stay: a ``.grad`` of the module is a view of one, where this rank's
      chunk is the mean and the rest is local.
    - **step**: each rank updates its chunk of each bucket, then all gather: (N−1)/N · Ψ · width.

    `bucket_bytes` and `first_bucket_bytes` as in `dp.BucketedDataParallel`; buckets follow the reverse order of
    registration. Source: Rajbhandari et al. 2020, arXiv 1910.02054, section 5.1.
    """

    in_flight = 2

    def __init__(
        self,
        module: nn.Module,
        make_optimizer: MakeOptimizer,
        *,
        bucket_bytes: int = 25 * MiB,
        first_bucket_bytes: int | None = MiB,
        **options: Any,
    ) -> None:
        self._stale: set[int] = set()  # buckets whose foreign chunks have been handed to their owners
        super().__init__(
            module, make_optimizer, bucket_bytes=bucket_bytes, first_bucket_bytes=first_bucket_bytes, **options
        )

    def _hooks_on(self, parameter: Tensor, index: int) -> Handles:
        return Handles(parameter.register_hook(_detach(self, index)), super()._hooks_on(parameter, index))

    def _ready(self, index: int) -> None:
        flat = self._where[index]
        if flat.number in self._stale:
            self._freshen(flat)
        super()._ready(index)
        self._params[index].grad = flat.view(flat.buffer, index)

    @torch.no_grad()
    def _freshen(self, flat: Flat) -> None:
        """Make a used buffer ready for more: keep the mean that it holds, count the sent parts as zero."""
        self._stale.discard(flat.number)
        if flat.grad is None or flat.buffer is None:
            return
        flat.buffer[flat.own].div_(self.num_replicas)  # which all add theirs once more
        flat.buffer[: flat.own.start].zero_()
        flat.buffer[flat.own.stop :].zero_()
        flat.filled = set(flat.indices) - flat.resting

    def _keep(self, flat: Flat, own: Tensor) -> None:
        flat.grad = own
        self._stale.add(flat.number)
        for index in flat.indices:
            self._params[index].grad = flat.view(flat.buffer, index)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, also what was added up inside ``no_sync``. ``optimizer.zero_grad`` is the same.

        The buckets' memory is kept for the next backward pass.
        """
        self._stale.update(flat.number for flat in self._flats)
        super().zero_grad(set_to_none)


class ZeroStage2(_Replicated):
    """ZeRO stage 2: optimizer states and gradients are split among the ranks. See `Zero` for the arguments.

    | kept by a rank of N | bytes |
    |---|---|
    | weights | Ψ · width |
    | gradients, master copy and optimizer states | of Ψ/N elements, one more at most for each bucket |

    - **backward**: gradients are collected in buckets. A full bucket is reduce-scattered at once, (N−1)/N · Ψ · width
      bytes sent in all, and freed: one fills while ``in_flight`` are under way, each with room beside it for the N−1
      chunks that arrive. The module's ``.grad`` stay None; those of ``optimizer``'s pieces are the mean.
    - **step**: each rank updates its chunk of each bucket, then all gather: (N−1)/N · Ψ · width.

    Inside ``no_sync`` nothing is sent, so the full gradient has to stay: accumulate without it to keep the memory
    small, for a reduce-scatter more each time. Source: Rajbhandari et al. 2020, arXiv 1910.02054, section 5.2.
    """

    def _keep(self, flat: Flat, own: Tensor) -> None:
        flat.grad = own.clone() if flat.grad is None else flat.grad.add_(own)
        flat.buffer = None


def _detach(wrapper: ZeroStage1, index: int) -> Any:
    def before_accumulation(gradient: Tensor) -> None:
        # What is in the bucket stays there: the new gradient comes beside it and is added by `_ready`.
        wrapper._params[index].grad = None

    return before_accumulation
