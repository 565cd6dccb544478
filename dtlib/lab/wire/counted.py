"""`lab.wire`: how many bytes really crossed the network while a block ran."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from dtlib.lab.launch import context
from dtlib.lab.launch.cables import ACROSS, INSIDE
from dtlib.lab.recorder import SendCounter

# Where linux/tcp.h's `struct tcp_info` holds what we need, and how much of it the kernel must give (Linux 4.19).
_RECEIVED, _NOT_SENT, _SENT, _SENT_AGAIN, _TCP_INFO_BYTES = 128, 144, 200, 208, 216


Reading = tuple[int, int, int, int, int]


@dataclass
class Wire:
    """What crossed the network during a block of `lab.wire`; the numbers are there once the block has ended.

    `total_bytes` is what all ranks together sent, `sent_bytes` and `received_bytes` are this rank's: the payload of
    TCP as the kernel counted it, connection by connection. It holds the small message headers of the communication
    library, but no header of TCP or IP, nothing twice, and no connection that is opened and closed within the block.
    `sent_to` has what this rank sent to each rank, by the connections that are open at the end (empty where the kernel
    does not tell).

    `loopback_bytes` is the reading of the loopback device of the ranks' private network: all traffic, with headers,
    acknowledgements and repeats (0 without such a network). `inside_bytes` and `across_bytes` are the same of the two
    cables of a rank in a `lab.cluster`: what it sent on them. `method` says how `total_bytes` was
    counted.
    """

    total_bytes: int = 0
    sent_bytes: int = 0
    sent_to: tuple[int, ...] = ()
    received_bytes: int = 0
    loopback_bytes: int = 0
    inside_bytes: int = 0
    across_bytes: int = 0
    method: str = ""


@contextmanager
def wire() -> Iterator[Wire]:
    """Count the bytes that cross the network between the start and the end of a block, in a rank.

    Every rank of the run must enter and leave the block: they meet at both ends (without using the network), so that
    all the traffic of the block, and no other, is in it. Where the kernel does not count what a TCP connection
    carries (not Linux), the payload of this rank's calls of `torch.distributed.send` is counted, and `method` says so.

    Raises ``RuntimeError`` outside of a rank.
    """
    rank = context.current("lab.wire()")
    counter = _counter(rank)
    result = Wire(method=counter.method)
    rank.exchange(b"")
    before = counter.read()
    rank.exchange(b"")  # a rank that starts sending must not be ahead of one that has not read its counter
    try:
        yield result
        rank.exchange(b"")
        after = counter.read()
        result.sent_to = counter.sent_to()
    finally:
        counter.close()
    result.sent_bytes, result.received_bytes, result.loopback_bytes, result.inside_bytes, result.across_bytes = (
        now - then for now, then in zip(after, before, strict=True)
    )
    everyone = rank.exchange(result.sent_bytes.to_bytes(8, "big"))
    result.total_bytes = sum(int.from_bytes(one, "big") for one in everyone)


class _Counter:
    """Reads (sent, received, loopback, inside, across) in bytes."""

    method = ""

    def read(self) -> Reading:
        raise NotImplementedError

    def sent_to(self) -> tuple[int, ...]:
        """What this rank has sent to each since the first reading; all ranks must ask."""
        return ()

    def close(self) -> None:
        """Stop counting."""


class _Connection(NamedTuple):
    sent: int
    received: int
    here: tuple[Any, ...]
    there: tuple[Any, ...]


class _Kernel(_Counter):
    """The kernel's own counts: of each TCP connection of this process, and of the loopback device."""

    def __init__(self, rank: context.RankContext) -> None:
        self.private, self.has_cables, self.exchange = rank.private_network, rank.latency_by is not None, rank.exchange
        self.method = "the kernel's counts of the ranks' own TCP connections, " + (
            "in a private network"
            if rank.private_network
            else f"on the machine's network ({rank.why_not_private or 'as network=host asks'})"
        )
        self.closed = [0, 0]
        self.first: dict[int, _Connection] | None = None
        self.last: dict[int, _Connection] = {}

    def read(self) -> Reading:
        connections = tcp_connections()
        for inode in set(self.last) - set(connections):
            gone = self.last.pop(inode)
            self.closed = [self.closed[0] + gone.sent, self.closed[1] + gone.received]
        self.last = connections
        self.first = connections if self.first is None else self.first
        sent = self.closed[0] + sum(each.sent for each in connections.values())
        received = self.closed[1] + sum(each.received for each in connections.values())
        loopback = device_bytes("lo") if self.private else 0
        inside, across = (device_bytes(each) if self.has_cables else 0 for each in (INSIDE, ACROSS))
        return sent, received, loopback, inside, across

    def sent_to(self) -> tuple[int, ...]:
        # by both ends: the kernel gives one port to several connections whose other ends differ
        everyone = self.exchange(json.dumps([[each.there, each.here] for each in self.last.values()]).encode())
        owners = {
            (tuple(here), tuple(there)): rank for rank, ends in enumerate(everyone) for here, there in json.loads(ends)
        }
        found, first = [0] * len(everyone), self.first or {}
        for inode, each in self.last.items():
            if (owner := owners.get((each.here, each.there))) is not None:
                found[owner] += each.sent - (first[inode].sent if inode in first else 0)
        return tuple(found)


class _SendCalls(_Counter):
    """Where the kernel does not tell: the payload of the point-to-point calls of this process."""

    def __init__(self, rank: context.RankContext) -> None:
        self.method = f"the payload of the ranks' send calls, collectives not seen (no TCP counts on {sys.platform})"
        self.counter = SendCounter()
        self.counter.__enter__()

    def read(self) -> Reading:
        return self.counter.sent_bytes, self.counter.received_bytes, 0, 0, 0

    def close(self) -> None:
        self.counter.__exit__(None, None, None)


def _counter(rank: context.RankContext) -> _Counter:
    return _Kernel(rank) if kernel_counts_connections() else _SendCalls(rank)


def kernel_counts_connections() -> bool:
    """Whether this system's kernel tells how much each TCP connection has carried."""
    if sys.platform != "linux":
        return False
    with socket.socket() as sock:
        return len(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 512)) >= _TCP_INFO_BYTES


def tcp_connections() -> dict[int, _Connection]:
    """Each TCP connection of this process, by inode: payload bytes sent and received since it was opened, its ends."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            fd = os.dup(int(name))
        except OSError:
            continue  # the descriptor of the listing itself
        try:
            if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                continue
            inode = os.fstat(fd).st_ino
            with socket.socket(fileno=os.dup(fd)) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                    with contextlib.suppress(OSError):  # one that listens, or is being closed, has no other end
                        found[inode] = _Connection(*_sent_and_received(sock), sock.getsockname(), sock.getpeername())
        finally:
            os.close(fd)
    return found


def _sent_and_received(sock: socket.socket) -> tuple[int, int]:
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 512)
    (received,) = struct.unpack_from("=Q", info, _RECEIVED)
    (waiting,) = struct.unpack_from("=I", info, _NOT_SENT)
    sent, again = struct.unpack_from("=QQ", info, _SENT)
    return sent - again + waiting, received


def device_bytes(device: str) -> int:
    """What this network namespace has sent through a device."""
    with open("/proc/self/net/dev") as file:
        for line in file:
            name, _, numbers = line.partition(":")
            if name.strip() == device:
                return int(numbers.split()[8])
    raise RuntimeError(f"this network namespace has no device {device}")
