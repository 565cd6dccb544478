"""`lab.messages`: every message between two ranks, as it is sent and as it is waited for; and the steps they make."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist
from torch.distributed import distributed_c10d


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
    record, inside = Messages(dist.get_rank()), list[str]()
    with ExitStack() as patches:
        for name in ("isend", "irecv", "send", "recv"):
            watch = _watch_send if "send" in name else _watch_receive
            watched = watch(getattr(dist, name), record.log, inside)
            for module in (dist, distributed_c10d):
                patches.enter_context(mock.patch.object(module, name, watched))
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


def _watch_send(call: Callable[..., Any], log: list[Message], inside: list[str]) -> Callable[..., Any]:
    def send(tensor: Any, dst: Any = None, group: Any = None, tag: int = 0, group_dst: Any = None) -> Any:
        if not inside:  # `send` may call `isend`
            log.append(Message("sent", _peer(dst, group, group_dst), _num_bytes(tensor)))
        with _within(inside):
            return call(tensor, dst, group, tag, group_dst)

    return send


def _watch_receive(call: Callable[..., Any], log: list[Message], inside: list[str]) -> Callable[..., Any]:
    def receive(tensor: Any, src: Any = None, group: Any = None, tag: int = 0, group_src: Any = None) -> Any:
        outermost = not inside
        with _within(inside):
            request = call(tensor, src, group, tag, group_src)
        if not outermost:
            return request
        if not hasattr(request, "wait"):  # `recv` has already waited, and returns the sender
            log.append(Message("received", request, _num_bytes(tensor)))
            return request
        message = Message("received", _peer(src, group, group_src), _num_bytes(tensor))
        return _Awaited(request, lambda: log.append(message))

    return receive


@contextmanager
def _within(inside: list[str]) -> Iterator[None]:
    inside.append("a call")
    try:
        yield
    finally:
        inside.pop()


def _peer(rank: int | None, group: Any, rank_in_group: int | None) -> int:
    if rank is None and rank_in_group is not None:
        return int(dist.get_global_rank(group or dist.group.WORLD, rank_in_group))
    return -1 if rank is None else rank


def _num_bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())
