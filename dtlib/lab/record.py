"""What a rank says to others through torch.distributed: its collectives, sends and receives.

Operations are seen where torch dispatches them. The moment at which a receive has been waited for is not an operation,
so `messages` looks at the calls of ``isend`` and ``irecv`` themselves, which ``send`` and ``recv`` make too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

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
    num_receives = property(lambda self: len(self._sizes("recv")), doc="How many messages were received.")
    sent_bytes = property(lambda self: sum(self._sizes("send")), doc="The payload of what was sent.")
    received_bytes = property(lambda self: sum(self._sizes("recv")), doc="The payload of what was received.")

    @property
    def collectives(self) -> list[str]:
        """The names of the collectives, in the order of their calls."""
        return [call.name for call in self.log if call.name not in ("send", "recv")]

    def _sizes(self, name: str) -> list[int]:
        return [call.full_bytes for call in self.log if call.name == name]


class Message(NamedTuple):
    """One end of a message: ``"sent"`` when it was started, ``"received"`` when its receiver had waited for it."""

    kind: str
    peer: int
    num_bytes: int


@dataclass
class Messages:
    """The messages of one rank in a block of `lab.messages`, in program order; peers are global ranks."""

    rank: int
    log: list[Message] = field(default_factory=list)

    @property
    def num_sent(self) -> int:
        """How many messages this rank sent."""
        return sum(message.kind == "sent" for message in self.log)

    @property
    def sent_bytes(self) -> int:
        """Payload of the messages that this rank sent."""
        return sum(message.num_bytes for message in self.log if message.kind == "sent")


@contextmanager
def messages() -> Iterator[Messages]:
    """Record what this rank sends to single other ranks in a block, and when it has what it waited for.

    Sees ``isend``, ``irecv``, ``send``, ``recv`` and ``batch_isend_irecv`` of torch.distributed called
    through the module. What a collective does inside the communication library is not seen. A rank can return
    its `Messages`.
    """
    record = Messages(dist.get_rank())

    def note(name: str, tensor: Tensor, peer: int | None, group: Any, call: Callable[[], Any]) -> Any:
        num_bytes = _num_bytes(tensor)
        if name == "send":
            record.log.append(Message("sent", -1 if peer is None else peer, num_bytes))
            return call()
        request = call()
        if request is None:  # in a batch of NCCL's, which is waited for as a whole
            record.log.append(Message("received", -1 if peer is None else peer, num_bytes))
            return request

        def arrived() -> None:
            sender = _global_rank(group, request._source_rank()) if peer is None else peer
            record.log.append(Message("received", sender, num_bytes))

        return _Awaited(request, arrived)

    new = stand_ins(note)
    with mock.patch.multiple(dist, **new), mock.patch.multiple(distributed_c10d, **new):
        yield record


def count_steps(records: Sequence[Messages]) -> int:
    """How many rounds the messages of all ranks take, if a rank sends and receives at most one message in a round.

    A message leaves in the first round after everything that its sender had waited for before; one that finds
    its sender's or its receiver's round taken comes a round later. `records` has the `Messages` of every
    rank, in any order. Raises ``ValueError`` where one rank waited for a message that no other sent.
    """
    logs = {record.rank: deque(record.log) for record in records}
    on_the_way: dict[tuple[int, int], deque[int]] = {}
    knows, sends_next, receives_next = (dict.fromkeys(logs, 0) for _ in range(3))
    while any(logs.values()):
        moved = False
        for rank, log in logs.items():
            while log:
                kind, peer, _ = log[0]
                if kind == "sent":
                    sends_next[rank] = max(knows[rank], sends_next[rank]) + 1
                    on_the_way.setdefault((rank, peer), deque()).append(sends_next[rank])
                elif on_the_way.get((peer, rank)):
                    left = on_the_way[peer, rank].popleft()
                    receives_next[rank] = max(left, receives_next[rank] + 1)
                    knows[rank] = max(knows[rank], receives_next[rank])
                else:
                    break
                log.popleft()
                moved = True
        if not moved:
            waiting = {rank: log[0].peer for rank, log in logs.items() if log}
            raise ValueError(f"records must hold every rank's messages: {waiting} (rank: sender) never came")
    return max(receives_next.values(), default=0)


class _Awaited:
    """A started receive that notes the moment when it has been waited for; otherwise the request it stands for."""

    def __init__(self, request: Any, arrived: Callable[[], None]) -> None:
        self._request, self._arrived = request, arrived

    def wait(self, *args: Any, **options: Any) -> Any:
        result = self._request.wait(*args, **options)
        self._arrived()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def stand_ins(
    answer: Callable[[str, Tensor, int | None, Any, Callable[[], Any]], Any],
) -> dict[str, Any]:
    """What to put in the place of torch's ``isend`` and ``irecv``, by name: functions that `answer` their calls.

    It is given ``"send"`` or ``"recv"``, the tensor, the other's global rank (None: whoever sends), the group, and a
    function that makes the call.
    """
    isend, irecv = dist.isend, dist.irecv

    def send(tensor: Any, dst: Any = None, group: Any = None, tag: int = 0, group_dst: Any = None) -> Any:
        peer = dst if group_dst is None else _global_rank(group, group_dst)
        return answer("send", tensor, peer, group, partial(isend, tensor, dst, group, tag, group_dst))

    def receive(tensor: Any, src: Any = None, group: Any = None, tag: int = 0, group_src: Any = None) -> Any:
        peer = src if group_src is None else _global_rank(group, group_src)
        return answer("recv", tensor, peer, group, partial(irecv, tensor, src, group, tag, group_src))

    return {"isend": send, "irecv": receive}


def _global_rank(group: Any, rank: int) -> int:
    return int(dist.get_global_rank(group or dist.group.WORLD, rank))


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
