"""Checkpoints that every rank writes its part of, and that any number of ranks can read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from dtlib.ranks.mesh import Group
from dtlib.ranks.shared import checkpoint
from dtlib.ranks.shared.background import Background
from dtlib.ranks.shared.held import Held, Place, held_besides, held_whole

from .zero import Zero


def held(wrapped: nn.Module, places: Mapping[int, Place], optimizer: Optimizer, group: Group = None) -> Iterator[Held]:
    """The parameters of ``wrapped.module``, which lie in the whole model as `places` says, and their states: of what a
    `Zero` has spread this rank's pieces, and of all that the ranks of `group` have alike the whole."""
    spread = set[int]()
    for shard in wrapped.all_shards if isinstance(wrapped, Zero) else ():
        kept = shard.chunk if shard.master is None else shard.master
        spread |= {id(parameter) for parameter in shard.params.values()}
        for index, piece in shard.pieces.items():
            place, start = places[id(shard.params[index])], shard.within(index).start
            yield Held(place, kept[piece], start, shard.weights.get(index), optimizer)
    yield from held_whole(wrapped.module, places, optimizer, group, spread)


def save(
    model: Zero,
    folder: str | os.PathLike[str],
    *,
    extra: Any = None,
    keep: int = 1,
    background: Background | None = None,
) -> None:
    """Write `model`, its optimizer and `extra` to `folder`, which all ranks see; every rank must call it.

    Each rank writes its Ψ/N elements; rank 0 also buffers, what is not sharded and its `extra`: tensors, numbers,
    strings, lists and dictionaries of them. When the new checkpoint is finished, the newest `keep` stay. Gradients are
    not saved. ``TypeError`` unless `model` is a `Zero`. With a `Background` of `reliability`, of the model's group,
    training goes on while it is written.
    """
    _refuse(model)
    if model.replicas is None or dist.get_rank(model.replicas) == 0:  # the other replicas own the same
        aliases, empty = _aliases(model), [each for each in model.places.values() if 0 in each.whole_shape]
        settings = {
            "groups": checkpoint.options_of(model.optimizer), "names": model.group_names, "extra": extra,
            "aliases": aliases, "empty": {each.name: each.whole_shape for each in empty},  # of these nothing is written
        }  # fmt: skip
        checkpoint.save(folder, _all(model), settings, model.group, keep=keep, background=background)
    if model.replicas is not None and background is None:
        dist.barrier(group=model.replicas)


def load(model: Zero, folder: str | os.PathLike[str]) -> Any:
    """Read what `save` wrote into `model` and its optimizer, and return `extra`; every rank must call it.

    The checkpoint may come from another number of ranks and another stage. Each rank reads the elements it owns; after
    that stages 1 and 2 gather the weights, (N−1)/N · Ψ · width bytes sent. Gradients are forgotten. ``ValueError``
    before anything is changed if there is no finished checkpoint, if it is of other parameters, shapes or groups, or if
    a file is not as it was written.
    """
    _refuse(model)
    settings = checkpoint.options_in(folder, model.optimizer)
    checkpoint.load(folder, _all(model), model.group)
    checkpoint.go_on(model.optimizer, settings)
    model.publish()
    return settings["extra"]


def merge(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """A checkpoint as one process would have saved it.

    ``"module"`` is the module's state dict and ``"optimizer"`` that of an optimizer over the same parameter groups, so
    both can be given to ``load_state_dict``. ``ValueError`` if there is no finished checkpoint in `folder`.
    """
    settings = checkpoint.settings_of(folder)
    module, states = checkpoint.merged(folder)
    module |= {name: torch.empty(shape) for name, shape in settings["empty"].items()}
    module |= {alias: module[name] for alias, name in settings["aliases"].items()}
    numbers = {name: i for i, name in enumerate(name for names in settings["names"] for name in names)}
    groups = [
        {**saved, "params": [numbers[name] for name in names]}
        for saved, names in zip(settings["groups"], settings["names"], strict=True)
    ]
    state = {i: states[name] for name, i in numbers.items() if name in states}
    return {"module": module, "optimizer": {"state": state, "param_groups": groups}}


def _refuse(model: Any) -> None:
    if not isinstance(model, Zero):
        raise TypeError(f"model must be a Zero, not {type(model).__name__}")


def _all(model: Zero) -> list[Held]:
    pieces = held(model, model.places, model.optimizer, model.group)
    return [*pieces, *held_besides(model.module, model.group)]


def _aliases(model: Zero) -> dict[str, str]:
    """The other names of tied parameters."""
    first = {id(p): name for name, p in model.module.named_parameters()}
    every = model.module.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in every if name != first[id(p)]}
