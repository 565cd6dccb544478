"""Checkpoints of a mesh, which any mesh can read."""

from __future__ import annotations

import os

from dtlib.ranks.shared import checkpoint
from dtlib.ranks.zero import Zero

from .training import Training


def save(training: Training, folder: str | os.PathLike[str]) -> None:
    """Write weights, the optimizers' states and their settings to `folder`, which all ranks see; all must call it.

    Each element is written once, by a rank that has it. A checkpoint is a folder of its own inside; when it is finished
    the older ones go, so at every moment one is whole.
    """
    groups = training.optimizers[0].param_groups
    settings = {"groups": [{k: v for k, v in group.items() if k != "params"} for group in groups]}
    checkpoint.save(folder, list(training.held()), settings)


def load(training: Training, folder: str | os.PathLike[str]) -> None:
    """Read the last finished checkpoint in `folder`, from whatever mesh it is; all ranks must call it.

    Gradients are forgotten. One process reads the weights alone with ``torch.distributed.checkpoint.load``: they have
    the names of the whole model's parameters. ``ValueError`` on all ranks before anything is changed if there is none,
    or if it is of other parameters.
    """
    saved = checkpoint.settings_of(folder)["groups"]
    checkpoint.load(folder, list(training.held()))
    for part, optimizer in zip(training.parts, training.optimizers, strict=True):
        for group, settings in zip(optimizer.param_groups, saved, strict=True):
            group.update(settings)
        optimizer.zero_grad()
        if isinstance(part, Zero):
            part.publish()
