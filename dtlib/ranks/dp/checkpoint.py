"""Checkpoints of ranks that all hold the same: the first one writes, every number of ranks reads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from dtlib.ranks.shared import checkpoint
from dtlib.ranks.shared.background import Background
from dtlib.ranks.shared.held import Held, Place, places
from dtlib.ranks.shared.replicas import group_of

from .base import DataParallel


def save(
    model: DataParallel,
    optimizer: Optimizer,
    folder: str | os.PathLike[str],
    *,
    extra: Any = None,
    keep: int = 1,
    background: Background | None = None,
) -> None:
    """Write `model`, `optimizer` and the first rank's `extra` to `folder`, which all ranks see; all must call it.

    The first rank writes all but what belongs to other ranks. When the new checkpoint is finished, the newest `keep`
    stay. Gradients are not saved. With a `Background` of `reliability` training goes on while it is written.
    """
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    settings = {"groups": groups, "extra": extra}
    checkpoint.save(folder, list(_held(model, optimizer)), settings, model.group, keep=keep, background=background)


def load(model: DataParallel, optimizer: Optimizer, folder: str | os.PathLike[str]) -> Any:
    """Read what `save` wrote into `model` and `optimizer`, and return `extra`; all ranks must call it.

    ``ValueError`` on all ranks before anything is changed if there is no finished checkpoint, if it is of other
    parameters or groups, or if a file is not as it was written.
    """
    settings = checkpoint.settings_of(folder)
    saved, groups = settings["groups"], optimizer.param_groups
    if len(saved) != len(groups):
        must = f"folder must hold as many parameter groups as the optimizer has, {len(groups)}"
        raise ValueError(f"{must}; {folder} holds {len(saved)}")
    checkpoint.load(folder, list(_held(model, optimizer)), model.group)
    for group, options in zip(groups, saved, strict=True):
        group.update(options)
    optimizer.zero_grad()
    return settings["extra"]


def _held(model: DataParallel, optimizer: Optimizer) -> Iterator[Held]:
    """Parameters, and whatever else of tensors is in the module's state."""
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    where, parameters = places(model.module), dict(model.module.named_parameters(remove_duplicate=False))
    for p in model.module.parameters():
        is_first = dist.get_rank(group_of(p, model.group)) == 0
        yield Held(where[id(p)], p.detach(), 0, p if id(p) in stepped else None, optimizer, is_first)
    for name, value in model.module.state_dict().items():
        if name not in parameters and isinstance(value, Tensor):
            yield Held(Place(name, tuple(value.shape)), value, is_first=dist.get_rank(model.group) == 0)
