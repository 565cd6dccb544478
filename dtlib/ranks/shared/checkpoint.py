"""A checkpoint that every rank writes its elements of, and any number of ranks reads, split and sharded as they are.

The format is torch's own, `torch.distributed.checkpoint`, which knows tensors as boxes; its planners are told here
which boxes a rank has. Weights have the names of the whole model's parameters, so torch reads them in one process; what
an optimizer keeps of each stands beside them, and settings in a file of their own.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtlib.ranks.mesh import Group

from .held import Held

_SETTINGS = "settings.pt"


def save(folder: str | os.PathLike[str], held: Sequence[Held], settings: Any, group: Group = None) -> None:
    """Write to `folder`, which all ranks see, what they hold and, from the first rank, `settings`; all must call it.

    Each element is written once, by a rank on which it counts. A checkpoint is a folder of its own inside; when it is
    finished the older ones go, so at every moment one is whole. ``ValueError`` before anything is written for an
    optimizer that keeps something else than numbers and a tensor like the parameter.
    """
    from torch.distributed import checkpoint as dcp

    from . import planners

    folder, is_root, planner = Path(folder), dist.get_rank(group) == 0, planners.Save(held)
    last = _last(folder)
    new = folder / f"{0 if last is None else int(last.name) + 1:06}"
    dist.barrier(group=group)  # nobody looks for the last one after the first has begun
    if is_root:
        shutil.rmtree(new, ignore_errors=True)  # what somebody left unfinished
        new.mkdir(parents=True)
        torch.save(settings, new / _SETTINGS)
    dist.barrier(group=group)
    dcp.save({}, checkpoint_id=new, planner=planner, process_group=group)
    if is_root and last is not None:
        shutil.rmtree(last)
    dist.barrier(group=group)


def settings_of(folder: str | os.PathLike[str]) -> Any:
    """The settings of the last finished checkpoint in `folder`; ``ValueError`` if there is none."""
    return torch.load(_finished(folder) / _SETTINGS, weights_only=True)


def load(folder: str | os.PathLike[str], held: Sequence[Held], group: Group = None) -> None:
    """Read the last finished checkpoint in `folder` into what the ranks hold and their optimizers' states; all must
    call it.

    ``ValueError``, on all ranks and before anything is changed, if there is none, or if it is of other parameters.
    """
    from torch.distributed import checkpoint as dcp

    from . import planners

    last = _finished(folder)
    saved = planners.saved_in(last)
    planners.refuse_others(folder, held, saved, group)
    planner = planners.Load(held, saved)
    dcp.load({}, checkpoint_id=last, planner=planner, process_group=group)
    for state, key, number in planner.plain:
        state[key] = number.item()


def merged(folder: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """The last finished checkpoint in `folder` without any ranks: weights, and of each what an optimizer keeps."""
    from torch.distributed import checkpoint as dcp

    from . import planners

    last = _finished(folder)
    whole = {name: torch.empty(e.size, dtype=e.properties.dtype) for name, e in planners.saved_in(last).items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it is to be
        dcp.load(whole, checkpoint_id=last, no_dist=True)
    weights, states = dict[str, Tensor](), dict[str, dict[str, Any]]()
    for saved_name, tensor in whole.items():
        if not saved_name.startswith(planners.OF_OPTIMIZER):
            weights[saved_name] = tensor
            continue
        name, key = saved_name.split("/", 2)[2].rsplit("/", 1)
        states.setdefault(name, {})[key] = tensor.item() if saved_name.startswith(planners.PLAIN) else tensor
    return weights, states


def _last(folder: Path) -> Path | None:
    """The last finished checkpoint: torch writes its metadata at the end."""
    finished = [each.parent for each in folder.glob("[0-9]*/.metadata")]
    return max(finished, key=lambda each: int(each.name), default=None)


def _finished(folder: str | os.PathLike[str]) -> Path:
    if (last := _last(Path(folder))) is None:
        raise ValueError(f"folder must hold a finished checkpoint, and {folder} has none")
    return last
