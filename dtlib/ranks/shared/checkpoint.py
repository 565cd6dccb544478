"""A checkpoint that every rank writes its elements of, and any number of ranks reads, split and sharded as they are.

The format is torch's own, `torch.distributed.checkpoint`, which knows tensors as boxes; its planners are told here
which boxes a rank has. Weights have the names of the whole model's parameters, so torch reads them in one process; what
an optimizer keeps of each stands beside them, and settings in a file of their own.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from dtlib.ranks.mesh import Group
from dtlib.theory.valid import whole

from .background import Background
from .held import Held


def save(
    folder: str | os.PathLike[str],
    held: Sequence[Held],
    settings: Any,
    group: Group = None,
    *,
    keep: int = 1,
    background: Background | None = None,
) -> None:
    """Write to `folder`, which all ranks see, what they hold and, from the first rank, `settings`; all must call it.

    Each element is written once, by a rank on which it counts. A checkpoint is a folder of its own inside, with a
    number for a name; until it is finished it has the suffix ``.part``, so a rank that is killed at any moment leaves
    the older ones as they were. When it is finished, the newest `keep` stay. ``ValueError`` before anything is written
    for an optimizer that keeps something else than numbers and a tensor like the parameter, or for settings that could
    not be read again. `NotSaved`, on all ranks, where one of them could not write.

    With a `background` of these ranks it is copied now and written later; see there.
    """
    from . import files, planners

    keep, planner = whole("keep", keep, 1), planners.Save(held)
    write = partial(_write, Path(folder), planner, files.packed(settings), keep)
    if background is None:
        write(group)
        return
    if background.ranks != (ranks := dist.get_process_group_ranks(group)):
        raise ValueError(f"background must be of the ranks that save, {ranks}, not of {background.ranks}")
    background.start(planner.found, write)


class NotSaved(RuntimeError):
    """A checkpoint could not be written, and nothing is left of it; the older ones are as they were.

    `failures` has the error of each rank of the group that had one.
    """

    def __init__(self, checkpoint: Path, failures: Mapping[int, BaseException]) -> None:
        told = "; ".join(f"rank {rank}: {type(error).__name__}: {error}" for rank, error in failures.items())
        super().__init__(f"{checkpoint} could not be written, and older checkpoints are as they were; {told}")
        self.failures = dict(failures)


def _write(folder: Path, planner: Any, settings: bytes, keep: int, group: Group) -> None:
    from torch.distributed import checkpoint as dcp

    from . import files

    is_root, older = dist.get_rank(group) == 0, _all_finished(folder)
    new = folder / f"{int(older[-1].name) + 1 if older else 0:06}"
    dist.barrier(group=group)  # nobody looks for the last one after the first has begun
    if is_root:
        for unfinished in folder.glob(f"[0-9]*{files.UNFINISHED}"):
            shutil.rmtree(unfinished, ignore_errors=True)
    dist.barrier(group=group)
    try:
        dcp.save({}, storage_writer=files.Writer(new, settings), planner=planner, process_group=group)
    except dcp.CheckpointException as error:  # as torch tells all ranks, once all have come to an end
        if is_root:
            shutil.rmtree(new.with_suffix(files.UNFINISHED), ignore_errors=True)
        raise NotSaved(new, {rank: cause for rank, (cause, _) in error.failures.items()}) from None
    if is_root:
        for old in older[: max(0, len(older) + 1 - keep)]:
            gone = old.with_suffix(files.UNFINISHED)  # what is half removed must not look like a checkpoint
            os.replace(old, gone)
            shutil.rmtree(gone, ignore_errors=True)
    dist.barrier(group=group)


def last_saved(folder: str | os.PathLike[str]) -> Path | None:
    """The last finished checkpoint in `folder`, None where there is none: ask before a run begins to save."""
    finished = _all_finished(Path(folder))
    return finished[-1] if finished else None


def settings_of(folder: str | os.PathLike[str]) -> Any:
    """The settings of the last finished checkpoint in `folder`; ``ValueError`` if there is none, or if their file is
    not as it was written."""
    from . import files

    last = _finished(folder)
    if found := files.damage(last, (files.SETTINGS,)):
        raise ValueError(_refusal(last, found))
    return torch.load(last / files.SETTINGS, weights_only=True)


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What an optimizer's parameter groups are told, without their parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def options_in(folder: str | os.PathLike[str], optimizer: Optimizer) -> Any:
    """`settings_of` the folder, whose ``"groups"`` are `options_of` such an optimizer; ``ValueError`` too if it has
    another number of groups."""
    settings, num = settings_of(folder), len(optimizer.param_groups)
    if len(settings["groups"]) != num:
        must = f"folder must hold as many parameter groups as the optimizer has, {num}"
        raise ValueError(f"{must}; {folder} holds {len(settings['groups'])}")
    return settings


def go_on(optimizer: Optimizer, settings: Any) -> None:
    """Tell its groups what they were told when these `settings` were saved, and forget gradients."""
    for group, options in zip(optimizer.param_groups, settings["groups"], strict=True):
        group.update(options)
    optimizer.zero_grad()


def load(folder: str | os.PathLike[str], held: Sequence[Held], group: Group = None) -> None:
    """Read the last finished checkpoint in `folder` into what the ranks hold and their optimizers' states; all must
    call it.

    Every file is first held against its sum, by one of the ranks. ``ValueError``, on all ranks and before anything is
    changed, if there is no checkpoint, if it is of other parameters, or if a file is missing or not as it was written:
    the error names the file, the rank that wrote it, and the newest older checkpoint that is whole. To go on from that
    one, remove those after it: to lose steps is not for a library to decide.
    """
    from torch.distributed import checkpoint as dcp

    from . import planners

    last = _finished(folder)
    _refuse_damage(last, group)
    saved = planners.saved_in(last)
    planners.refuse_others(folder, held, saved, group)
    planner = planners.Load(held, saved)
    dcp.load({}, checkpoint_id=last, planner=planner, process_group=group)
    for state, key, number in planner.plain:
        state[key] = number.item()


def merged(folder: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """The last finished checkpoint in `folder` without any ranks: weights, and of each what an optimizer keeps.
    ``ValueError`` as in `load`."""
    from torch.distributed import checkpoint as dcp

    from . import files, planners

    last = _finished(folder)
    if found := files.damage_of_all(last):
        raise ValueError(_refusal(last, found))
    read = {name: torch.empty(e.size, dtype=e.properties.dtype) for name, e in planners.saved_in(last).items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it is to be
        dcp.load(read, checkpoint_id=last, no_dist=True)
    weights, states = dict[str, Tensor](), dict[str, dict[str, Any]]()
    for saved_name, tensor in read.items():
        if not saved_name.startswith(planners.OF_OPTIMIZER):
            weights[saved_name] = tensor
            continue
        name, key = saved_name.split("/", 2)[2].rsplit("/", 1)
        states.setdefault(name, {})[key] = tensor.item() if saved_name.startswith(planners.PLAIN) else tensor
    return weights, states


def _refuse_damage(checkpoint: Path, group: Group) -> None:
    """``ValueError`` on all ranks if a file is not as it was written; each rank reads its share of them."""
    from . import files

    rank, n = dist.get_rank(group), dist.get_world_size(group)
    found = files.damage(checkpoint, (files.METADATA, files.SETTINGS))
    found = found or files.damage(checkpoint, files.shards(checkpoint)[rank::n])
    everyone: list[Any] = [None] * n
    dist.all_gather_object(everyone, found, group=group)
    if found := next((each for each in everyone if each), None):
        refusal = [_refusal(checkpoint, found) if rank == 0 else None]
        dist.broadcast_object_list(refusal, group=group, group_src=0)
        raise ValueError(refusal[0])


def _refusal(checkpoint: Path, found: str) -> str:
    from . import files

    older = _all_finished(checkpoint.parent)
    older = older[: older.index(checkpoint)]
    intact = next((each for each in reversed(older) if files.damage_of_all(each) is None), None)
    hint = f"{intact} is whole: remove what is newer to go on from there" if intact else "no older one is whole"
    return f"folder must hold a checkpoint as it was written, and {found}; {hint}"


def _all_finished(folder: Path) -> list[Path]:
    """The finished checkpoints, oldest first."""
    return sorted((each for each in folder.glob("[0-9]*") if each.name.isdigit()), key=lambda each: int(each.name))


def _finished(folder: str | os.PathLike[str]) -> Path:
    if (last := last_saved(folder)) is None:
        raise ValueError(f"folder must hold a finished checkpoint, and {folder} has none")
    return last
