"""What torch's checkpoints are told: which boxes of which tensors a rank writes, and which it reads.

Imported when one is written or read: what torch brings with it takes longer than to start ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from dtlib.ranks.mesh import Group

from .held import Held, boxes

OF_OPTIMIZER = "optimizer/"
_ELEMENTS, _NUMBER, PLAIN = (f"{OF_OPTIMIZER}{kind}/" for kind in ("elements", "number", "plain"))
"""What an optimizer keeps for each element, a tensor with one number for all of them, or a number that is none."""


def saved_in(folder: Path) -> Any:
    """What of each tensor stands in the checkpoint `folder`: its size and properties."""
    return dcp.FileSystemReader(folder).read_metadata().state_dict_metadata


def refuse_others(folder: Any, held: Sequence[Held], saved: Any, group: Group) -> None:
    """``ValueError``, on all ranks, unless what is `saved` in `folder` are the tensors that they hold together."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, {each.place.name: each.place.whole_shape for each in held}, group=group)
    here = {name: shape for each in everyone for name, shape in each.items()}
    there = {name: tuple(each.size) for name, each in saved.items() if not name.startswith(OF_OPTIMIZER)}
    for name in {**here, **there}:
        if here.get(name) != there.get(name):
            a, b = (f"of shape {each[name]}" if name in each else "missing" for each in (here, there))
            raise ValueError(f"folder must hold the same tensors as model; {name!r} is {a} here and {b} in {folder}")


class Save(DefaultSavePlanner):
    """Writes what counts on this rank; torch refuses what does not make up whole tensors, each element once."""

    def __init__(self, held: Sequence[Held]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.found = dict[MetadataIndex, Tensor]()
        self.items = [item for each in held for item in self._items(each)]

    def create_local_plan(self) -> SavePlan:
        """All boxes of this rank."""
        self.plan = SavePlan(self.items)
        return self.plan

    def _items(self, held: Held) -> Iterator[WriteItem]:
        place, tensors, numbers = held.place, {held.place.name: held.weight}, dict[str, Tensor]()
        for key, value in _state(held).items():
            if isinstance(value, Tensor) and held.stepped is not None and value.shape == held.stepped.shape:
                tensors[f"{_ELEMENTS}{place.name}/{key}"] = value
            elif isinstance(value, Tensor) and value.dim() == 0:
                numbers[f"{_NUMBER}{place.name}/{key}"] = value
            elif isinstance(value, bool | int | float):
                numbers[f"{PLAIN}{place.name}/{key}"] = torch.tensor(value, dtype=_plain(value))
            elif value is not None:
                raise ValueError(f"the optimizer must keep numbers, or a tensor like {place.name!r}, under {key!r}")
        for name, tensor in tensors.items():
            for view, start, counts in held.slices(tensor.detach()):
                for (offsets, sizes), part in boxes(view, start, place) if counts else ():
                    yield self._item(name, offsets, sizes, part, place.whole_shape, WriteItemType.SHARD)
        is_first = held.start == 0 and not any(rank for _, rank in place.splits)
        if is_first and next((counts for *_, counts in held.slices(held.weight)), False):
            for name, number in numbers.items():
                yield self._item(name, (), (), number, (), WriteItemType.TENSOR)

    def _item(self, name: str, offsets: Any, sizes: Any, tensor: Tensor, whole: Any, kind: WriteItemType) -> WriteItem:
        index, chunk = MetadataIndex(name, offsets), ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        self.found[index] = tensor
        data = TensorWriteData(chunk, TensorProperties.create_from_tensor(tensor), torch.Size(whole))
        return WriteItem(index, kind, tensor_data=data)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """What is written under `index`."""
        return self.found[index]


def _state(held: Held) -> Mapping[str, Any]:
    return {} if held.stepped is None or held.optimizer is None else held.optimizer.state.get(held.stepped, {})


def _plain(value: float) -> torch.dtype:
    return torch.bool if isinstance(value, bool) else torch.int64 if isinstance(value, int) else torch.float64


class Load(DefaultLoadPlanner):
    """Reads all that this rank holds, what others have too among it."""

    def __init__(self, held: Sequence[Held], saved: Any) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.held, self.saved, self.found = held, saved, dict[MetadataIndex, Tensor]()
        self.plain: list[tuple[dict[str, Any], str, Tensor]] = []

    def create_local_plan(self) -> LoadPlan:
        """Everything that overlaps a box of this rank."""
        items = []
        for name, start, tensor, held in self._wanted():
            views = list(boxes(tensor, start, held.place)) if start is not None else [(((), ()), tensor)]
            chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for (offsets, sizes), _ in views]
            self.found |= {MetadataIndex(name, offsets): view for ((offsets, _), view) in views}
            items += create_read_items_for_chunk_list(name, self.saved[name], chunks)
        return LoadPlan(items)

    def _wanted(self) -> Iterator[tuple[str, int | None, Tensor, Held]]:
        """Names, where a tensor begins (None: a number), and what is read into."""
        for held in self.held:
            yield held.place.name, held.start, held.weight.detach(), held
            if held.stepped is None or held.optimizer is None:
                continue
            held.optimizer.state[held.stepped] = state = dict[str, Any]()
            for kind in (_ELEMENTS, _NUMBER, PLAIN):
                for name, key, saved in self._kept(f"{kind}{held.place.name}/"):
                    in_order = kind == _ELEMENTS
                    fresh = torch.empty(
                        held.stepped.shape if in_order else (), dtype=saved.properties.dtype,
                        device=held.stepped.device if in_order else None,  # torch keeps its step on the CPU
                    )  # fmt: skip
                    state[key] = fresh
                    if kind == PLAIN:
                        self.plain.append((state, key, fresh))
                    yield name, held.start if in_order else None, fresh, held

    def _kept(self, prefix: str) -> Iterator[tuple[str, str, TensorStorageMetadata]]:
        for name, saved in self.saved.items():
            if name.startswith(prefix):
                yield name, name.removeprefix(prefix), saved

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Where `index` is read to."""
        return self.found[index]
