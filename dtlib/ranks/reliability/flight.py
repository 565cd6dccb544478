"""A flight recorder: the last collectives of each rank, in a file that outlives it, and who is behind.

A collective that one rank never enters leaves the others waiting until a timeout that names none of them. Each rank's
last calls, side by side, do. Torch's own recorder (`TORCH_FR_BUFFER_SIZE`) keeps them in the memory of the rank, who
takes them along when killed, and calls a collective of gloo "scheduled" to the end.
"""

from __future__ import annotations

import inspect
import json
import mmap
import os
import struct
import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from dtlib.processes.awaited import Awaited
from dtlib.ranks.mesh import Group
from dtlib.ranks.shared import alike
from dtlib.theory.valid import whole

SLOT_BYTES, _TEXT_BYTES = 512, 384
_HEAD, _SLOT = struct.Struct("<III"), struct.Struct("<?II")  # rank, ranks, slots; finished, length of text, CRC
_TENSORS = {  # which argument has what must be alike on all ranks
    **dict.fromkeys(("all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter"), "tensor"),
    **{"all_gather_into_tensor": "input_tensor", "reduce_scatter": "output", "reduce_scatter_tensor": "output"},
    **{"all_to_all_single": "input", "all_to_all": "input_tensor_list", "barrier": ""},
}


class Call(NamedTuple):
    """A collective that a rank entered: its number among the group's, from 1, and whether the rank has waited for it.

    `kind` has torch's name, and the operator or root; `shape` is None where ranks may differ in it, as in an
    all-to-all; `where` is the line that called it. A barrier's dtype is "".
    """

    number: int
    kind: str
    shape: tuple[int, ...] | None
    dtype: str
    finished: bool = False
    where: str = ""

    @property
    def what(self) -> str:
        """What must be alike on all ranks, in words."""
        shape = "" if self.shape is None else f" {self.shape}"
        return self.kind + (f"{shape} of {self.dtype}" if self.dtype else "")


@dataclass(frozen=True)
class Diagnosis:
    """`verdict` is "behind", "differ", "inside" or "together"; `number` that of the call, `ranks` whom it is about."""

    verdict: str
    number: int
    ranks: tuple[int, ...]
    text: str

    def __str__(self) -> str:
        return self.text


@contextmanager
def recorded(
    folder: str | os.PathLike[str], *, last: int = 64, compare: bool = False, group: Group = None
) -> Iterator[None]:
    """In the block this rank's last `last` collectives of `group` are kept in a file of its own in `folder`.

    The file is mapped into memory: what was written is there for `read` when the rank is stopped, hangs or was killed
    (not when the machine lost power), and a call costs some microseconds. Seen are the collectives of torch.distributed
    that are called through the module, not those of torch's DDP (C++), single messages, or other groups.

    With `compare` the ranks first send each other a fingerprint of what they are about to call, 8 (N−1) bytes a call,
    and ``ValueError`` on all of them names who differs, before the backend hangs or ends them. Every call then waits
    for the slowest rank, asynchronous ones too: it is for the search for a fault. A rank that never comes is waited for
    as ever.
    """
    size = whole("last", last, 1)
    ranks, rank = alike.size_of(group), dist.get_rank(group)
    mine = dist.group.WORLD if group is None else group
    recorder = _Recorder(Path(folder), rank, ranks, size)
    originals = {name: getattr(dist, name) for name in _TENSORS}
    signatures = {name: inspect.signature(call) for name, call in originals.items()}

    def stand_in(name: str, *args: Any, **options: Any) -> Any:
        bound = signatures[name].bind(*args, **options)
        bound.apply_defaults()
        of = bound.arguments["group"]
        if (dist.group.WORLD if of is None else of) is not mine:
            return originals[name](*args, **options)
        call, device = _described(recorder.number + 1, name, bound.arguments)
        if compare:
            _refuse_unlike(call, device, originals["all_gather"], group)
        finished = recorder.enter(call)
        request = originals[name](*args, **options)
        if request is not None and bound.arguments["async_op"]:
            return Awaited(request, finished)
        finished()
        return request

    new: dict[str, Any] = {name: partial(stand_in, name) for name in _TENSORS}
    try:
        with mock.patch.multiple(dist, **new), mock.patch.multiple(distributed_c10d, **new):
            yield
    finally:
        recorder.file.close()


def read(folder: str | os.PathLike[str]) -> dict[int, list[Call]]:
    """The records of all ranks of a group, oldest first, by the rank in it; empty where a rank left none.

    A call whose record was not whole when its rank died was not entered, and is left out. ``ValueError`` for a folder
    without records.
    """
    found, ranks = dict[int, list[Call]](), 0
    for path in Path(folder).glob("rank-*.flight"):
        data = path.read_bytes()
        rank, ranks, slots = _HEAD.unpack_from(data)
        calls = (_read_slot(data, SLOT_BYTES * (1 + slot)) for slot in range(slots))
        found[rank] = sorted(call for call in calls if call is not None)
    if not found:
        raise ValueError(f"folder must hold records, rank-0.flight and so on, and {folder} has none")
    return {rank: found.get(rank, []) for rank in range(ranks)}


def behind(records: Mapping[int, Sequence[Call]]) -> tuple[int, ...]:
    """The ranks that have not entered the last collective that any rank has entered; none where all have."""
    last = {rank: calls[-1].number if calls else 0 for rank, calls in _checked(records).items()}
    return tuple(rank for rank, number in last.items() if number < max(last.values()))


def diagnose(records: Mapping[int, Sequence[Call]]) -> Diagnosis:
    """What is wrong with the earliest collective in which something is: from each rank's calls, oldest first.

    - "differ": ranks called something else, in another kind, shape or dtype, or their order is not the same. `ranks`
      are those that more than half of the ranks in it outvote, or all in it where there is no such majority.
    - "behind": `ranks` have not entered what others are in.
    - "inside": all entered the last, and `ranks` have not finished it: a link, or a rank that died in it.
    - "together": all have finished the same, or none has called anything.

    Records of ranks that run are always a moment's: a rank may be behind because it is about to come. Those of a hang
    are the same a minute later. Calls that have left the records of some rank are not compared.
    """
    records = _checked(records)
    last = {rank: calls[-1].number if calls else 0 for rank, calls in records.items()}
    number, late = max(last.values()), behind(records)
    by_number = {each: dict[int, Call]() for calls in records.values() for each in sorted(c.number for c in calls)}
    for rank, calls in records.items():
        for call in calls:
            by_number[call.number][rank] = call
    for each, calls_of in sorted(by_number.items()):
        missing = tuple(rank for rank in late if last[rank] < each)
        values = {rank: call.what for rank, call in calls_of.items()}
        what, votes = Counter(values.values()).most_common(1)[0]
        if votes < len(values):
            most = 2 * votes > len(values)
            odd = tuple(rank for rank in values if not most or values[rank] != what)
            said = "; ".join(f"rank {rank} is in {_at(calls_of[rank])}" for rank in odd)
            rest = f", most in {what}" if most else ", and no call has a majority"
            return Diagnosis("differ", each, odd, f"collective {each}: {said}{rest}")
        if missing:
            inside = _at(next(iter(calls_of.values())))
            after = "; ".join(
                f"rank {rank} " + (f"last called {_at(records[rank][-1])}" if records[rank] else "called nothing")
                for rank in missing
            )
            return Diagnosis("behind", each, missing, f"collective {each}, {inside}: not entered by {after}")
    open_ = tuple(rank for rank, calls in records.items() if calls and not calls[-1].finished)
    if open_:
        text = f"collective {number}, {_at(records[open_[0]][-1])}: entered by all, not finished by ranks {open_}"
        return Diagnosis("inside", number, open_, text)
    return Diagnosis("together", number, (), f"all ranks have finished collective {number}")


def _at(call: Call) -> str:
    return call.what + (f" at {call.where}" if call.where else "")


def _checked(records: Mapping[int, Sequence[Call]]) -> Mapping[int, Sequence[Call]]:
    if not records:
        raise ValueError("records must have the calls of at least one rank, not none")
    for rank, calls in records.items():
        numbers = [call.number for call in calls]
        if numbers and numbers != list(range(numbers[0], numbers[0] + len(numbers))):
            raise ValueError(f"records must have a rank's calls in order, none left out; rank {rank} has {numbers}")
    return records


class _Recorder:
    """A ring of slots in a mapped file; the first slot tells of the rank."""

    def __init__(self, folder: Path, rank: int, ranks: int, slots: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.slots, self.number = slots, 0
        with open(folder / f"rank-{rank}.flight", "wb+") as file:
            file.truncate(SLOT_BYTES * (1 + slots))
            self.file = mmap.mmap(file.fileno(), 0)
        _HEAD.pack_into(self.file, 0, rank, ranks, slots)

    def enter(self, call: Call) -> Any:
        """Write `call` down; what is returned notes that it has finished, if its slot is still its own."""
        self.number = call.number
        text = json.dumps([call.number, call.kind, call.shape, call.dtype, call.where]).encode()
        at = SLOT_BYTES * (1 + (call.number - 1) % self.slots)
        # A rank that dies between the two lines leaves a text that its sum does not fit, and never half a call.
        self.file[at + _SLOT.size : at + _SLOT.size + len(text)] = text
        _SLOT.pack_into(self.file, at, False, len(text), zlib.crc32(text))

        def finished() -> None:
            if call.number > self.number - self.slots and not self.file.closed:
                self.file[at] = 1

        return finished


def _read_slot(data: bytes, at: int) -> Call | None:
    finished, length, crc = _SLOT.unpack_from(data, at)
    text = data[at + _SLOT.size : at + _SLOT.size + length]
    if not length or zlib.crc32(text) != crc:
        return None
    number, kind, shape, dtype, where = json.loads(text)
    return Call(number, kind, None if shape is None else tuple(shape), dtype, finished, where)


def _described(number: int, name: str, given: Mapping[str, Any]) -> tuple[Call, torch.device]:
    tensor, kind = given.get(_TENSORS[name]), name
    if isinstance(tensor, (list, tuple)):
        tensor = tensor[0] if tensor else None
    for key in ("op", "src", "dst"):
        if key in given:
            inside = given.get(f"group_{key}")
            value = given[key] if inside is None else dist.get_global_rank(given["group"] or dist.group.WORLD, inside)
            kind += f", {key} {str(0 if value is None else value).rsplit('.', 1)[-1]}"
    free = name == "all_to_all" or given.get("input_split_sizes") or given.get("output_split_sizes")
    if not isinstance(tensor, Tensor):
        return Call(number, kind, None, "", False, _caller()), torch.device("cpu")
    shape = None if free else tuple(tensor.shape)
    return Call(number, kind, shape, str(tensor.dtype).removeprefix("torch."), False, _caller()), tensor.device


def _caller() -> str:
    """The innermost line that is not torch's, as far as it fits into a slot."""
    frame: Any = sys._getframe(3)
    inside = os.path.dirname(torch.__file__)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}"[-120:]


def _refuse_unlike(call: Call, device: torch.device, all_gather: Any, group: Group) -> None:
    """``ValueError`` on all ranks that names those with another call. Words are sent where something differs."""
    text = call.what.encode()[:_TEXT_BYTES]
    mine = torch.tensor([int.from_bytes(text, "little") % (2**61 - 1)], device=device)
    if len(set(alike.gathered(mine, group, all_gather).flatten().tolist())) == 1:
        return
    words = torch.tensor(list(text.ljust(_TEXT_BYTES)), dtype=torch.uint8, device=device)
    found = [bytes(row).decode(errors="replace").rstrip() for row in alike.gathered(words, group, all_gather).tolist()]
    calls = {rank: [Call(call.number, what, None, "")] for rank, what in enumerate(found)}
    raise ValueError(f"ranks must enter the same collective; {diagnose(calls)}; this rank calls it at {call.where}")
