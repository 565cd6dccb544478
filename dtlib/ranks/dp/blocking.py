"""The two ways without overlap: many small all-reduces, or a single large one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dtlib.ranks.mesh import Group

from .base import DataParallel


class _Blocking(DataParallel):
    """Nothing is sent while backward runs."""

    def _ready(self, index: int) -> None:
        pass

    def _abandon(self) -> None:
        pass


class NaiveDataParallel(_Blocking):
    """One blocking all-reduce a parameter, after the backward pass: 2(N−1)α for each of them. See `DataParallel`."""

    @torch.no_grad()
    def _average(self, unused: Sequence[int]) -> None:
        for parameter, group in zip(self._params, self._groups, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad = parameter.grad.contiguous().mul_(1 / self.world_size)
            dist.all_reduce(parameter.grad, group=group)


class FlatDataParallel(_Blocking):
    """One blocking all-reduce of all gradients, one for each dtype and group, after the backward pass.

    See `DataParallel`. Afterwards the gradients are views of one flat buffer.
    """

    @torch.no_grad()
    def _average(self, unused: Sequence[int]) -> None:
        kinds: dict[tuple[torch.dtype, torch.device, Group], list[Tensor]] = {}
        for parameter, group in zip(self._params, self._groups, strict=True):
            kinds.setdefault((parameter.dtype, parameter.device, group), []).append(parameter)
        for (_, _, group), alike in kinds.items():
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in alike]
            flat = torch.cat([grad.reshape(-1) for grad in grads]).mul_(1 / self.world_size)
            dist.all_reduce(flat, group=group)
            for parameter, part in zip(alike, flat.split([p.numel() for p in alike]), strict=True):
                parameter.grad = part.view(parameter.shape)
