"""Checkpoints that every rank writes its part of, and that any number of ranks can read.

A part holds, for each piece of a parameter that the rank owns, which elements it has and their weights and optimizer
states. Parts say nothing about chunks: a reader takes the elements that it owns from wherever they lie.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .shard import Shard
from .zero import Zero

_INDEX, _FORMAT = "index.json", 1


def save(model: Zero, folder: str | os.PathLike[str]) -> None:
    """Write `model` and its optimizer to `folder`, which all ranks see; every rank must call it.

    Each rank writes one file, of its Ψ/N elements; rank 0 also buffers and what is not sharded. An index is written at
    the end: a folder without one holds no finished checkpoint. What was there before is replaced. Gradients are not
    saved. ``TypeError`` unless `model` is a `Zero`.
    """
    folder, rank = _checked(model, folder), dist.get_rank(model.group)
    writes = model.replicas is None or dist.get_rank(model.replicas) == 0  # the other replicas own the same
    names = _names(model.world_size)
    if rank == 0 and writes:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _INDEX).unlink(missing_ok=True)
    _meet(model)
    part: dict[str, Any] = {"pieces": {}}
    for shard in model.all_shards:
        for number in shard.pieces:
            part["pieces"][shard.names[number]] = _piece(model, shard, number)
    if rank == 0:
        part["rest"] = _rest(model)
        part["groups"] = [{k: v for k, v in group.items() if k != "params"} for group in model.optimizer.param_groups]
    if writes:
        torch.save(part, folder / (names[rank] + ".unfinished"))
        os.replace(folder / (names[rank] + ".unfinished"), folder / names[rank])
    _meet(model)
    if rank == 0 and writes:
        index = {"format": _FORMAT, "parts": len(names), "shapes": _shapes(model), "aliases": _aliases(model)}
        text = json.dumps(index | {"groups": model.group_names}, indent=1)
        (folder / (_INDEX + ".unfinished")).write_text(text, encoding="utf-8")
        os.replace(folder / (_INDEX + ".unfinished"), folder / _INDEX)
        for old in set(folder.glob("part-*.pt")) - {folder / name for name in names}:
            old.unlink()
    _meet(model)


def load(model: Zero, folder: str | os.PathLike[str]) -> None:
    """Read what `save` wrote into `model` and its optimizer; every rank must call it.

    The checkpoint may come from another number of ranks and another stage. Each rank reads the elements it owns; after
    that stages 1 and 2 gather the weights, (N−1)/N · Ψ · width bytes sent. Gradients are forgotten. ``ValueError``
    before anything is changed if there is no finished checkpoint, or if it is of other parameters, shapes or groups.
    """
    folder = _checked(model, folder)
    index, parts = _read(folder)
    rest = {name: value for name, value in _rest(model).items() if isinstance(value, Tensor)}
    mine = {name: list(value.shape) for name, value in rest.items()} | _shapes(model)
    theirs = {name: list(value.shape) for name, value in parts[0]["rest"].items() if isinstance(value, Tensor)}
    theirs |= index["shapes"]
    for name in {**mine, **theirs}:
        if theirs.get(name) != mine.get(name):
            here, there = (f"of shape {tuple(each[name])}" if name in each else "missing" for each in (mine, theirs))
            raise ValueError(
                f"folder must hold the same tensors as model; {name!r} is {here} here and {there} in {folder}"
            )
    if len(index["groups"]) != len(model.optimizer.param_groups):
        raise ValueError(
            f"folder must hold as many parameter groups as the optimizer has, {len(model.optimizer.param_groups)}; "
            f"{folder} holds {len(index['groups'])}"
        )
    model.zero_grad()
    with torch.no_grad():
        for name, value in rest.items():  # these are the module's own tensors
            value.copy_(_elements(parts, name, 0, value.numel())["weight"].view(value.shape))
        for shard in model.all_shards:
            for number in shard.pieces:
                _fill(model, shard, number, parts)
    for group, saved in zip(model.optimizer.param_groups, parts[0]["groups"], strict=True):
        group.update(saved)
    model.publish()


def merge(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """A checkpoint as one process would have saved it.

    ``"module"`` is the module's state dict and ``"optimizer"`` that of an optimizer over the same parameter groups, so
    both can be given to ``load_state_dict``. ``ValueError`` if there is no finished checkpoint in `folder`.
    """
    index, parts = _read(Path(folder))
    module, state = dict(parts[0]["rest"]), {}
    for name, shape in index["shapes"].items():
        stop = torch.Size(shape).numel()
        whole = _elements(parts, name, 0, stop)
        module[name] = whole.pop("weight").view(shape)
        state[name] = {k: v.view(shape) if _is_cut(v, stop) else v for k, v in whole.items()}
    module.update({alias: module[name] for alias, name in index["aliases"].items()})
    numbers = {name: i for i, name in enumerate(name for names in index["groups"] for name in names)}
    groups = [
        {**saved, "params": [numbers[name] for name in names]}
        for saved, names in zip(parts[0]["groups"], index["groups"], strict=True)
    ]
    optimizer = {"state": {i: state[name] for name, i in numbers.items() if state[name]}, "param_groups": groups}
    return {"module": module, "optimizer": optimizer}


def _names(num_parts: int) -> list[str]:
    return [f"part-{number:05d}.pt" for number in range(num_parts)]


def _checked(model: Any, folder: str | os.PathLike[str]) -> Path:
    if not isinstance(model, Zero):
        raise TypeError(f"model must be a Zero, not {type(model).__name__}")
    return Path(folder)


def _meet(model: Zero) -> None:
    dist.barrier(group=model.group)
    if model.replicas is not None:
        dist.barrier(group=model.replicas)


def _shapes(model: Zero) -> dict[str, list[int]]:
    """The shape of each parameter that the ranks split."""
    return {shard.names[i]: list(shape) for shard in model.all_shards for i, shape in shard.shapes.items()}


def _piece(model: Zero, shard: Shard, number: int) -> dict[str, Any]:
    """A piece as it is saved. Clones: a view would take the whole chunk with it into the file."""
    kept, where = shard.chunk if shard.master is None else shard.master, shard.within(number)
    state = model.optimizer.state.get(shard.weights[number], {}) if number in shard.weights else {}
    copies = {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
    return {"start": where.start, "stop": where.stop, "weight": kept[shard.pieces[number]].clone(), "state": copies}


def _rest(model: Zero) -> dict[str, Any]:
    sharded = _shapes(model).keys() | _aliases(model).keys()
    return {name: value for name, value in model.module.state_dict().items() if name not in sharded}


def _aliases(model: Zero) -> dict[str, str]:
    """The other names of tied parameters that are split."""
    first, sharded = {id(p): name for name, p in model.module.named_parameters()}, _shapes(model).keys()
    every = model.module.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in every if name != first[id(p)] and first[id(p)] in sharded}


def _read(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The index, and the parts as maps of the files: only what is used is read."""
    if not (folder / _INDEX).exists():
        raise ValueError(f"folder must hold a finished checkpoint; there is no {_INDEX} in {folder}")
    index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
    if index.get("format") != _FORMAT:
        raise ValueError(f"folder must hold a checkpoint of format {_FORMAT}; {folder} has {index.get('format')!r}")
    names = _names(index["parts"])
    if missing := [name for name in names if not (folder / name).exists()]:
        raise ValueError(f"folder must hold all {len(names)} parts of a checkpoint; {folder} misses {missing[0]}")
    return index, [torch.load(folder / name, mmap=True, weights_only=True, map_location="cpu") for name in names]


def _is_cut(value: Any, length: int) -> bool:
    return isinstance(value, Tensor) and value.shape == (length,)


def _elements(parts: Sequence[Mapping[str, Any]], name: str, start: int, stop: int) -> dict[str, Any]:
    """Elements [start, stop) of a tensor and of its states, from the saved pieces that have some of them."""
    saved: Iterable[Mapping[str, Any]] = [part["pieces"][name] for part in parts if name in part["pieces"]]
    if name in parts[0]["rest"]:  # it was not split
        whole = parts[0]["rest"][name].reshape(-1)
        saved = [{"start": 0, "stop": len(whole), "weight": whole, "state": {}}]
    result: dict[str, Any] = {} if start < stop else {"weight": torch.empty(0)}
    for entry in saved:
        low, high = max(start, entry["start"]), min(stop, entry["stop"])
        if low >= high:
            continue
        for key, value in {"weight": entry["weight"], **entry["state"]}.items():
            if _is_cut(value, entry["stop"] - entry["start"]):
                into = result.setdefault(key, torch.empty(stop - start, dtype=value.dtype))
                into[low - start : high - start] = value[low - entry["start"] : high - entry["start"]]
            else:
                result.setdefault(key, value)
    return result


def _fill(model: Zero, shard: Shard, number: int, parts: Sequence[Mapping[str, Any]]) -> None:
    where, stepped = shard.within(number), shard.weights.get(number)
    values = _elements(parts, shard.names[number], where.start, where.stop)
    weight = values.pop("weight")
    for kept in (shard.chunk, shard.master):
        if kept is not None:
            kept[shard.pieces[number]] = weight.to(kept.device)
    if stepped is None:
        return  # frozen: the optimizer does not know it
    model.optimizer.state.pop(stepped, None)
    for key, value in values.items():
        if isinstance(value, Tensor):  # torch keeps the number of steps, a scalar, on the CPU
            value = value.to(stepped.device) if value.dim() else value.clone()
        model.optimizer.state[stepped][key] = value
