"""`lab.messages`: what a rank sends to single other ranks, in what order, and how many rounds that takes.

The moment at which a receive has been waited for is not an operation that torch dispatches, so the calls of ``isend``
and ``irecv`` themselves are looked at, which ``send`` and ``recv`` make too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from dtlib.processes.awaited import Awaited


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
        num_bytes = tensor.nbytes
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

        return Awaited(request, arrived)

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
