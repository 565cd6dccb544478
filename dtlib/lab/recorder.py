"""What a rank says to others through torch.distributed, as torch dispatches it: collectives, sends and receives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from dtlib.theory.units import format_bytes

from .html import table_html
from .memory.storages import tensors_in

_NAMES = {
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
    "recv_any_source": "recv",
    "isend": "send",
    "irecv": "recv",
    "monitored_barrier": "barrier",
}
_SENDS_NOTHING = ("wait_tensor", "_wrap_tensor_autograd")
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")


@dataclass(frozen=True)
class Collective:
    """One call: ``"all_gather"``, ``"reduce_scatter"``, ``"all_reduce"``, ... in a group of `group_size` ranks.

    `full_bytes` is the full buffer, the larger of what goes in and what comes out: the result of an all-gather, the
    input of a reduce-scatter. What of it crosses a link is the algorithm's business (see `theory.collectives`).
    """

    name: str
    group_size: int
    full_bytes: int


@dataclass(frozen=True, repr=False)
class Collectives:
    """The collectives of one rank, in the order of its calls."""

    log: tuple[Collective, ...]

    def count(self, name: str, group_size: int | None = None) -> int:
        """How many calls of `name` there were, in groups of `group_size` alone if that is given."""
        return sum(1 for _ in self._only(name, group_size))

    def full_bytes(self, name: str, group_size: int | None = None) -> int:
        """The full buffers of the calls of `name` together, in bytes."""
        return sum(call.full_bytes for call in self._only(name, group_size))

    def _only(self, name: str, group_size: int | None) -> Iterator[Collective]:
        return (c for c in self.log if c.name == name and group_size in (None, c.group_size))

    @property
    def table(self) -> str:
        """A line for each kind of call and size of group: how many, and the full buffers together."""
        return "\n".join(f"{name:<16} {size:>9} {calls:>7} {full:>14}" for name, size, calls, full in self._rows())

    def _rows(self) -> Iterator[tuple[str, str, str, str]]:
        yield "collective", "of ranks", "calls", "full buffers"
        for name, size in dict.fromkeys((call.name, call.group_size) for call in self.log):
            yield name, str(size), str(self.count(name, size)), format_bytes(self.full_bytes(name, size))

    def __repr__(self) -> str:
        return self.table

    def _repr_html_(self) -> str:
        head, *rows = self._rows()
        return table_html(head, rows)


class Recorder(TorchDispatchMode):
    """Inside ``with`` it records every collective and point-to-point call of this thread in `log`."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and note it if it communicates."""
        if any(is_traceable_wrapper_subclass_type(each) for each in types):
            return NotImplemented
        kwargs = kwargs or {}
        namespace, _, name = func.name().partition("::")
        name = name.split(".")[0]
        if namespace not in _NAMESPACES or name in _SENDS_NOTHING:
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        full_bytes = max(map(_num_bytes, (*args, *kwargs.values(), result)))
        self.log.append(Collective(_common_name(name), _group_size(args, kwargs), full_bytes))
        return result

    def note(self, name: str, group_size: int, tensor: Tensor) -> None:
        """Record a call that did not come by as an operation."""
        self.log.append(Collective(name, group_size, _num_bytes(tensor)))


class SendCounter(Recorder):
    """A context in which every send and receive of this thread is counted, by its payload.

    What a collective sends inside the communication library is not seen; `collectives` names those that were called.
    """

    num_sends = property(lambda self: len(self._sizes("send")), doc="How many messages were sent.")
    sent_bytes = property(lambda self: sum(self._sizes("send")), doc="The payload of what was sent.")
    received_bytes = property(lambda self: sum(self._sizes("recv")), doc="The payload of what was received.")

    @property
    def collectives(self) -> list[str]:
        """The names of the collectives, in the order of their calls."""
        return [call.name for call in self.log if call.name not in ("send", "recv")]

    def _sizes(self, name: str) -> list[int]:
        return [call.full_bytes for call in self.log if call.name == name]


def _num_bytes(buffer: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(buffer))


def _common_name(name: str) -> str:
    plain = name.removesuffix("_").removesuffix("_out").removesuffix("_coalesced")
    return _NAMES.get(plain, plain)


def _group_size(args: Any, kwargs: Any) -> int:
    names = []
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, torch.ScriptObject):
            try:
                return int(dist.ProcessGroup.unbox(arg).size())
            except RuntimeError:
                continue  # the operator of a reduction
        if isinstance(arg, str):
            names.append(arg)  # the last text is the group's name; before it may come that of an operator
    return int(distributed_c10d._resolve_process_group(names[-1]).size()) if names else 0
