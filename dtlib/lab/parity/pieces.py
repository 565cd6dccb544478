"""What a rank hands over: tensors by name, whole, as a piece with its place, or as DTensors."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]
Place = tuple[str, Any]
"""How a piece lies in the whole: ("whole", None), ("cut", ((axis, dim), …)), ("at", offsets), ("flat", start) or
("index", indices into the flattened whole)."""


@dataclass(frozen=True)
class Piece:
    """A rank's piece of a tensor; `piece` makes one."""

    tensor: Tensor
    place: Place


def piece(
    tensor: Tensor,
    *,
    at: Sequence[int] | None = None,
    flat: int | None = None,
    index: Tensor | None = None,
    **cut: int,
) -> Piece:
    """`tensor` as a piece of a whole: cut by axes of the mesh, at an offset in each dimension, or out of the flattened
    whole from an element on.

    ``piece(w, tp=0)``: the ranks of tp hold it row block by row block, in their order, blocks of any sizes;
    ``piece(x, dp=0, cp=1)``: rows by dp, columns by cp. Two axes that cut one dimension are named from the outer to the
    inner one. ``piece(shard, flat=1024)``: ZeRO's way; what reaches beyond the end is padding.
    ``piece(w, index=numbers)``: any elements, by their numbers in the flattened whole (cut ``arange`` as `w` is cut).

    ``ValueError`` unless it is said in just one way.
    """
    if not isinstance(tensor, Tensor):
        raise ValueError(f"tensor must be a tensor, not {tensor!r}")
    if (at is not None) + (flat is not None) + (index is not None) + bool(cut) != 1:
        raise ValueError("a piece needs its place in one way: axes such as tp=0, or at=, or flat=, or index=")
    if index is not None:
        if index.numel() != tensor.numel():
            raise ValueError(f"index must have a number for each of {tensor.numel()} elements, not {index.numel()}")
        return Piece(tensor, ("index", index.detach().flatten().cpu().numpy()))
    if at is not None:
        if len(at) != tensor.dim():
            raise ValueError(f"at must have an offset for each of {tensor.dim()} dimensions, not {at!r}")
        return Piece(tensor, ("at", tuple(int(each) for each in at)))
    if flat is not None:
        return Piece(tensor, ("flat", int(flat)))
    return _cut(tensor, cut)


def _cut(tensor: Tensor, cut: Mapping[str, int]) -> Piece:
    for axis, dim in cut.items():
        if not -tensor.dim() <= dim < tensor.dim():
            raise ValueError(f"{axis} must name one of {tensor.dim()} dimensions, not {dim}")
    return Piece(tensor, ("cut", tuple((axis, dim % tensor.dim()) for axis, dim in cut.items())))


@dataclass(frozen=True)
class Told:
    """What is known of a rank's tensor before it is sent."""

    shape: tuple[int, ...]
    dtype: str
    place: Place

    @property
    def num_bytes(self) -> int:
        """Of the copy that is sent, in float64."""
        return 8 * int(np.prod(self.shape, dtype=np.int64))


Held = dict[str, tuple[Told, Array]]


def flattened(found: Any, places: Mapping[str, Mapping[str, int]] | None = None, who: str = "step") -> Held:
    """The tensors of a dict, or of a list of them (one for each step), as float64 and with their places.

    Names of a list begin with "step 0: ". `places` gives pieces to names that match a pattern: ``{"forward*":
    {"dp": 0}}``.
    """
    if isinstance(found, Mapping):
        named = dict(found)
    elif isinstance(found, list | tuple) and found and all(isinstance(each, Mapping) for each in found):
        named = {f"step {n}: {name}": value for n, step in enumerate(found) for name, value in step.items()}
    else:
        raise ValueError(f"{who} must return tensors by name, or a list of such dicts, one a step, not {found!r:.80}")
    if not all(isinstance(name, str) for name in named):
        raise ValueError(f"{who} must return tensors by names, not by {next(n for n in named if type(n) is not str)!r}")
    return {name: _one(name, value, places or {}, who) for name, value in named.items() if value is not None}


def _one(name: str, value: Any, places: Mapping[str, Mapping[str, int]], who: str) -> tuple[Told, Array]:
    if isinstance(value, bool | int | float | np.number | np.ndarray):
        value = torch.as_tensor(value)
        value = value.double() if not value.dim() else value
    if isinstance(value, Tensor):
        for pattern, cut in places.items():
            if fnmatch.fnmatch(name.split(": ", 1)[-1], pattern) and value.dim():
                value = _cut(value, cut)
                break
    if not isinstance(value, Tensor | Piece):
        raise ValueError(f"{who} must return tensors, numbers or pieces, not {value!r:.60} for {name!r}")
    tensor, place = (value.tensor, value.place) if isinstance(value, Piece) else _dtensor(value)
    with torch.no_grad():
        dtype = str(tensor.dtype).removeprefix("torch.")
        values = tensor.detach().to("cpu", copy=True).double().numpy()
    return Told(tuple(values.shape), dtype, place), values


def _dtensor(tensor: Tensor) -> tuple[Tensor, Place]:
    """The local part of a DTensor, and where its elements belong; sums that are still to be made are made."""
    if not hasattr(tensor, "placements"):
        return tensor, ("whole", None)
    from torch.distributed.tensor import Replicate, distribute_tensor

    given: Any = tensor
    if any(each.is_partial() for each in given.placements):
        given = given.redistribute(placements=[Replicate() if p.is_partial() else p for p in given.placements])
    if all(each.is_replicate() for each in given.placements):
        return given.to_local(), ("whole", None)
    # Cut the numbers of the elements as the elements are cut: that holds for uneven and for strided shards too.
    numbers = torch.arange(given.numel(), device=given.to_local().device).view(given.shape)
    lies = distribute_tensor(numbers, given.device_mesh, given.placements, src_data_rank=None)
    return given.to_local(), ("index", lies.to_local().flatten().cpu().numpy())


def index_of(told: Told, whole: tuple[int, ...], offsets: Mapping[int, int]) -> Array:
    """Which elements of the flattened whole a piece holds; those beyond the end are padding, -1. `offsets` by dimension
    are those of a cut. ``ValueError`` where it does not fit."""
    kind, where = told.place
    size = int(np.prod(whole, dtype=np.int64))
    if kind == "index":
        return np.asarray(where)
    if kind == "flat":
        numbers = np.arange(where, where + int(np.prod(told.shape, dtype=np.int64)))
        return np.where(numbers < size, numbers, -1)
    start = [0] * len(whole)
    if kind == "at":
        start = list(where)
    elif kind == "cut":
        start = [offsets.get(dim, 0) for dim in range(len(whole))]
    ends = [a + n for a, n in zip(start, told.shape, strict=False)]
    if len(told.shape) != len(whole) or any(e > w for e, w in zip(ends, whole, strict=True)):
        raise ValueError(f"shape {told.shape} at {tuple(start)} does not fit into {whole}")
    numbers = np.arange(size).reshape(whole)
    return numbers[tuple(slice(a, e) for a, e in zip(start, ends, strict=True))].ravel()
