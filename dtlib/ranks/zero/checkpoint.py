"""Checkpoints that every rank writes its part of, and that any number of ranks can read.

A part holds, for each piece of a parameter that the rank owns, which elements it has and their weights and optimizer
states. Parts say nothing about chunks: a reader takes the elements that it owns from wherever they lie.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .shard import Shard
from .zero import Zero

_INDEX = "index.json"
_FORMAT = 1


def save(model: Zero, folder: str | os.PathLike[str]) -> None:
    """Write `model` and its optimizer to `folder`, which all ranks see; every rank must call it.

    Each rank writes one file, of its Ψ/N elements; rank 0 also buffers and what is not sharded. An index is written at
    the end: a folder without one holds no finished checkpoint. What was there before is replaced. Gradients are not
    saved. ``TypeError`` unless `model` is one of the stages.
    """
    _refuse_others(model)
    folder = Path(folder)
    rank, n = dist.get_rank(model.group), model.world_size
    writes = model.replicas is None or dist.get_rank(model.replicas) == 0  # the others own the same
    if rank == 0 and writes:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _INDEX).unlink(missing_ok=True)
    _meet(model)
    part: dict[str, Any] = {"pieces": dict(_pieces(model))}
    if rank == 0:
        part["rest"] = _rest(model)
        part["groups"] = [{k: v for k, v in group.items() if k != "params"} for group in model.optimizer.param_groups]
    if writes:
        _write(folder / _part(rank), lambda path: torch.save(part, path))
    _meet(model)
    if rank == 0 and writes:
        index = {
            "format": _FORMAT,
            "parts": n,
            "shapes": {name: list(shape) for name, shape in _sharded(model)},
            "aliases": _aliases(model),
            "groups": model.group_names,
        }
        _write(folder / _INDEX, lambda path: path.write_text(json.dumps(index, indent=1), encoding="utf-8"))
        for old in folder.glob("part-*.pt"):
            if old.name not in {_part(r) for r in range(n)}:
                old.unlink()
    _meet(model)


def load(model: Zero, folder: str | os.PathLike[str]) -> None:
    """Read what `save` wrote into `model` and its optimizer; every rank must call it.

    The checkpoint may come from another number of ranks and another stage. Each rank reads the elements it owns; after
    that stages 1 and 2 gather the weights, (N−1)/N · Ψ · width bytes sent. Gradients are forgotten. ``ValueError``
    before anything is changed if there is no finished checkpoint, or if it is of other parameters, shapes or groups.
    """
    _refuse_others(model)
    folder = Path(folder)
    index = _read_index(folder)
    parts = _read_parts(folder, index)
    rest = {name: value for name, value in _rest(model).items() if isinstance(value, Tensor)}
    mine = {name: list(value.shape) for name, value in rest.items()}
    mine |= {name: list(shape) for name, shape in _sharded(model)}
    theirs = {name: list(value.shape) for name, value in parts[0]["rest"].items() if isinstance(value, Tensor)}
    _refuse_unlike(folder, theirs | index["shapes"], mine)
    if len(index["groups"]) != len(model.optimizer.param_groups):
        raise ValueError(
            f"folder must hold as many parameter groups as the optimizer has, {len(model.optimizer.param_groups)}; "
            f"{folder} holds {len(index['groups'])}"
        )
    model.zero_grad()
    with torch.no_grad():
        for name, value in rest.items():  # these are the module's own tensors
            value.copy_(_collect(_entries(parts, name), 0, value.numel())["weight"].view(value.shape))
        for shard in model.all_shards:
            for number in shard.pieces:
                _fill(model, shard, number, _entries(parts, shard.names[number]))
    for group, saved in zip(model.optimizer.param_groups, parts[0]["groups"], strict=True):
        group.update(saved)
    model._publish()


def merge(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """A checkpoint as one process would have saved it.

    ``"module"`` is the module's state dict and ``"optimizer"`` that of an optimizer over the same parameter groups, so
    both can be given to ``load_state_dict``. ``ValueError`` if there is no finished checkpoint in `folder`.
    """
    folder = Path(folder)
    index = _read_index(folder)
    parts = _read_parts(folder, index)
    module, state = dict(parts[0]["rest"]), {}
    for name, shape in index["shapes"].items():
        stop = torch.Size(shape).numel()
        whole = _collect(_entries(parts, name), 0, stop)
        module[name] = whole.pop("weight").view(shape)
        state[name] = {
            k: v.view(shape) if isinstance(v, Tensor) and v.shape == (stop,) else v for k, v in whole.items()
        }
    module.update({alias: module[name] for alias, name in index["aliases"].items()})
    numbers = {name: i for i, name in enumerate(name for names in index["groups"] for name in names)}
    groups = [
        {**saved, "params": [numbers[name] for name in names]}
        for saved, names in zip(parts[0]["groups"], index["groups"], strict=True)
    ]
    optimizer = {"state": {i: state[name] for name, i in numbers.items() if state[name]}, "param_groups": groups}
    return {"module": module, "optimizer": optimizer}


def _refuse_others(model: Any) -> None:
    if not isinstance(model, Zero):
        raise TypeError(f"model must be a Zero, not {type(model).__name__}")


def _meet(model: Zero) -> None:
    dist.barrier(group=model.group)
    if model.replicas is not None:
        dist.barrier(group=model.replicas)


def _part(rank: int) -> str:
    return f"part-{rank:05d}.pt"


def _write(path: Path, write: Any) -> None:
    """Write a file as a whole or not at all."""
    unfinished = path.with_name(path.name + ".unfinished")
    write(unfinished)
    os.replace(unfinished, path)


def _sharded(model: Zero) -> Iterator[tuple[str, torch.Size]]:
    """Name and shape of each parameter that the ranks split."""
    return ((shard.names[index], shape) for shard in model.all_shards for index, shape in shard.shapes.items())


def _pieces(model: Zero) -> Iterator[tuple[str, dict[str, Any]]]:
    for shard in model.all_shards:
        for index, piece in shard.pieces.items():
            source, where = shard.chunk if shard.master is None else shard.master, shard.within(index)
            state = model.optimizer.state.get(shard.weights[index], {}) if index in shard.weights else {}
            # Clones: a view would take the whole chunk with it into the file.
            kept = {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
            entry = {"start": where.start, "stop": where.stop, "weight": source[piece].clone(), "state": kept}
            yield shard.names[index], entry


def _rest(model: Zero) -> dict[str, Any]:
    sharded = {name for name, _ in _sharded(model)} | _aliases(model).keys()
    return {name: value for name, value in model.module.state_dict().items() if name not in sharded}


def _aliases(model: Zero) -> dict[str, str]:
    """The other names of tied parameters that are split."""
    first = {id(p): name for name, p in model.module.named_parameters()}
    sharded = {name for name, _ in _sharded(model)}
    every = model.module.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in every if name != first[id(p)] and first[id(p)] in sharded}


def _read_index(folder: Path) -> dict[str, Any]:
    try:
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"folder must hold a finished checkpoint; there is no {_INDEX} in {folder}") from None
    if index.get("format") != _FORMAT:
        raise ValueError(f"folder must hold a checkpoint of format {_FORMAT}; {folder} has {index.get('format')!r}")
    return dict(index)


def _read_parts(folder: Path, index: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The parts as maps of the files: only what is used is read."""
    paths = [folder / _part(rank) for rank in range(index["parts"])]
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        raise ValueError(f"folder must hold all {len(paths)} parts of a checkpoint; {folder} misses {missing[0]}")
    return [torch.load(path, mmap=True, weights_only=True, map_location="cpu") for path in paths]


def _refuse_unlike(folder: Path, theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    odd = [name for name in {**mine, **theirs} if theirs.get(name) != mine.get(name)]
    if odd:
        name = odd[0]
        here, there = (f"of shape {tuple(each[name])}" if name in each else "missing" for each in (mine, theirs))
        raise ValueError(f"folder must hold the same tensors as model; {name!r} is {here} here and {there} in {folder}")


def _entries(parts: Sequence[Mapping[str, Any]], name: str) -> list[Mapping[str, Any]]:
    """All that was saved of a tensor: its pieces, or the whole of one that was not split."""
    if name in parts[0]["rest"]:
        whole = parts[0]["rest"][name].reshape(-1)
        return [{"start": 0, "stop": len(whole), "weight": whole, "state": {}}]
    return [part["pieces"][name] for part in parts if name in part["pieces"]]


def _collect(saved: Iterable[Mapping[str, Any]], start: int, stop: int) -> dict[str, Any]:
    """Elements [start, stop) of weight and states, from the saved pieces that have some of them."""
    result: dict[str, Any] = {} if start < stop else {"weight": torch.empty(0)}
    for entry in saved:
        low, high = max(start, entry["start"]), min(stop, entry["stop"])
        if low >= high:
            continue
        length = entry["stop"] - entry["start"]
        for key, value in {"weight": entry["weight"], **entry["state"]}.items():
            if isinstance(value, Tensor) and value.shape == (length,):
                into = result.setdefault(key, torch.empty(stop - start, dtype=value.dtype))
                into[low - start : high - start] = value[low - entry["start"] : high - entry["start"]]
            else:
                result.setdefault(key, value)
    return result


def _fill(model: Zero, shard: Shard, index: int, saved: Iterable[Mapping[str, Any]]) -> None:
    where = shard.within(index)
    values = _collect(saved, where.start, where.stop)
    weight = values.pop("weight")
    for kept in (shard.chunk, shard.master):
        if kept is not None:
            kept[shard.pieces[index]] = weight.to(kept.device)
    if index not in shard.weights:
        return  # frozen: the optimizer does not know it
    stepped = shard.weights[index]
    model.optimizer.state.pop(stepped, None)
    if values:
        model.optimizer.state[stepped] = {
            # torch keeps the number of steps, a scalar, on the CPU
            k: v.to(stepped.device) if isinstance(v, Tensor) and v.dim() else v.clone() if isinstance(v, Tensor) else v
            for k, v in values.items()
        }
