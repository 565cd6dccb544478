"""Checkpoints of ranks that all hold the same: the first one writes, every number of ranks reads."""

from __future__ import annotations

import os
from typing import Any

from torch.optim import Optimizer

from dtlib.ranks.shared import checkpoint
from dtlib.ranks.shared.background import Background
from dtlib.ranks.shared.held import Held, held_besides, held_whole, places

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
    settings = {"groups": checkpoint.options_of(optimizer), "extra": extra}
    checkpoint.save(folder, _held(model, optimizer), settings, model.group, keep=keep, background=background)


def load(model: DataParallel, optimizer: Optimizer, folder: str | os.PathLike[str]) -> Any:
    """Read what `save` wrote into `model` and `optimizer`, and return `extra`; all ranks must call it.

    ``ValueError`` on all ranks before anything is changed if there is no finished checkpoint, if it is of other
    parameters or groups, or if a file is not as it was written.
    """
    settings = checkpoint.options_in(folder, optimizer)
    checkpoint.load(folder, _held(model, optimizer), model.group)
    checkpoint.go_on(optimizer, settings)
    return settings["extra"]


def _held(model: DataParallel, optimizer: Optimizer) -> list[Held]:
    module, group = model.module, model.group
    return [*held_whole(module, places(module), optimizer, group), *held_besides(module, group)]
