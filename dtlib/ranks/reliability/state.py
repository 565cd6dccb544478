"""What a run keeps beside weights and an optimizer's states, as plain data that a checkpoint can hold."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dtlib.ranks.mesh import Group


def capture(group: Group = None, *, own: Mapping[str, Any] | None = None, **parts: Any) -> dict[str, Any]:
    """The `parts` by name and the random states of all ranks, for a checkpoint's ``extra``; all ranks must call it.

    A part with a ``state_dict`` (a scheduler, a scaler, a sampler) is kept as that, anything else (a step) as it is.
    The first rank's parts are what is saved: they must be alike on all. Random states, which are not, are gathered: of
    torch on the CPU and on this rank's GPU, of numpy's and Python's global generators, about 14 kB a rank. Another
    generator is a part of its own.

    `own` are parts with a ``state_dict`` that each rank has of its own, as what an exchange of `compression` has left
    out. The first rank gathers them: as much as it leaves out itself from each rank.
    """
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, random_state(), group=group)
    objects = {name: part.state_dict() for name, part in parts.items() if hasattr(part, "state_dict")}
    values = {name: part for name, part in parts.items() if name not in objects}
    mine = {name: part.state_dict() for name, part in (own or {}).items()}
    owns: list[Any] = [{} for _ in everyone]
    if mine:
        dist.gather_object(mine, owns if dist.get_rank(group) == 0 else None, group=group, group_dst=0)
    return {"objects": objects, "values": values, "random": everyone, "own": owns}


def restore(
    state: Mapping[str, Any], group: Group = None, *, own: Mapping[str, Any] | None = None, **parts: Any
) -> dict[str, Any]:
    """Give the `parts` back their states, and this rank its random ones; returns the plain values by name.

    Whatever casts dice afterwards moves them on: call it last before training. With another number of ranks than
    before no rank has a past of its own: random states stay as the caller has seeded them, and `own` as it is.
    ``ValueError`` before anything is changed unless `parts` and `own` are those with a state that `capture` had.
    """
    objects, rank, n = state["objects"], dist.get_rank(group), dist.get_world_size(group)
    own, owns = own or {}, state["own"]
    for what, given, kept in (("parts", parts, objects), ("own", own, owns[0])):
        if given.keys() != kept.keys():
            raise ValueError(f"{what} must be those that were captured, {sorted(kept)}, not {sorted(given)}")
    for name, part in parts.items():
        part.load_state_dict(objects[name])
    if len(state["random"]) == n:
        for name, part in own.items():
            part.load_state_dict(owns[rank][name])
        set_random_state(state["random"][rank])
    return dict(state["values"])


def random_state() -> dict[str, Any]:
    """The states of the global generators of this process: torch's, numpy's, Python's, and the current GPU's."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002 - who uses the global one has its state to save
    state = {
        "torch": torch.get_rng_state(),
        "numpy": (str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), *map(_plain, rest)),
        "python": random.getstate(),
    }
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set the generators to what `random_state` returned; a GPU's where there is one then and now."""
    torch.set_rng_state(state["torch"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _plain(number: Any) -> int | float:
    return float(number) if isinstance(number, float) else int(number)
