"""Checkpoints of a mesh, which any mesh can read."""

from __future__ import annotations

import os
from typing import Any

from dtlib.ranks.shared import checkpoint
from dtlib.ranks.shared.background import Background
from dtlib.ranks.zero import Zero

from .training import Training


def save(
    training: Training,
    folder: str | os.PathLike[str],
    *,
    extra: Any = None,
    keep: int = 1,
    background: Background | None = None,
) -> None:
    """Write weights, the optimizers' states, their settings and the first rank's `extra` to `folder`, which all ranks
    see; all must call it.

    Each element is written once, by a rank that has it. A checkpoint is a folder of its own inside; when it is finished
    the newest `keep` stay, so once there has been one, at every moment one is whole. With a `Background` of
    `reliability` training goes on while it is written.
    """
    settings = {"groups": checkpoint.options_of(training.optimizers[0]), "extra": extra}
    checkpoint.save(folder, list(training.held()), settings, keep=keep, background=background)


def load(training: Training, folder: str | os.PathLike[str]) -> Any:
    """Read the last finished checkpoint in `folder`, from whatever mesh it is, and return `extra`; all ranks must call
    it.

    Gradients are forgotten. One process reads the weights alone with ``torch.distributed.checkpoint.load``: they have
    the names of the whole model's parameters. ``ValueError`` on all ranks before anything is changed if there is none,
    if it is of other parameters, or if a file is not as it was written.
    """
    settings = checkpoint.settings_of(folder)
    checkpoint.load(folder, list(training.held()))
    for part, optimizer in zip(training.parts, training.optimizers, strict=True):
        checkpoint.go_on(optimizer, settings)
        if isinstance(part, Zero):
            part.publish()
    return settings["extra"]
