"""A checkpoint that every rank writes its pieces of, and any mesh can read: torch's own format, with its resharding.

`torch.distributed.checkpoint` knows tensors as boxes. Its planners are told here which boxes a rank has.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from dtlib.ranks.zero import Zero

from .boxes import Box, boxes
from .pieces import Piece, Place, cut, pieces
from .training import Training


def save(training: Training, folder: str | os.PathLike[str]) -> None:
    """Write weights, the optimizers' states and their settings to `folder`, which all ranks see; all must call it.

    Each element is written once, by a rank that has it. A checkpoint is a folder of its own inside; when it is finished
    the older ones go, so at every moment one is whole.
    """
    folder = Path(folder)
    last = _last(folder)
    new = folder / f"{0 if last is None else int(last.name) + 1:06}"
    dist.barrier()  # nobody looks for the last one after the first has begun
    if dist.get_rank() == 0:
        shutil.rmtree(new, ignore_errors=True)  # what somebody left unfinished
        new.mkdir(parents=True)
    dist.barrier()
    dcp.save({}, checkpoint_id=new, planner=_Save(training))
    if dist.get_rank() == 0 and last is not None:
        shutil.rmtree(last)
    dist.barrier()


def load(training: Training, folder: str | os.PathLike[str]) -> None:
    """Read the last finished checkpoint in `folder`, from whatever mesh it is; all ranks must call it.

    Gradients are forgotten. One process reads the weights alone with ``torch.distributed.checkpoint.load``: they have
    the names of the whole model's parameters. ``ValueError`` on all ranks before anything is changed if there is none,
    or if it is of other parameters.
    """
    if (last := _last(Path(folder))) is None:
        raise ValueError(f"folder must hold a finished checkpoint, and {folder} has none")
    planner = _Load(training, dcp.FileSystemReader(last).read_metadata())
    for optimizer in training.optimizers:
        optimizer.zero_grad()
    dcp.load({}, checkpoint_id=last, planner=planner)
    for part in training.parts:
        if isinstance(part, Zero):
            part.publish()


def _last(folder: Path) -> Path | None:
    """The last finished checkpoint: torch writes its metadata at the end."""
    finished = [each.parent for each in folder.glob("[0-9]*/.metadata")]
    return max(finished, key=lambda each: int(each.name), default=None)


def _all_pieces(training: Training) -> Iterator[tuple[Piece, Place, Any]]:
    """This rank's pieces, their places, and the states that the optimizer has of each."""
    for part, optimizer in zip(training.parts, training.optimizers, strict=True):
        for piece in pieces(part):
            state: Any = {} if piece.stepped is None else optimizer.state[piece.stepped]
            yield piece, training.places[piece.parameter], state


class _Save(DefaultSavePlanner):
    """Writes what counts on this rank; torch refuses what does not make up whole tensors, each element once."""

    def __init__(self, training: Training) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.training, self.found = training, dict[MetadataIndex, Any]()

    def create_local_plan(self) -> SavePlan:
        """All boxes of this rank, and from one rank the optimizer's settings."""
        items: list[WriteItem] = []
        for piece, place, state in _all_pieces(self.training):
            if self.training.is_first or not piece.is_everywhere:
                items += self._items(piece, place, state)
        if self.is_coordinator:
            groups = self.training.optimizers[0].param_groups
            self.found[_SETTINGS] = [{k: v for k, v in group.items() if k != "params"} for group in groups]
            items.append(WriteItem(_SETTINGS, WriteItemType.BYTE_IO))
        self.plan = SavePlan(items)
        return self.plan

    def _items(self, piece: Piece, place: Place, state: Mapping[str, Any]) -> Iterator[WriteItem]:
        tensors = {place.name: piece.weight} | {_state(place, key): each for key, each in state.items()}
        for name, tensor in tensors.items():
            flat = tensor.reshape(-1)
            if tensor.dim() == 0:
                flat = flat.expand(piece.weight.shape)
            for view, start, counts in cut(flat, piece.start, place):
                if counts and tensor.dim():
                    for (offsets, sizes), part in boxes(view, start, place):
                        yield self._item(name, offsets, sizes, part, place.whole_shape, WriteItemType.SHARD)
                elif counts and start == 0 and place.rank == 0:  # a number for the whole parameter
                    yield self._item(name, (), (), tensor, (), WriteItemType.TENSOR)

    def _item(self, name: str, offsets: Any, sizes: Any, tensor: Tensor, whole: Any, kind: WriteItemType) -> WriteItem:
        index, chunk = MetadataIndex(name, offsets), ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        self.found[index] = tensor
        data = TensorWriteData(chunk, TensorProperties.create_from_tensor(tensor), torch.Size(whole))
        return WriteItem(index, kind, tensor_data=data)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """What is written under `index`."""
        return self.found[index]


class _Load(DefaultLoadPlanner):
    """Reads all that this rank has, what others have too among it."""

    def __init__(self, training: Training, saved: Metadata) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.training, self.saved, self.found = training, saved.state_dict_metadata, dict[MetadataIndex, Tensor]()
        _agree([text for _, place, _ in _all_pieces(training) if (text := self._difference(place))])

    def _difference(self, place: Place) -> str:
        size = tuple(getattr(self.saved.get(place.name), "size", ()))
        if size == place.whole_shape:
            return ""
        there = f"of shape {size}" if size else "missing"
        return f"folder must hold the tensors of the model: {place.name} is {there}, and should be {place.whole_shape}"

    def create_local_plan(self) -> LoadPlan:
        """Everything that overlaps a box of this rank."""
        wanted: dict[str, list[tuple[Box, Tensor]]] = {}
        for piece, place, state in _all_pieces(self.training):
            wanted.setdefault(place.name, []).extend(boxes(piece.weight, piece.start, place))
            if piece.stepped is None:
                continue
            for name, saved in self.saved.items():
                if name.rpartition(".")[0] == _state(place, "")[:-1] and isinstance(saved, TensorStorageMetadata):
                    state[name.rpartition(".")[2]] = fresh = torch.zeros(
                        piece.stepped.shape if saved.size else (),
                        dtype=saved.properties.dtype,
                        device=piece.weight.device,
                    )
                    here = boxes(fresh.view(-1), piece.start, place) if saved.size else [(((), ()), fresh)]
                    wanted.setdefault(name, []).extend(here)
        items = [ReadItem(LoadItemType.BYTE_IO, _SETTINGS, _NOWHERE, _SETTINGS, _NOWHERE, _NOWHERE)]
        for name, views in wanted.items():
            chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for (offsets, sizes), _ in views]
            self.found |= {MetadataIndex(name, (*offsets,)): view for ((offsets, _), view) in views}
            items += create_read_items_for_chunk_list(name, self.saved[name], chunks)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Where `index` is read to."""
        return self.found[index]

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """The optimizer's settings."""
        saved = torch.load(value, weights_only=True)
        for optimizer in self.training.optimizers:
            for group, settings in zip(optimizer.param_groups, saved, strict=True):
                group.update(settings)


_SETTINGS, _NOWHERE = MetadataIndex("optimizer.settings"), torch.Size((0,))


def _state(place: Place, key: str) -> str:
    return f"optimizer.{place.name}.{key}"


def _agree(errors: list[str]) -> None:
    """``ValueError`` on all ranks if one has an error."""
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, errors)
    for each in everybody:
        if each:
            raise ValueError(each[0])
