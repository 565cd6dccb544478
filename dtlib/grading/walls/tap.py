"""Reads a private network from outside: who sent how many bytes to whom, and which messages of gloo they were.

The tap takes packets from the kernel, so nothing that a rank does to its own process changes what it sees. Every byte
that TCP carries is counted once, repeats left out. Gloo's own framing, a header of six 64-bit numbers before each
message, tells a send from a piece of a collective, and which collective it is.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

_ETH_P_ALL, _OUTGOING, _ETHERNET_BYTES = 3, 4, 14
_SO_RCVBUFFORCE, _SOL_PACKET, _PACKET_STATISTICS = 33, 263, 6
_BUFFER_BYTES = 64 * 2**20
_TCP, _SYN, _ACK = 6, 0x02, 0x10
_HEADER = struct.Struct("<QQQQQQ")  # bytes of all, code, slot, offset, length, offset at the receiver
_DATA = 1
_HELLO_BYTES = 8  # the side that connects says which of the other's pairs it wants
_MAX_MESSAGE_BYTES = 2**32
MAX_MESSAGES = 20_000
# The highest byte of a slot names the algorithm (gloo/types.h); a point-to-point message has its tag there, small.
_COLLECTIVES = {
    1: "gather", 2: "all_gather", 3: "reduce", 4: "all_reduce", 5: "scatter", 6: "broadcast", 7: "barrier",
    8: "all_to_all", 9: "reduce_scatter",
}  # fmt: skip


@dataclass
class Stream:
    """One direction of a TCP connection, between two ports: payload bytes, and the messages that gloo framed in it.

    A message is (number in the order of all that were seen, what it is, payload bytes). `framed` is False as soon as
    the bytes are not gloo's.
    """

    next_seq: int | None = None
    num_bytes: int = 0
    messages: list[tuple[int, str, int]] = field(default_factory=list)
    framed: bool = True
    left: int = 0  # bytes of the current message's payload still to come
    head: bytearray = field(default_factory=bytearray)
    hello: int = 0  # bytes of the greeting still to come
    said_hello: int = 0


@dataclass(frozen=True)
class Traffic:
    """What crossed a private network in a case.

    `sent_bytes` are those of each rank, `other_bytes` what no rank's open connection accounts for; both are payload.
    `messages` are (from, to, what, bytes) in the order in which they began. `complete` is False where packets were
    lost to the tap or bytes were not framed as gloo's: then only the counts can be relied on, and where packets were
    lost these are the loopback device's.
    """

    sent_bytes: tuple[int, ...]
    other_bytes: int
    messages: tuple[tuple[int, int, str, int], ...]
    complete: bool

    @property
    def total_bytes(self) -> int:
        """All payload."""
        return sum(self.sent_bytes) + self.other_bytes


class Tap:
    """Listens on the loopback device of this process's network namespace until `close`. ``OSError`` if not allowed."""

    def __init__(self) -> None:
        self.sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
        self.sock.bind(("lo", 0))
        self.sock.setblocking(False)
        try:
            self.sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
        except PermissionError:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        self.streams: dict[tuple[Any, ...], Stream] = {}
        self.foreign_bytes = 0  # of anything but TCP over IPv4 or IPv6
        self.lost = False
        self._buffer = bytearray(2**17)
        self._count = 0

    def read(self, at_most: int = 100_000) -> None:
        """Take in the packets that have arrived."""
        for _ in range(at_most):
            try:
                size, address = self.sock.recvfrom_into(self._buffer)
            except BlockingIOError:
                break
            if address[2] == _OUTGOING:  # on a loopback device each packet is seen going and coming
                self._packet(memoryview(self._buffer)[:size])
        dropped = struct.unpack("=II", self.sock.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8))[1]
        self.lost = self.lost or dropped > 0

    def close(self) -> None:
        """Stop listening."""
        self.sock.close()

    def _packet(self, packet: memoryview) -> None:
        ip = packet[_ETHERNET_BYTES:]
        version = ip[0] >> 4 if len(ip) >= 20 else 0
        if version == 4 and ip[9] == _TCP:
            total = int.from_bytes(ip[2:4], "big") or len(ip)
            addresses, tcp = bytes(ip[12:20]), ip[(ip[0] & 15) * 4 : total]
        elif version == 6 and len(ip) >= 40 and ip[6] == _TCP:
            addresses, tcp = bytes(ip[8:40]), ip[40:]
        else:
            self.foreign_bytes += len(ip)
            return
        if len(tcp) < 20:
            self.foreign_bytes += len(ip)
            return
        source, target, seq = struct.unpack("!HHI", tcp[:8])
        flags, payload = tcp[13], tcp[(tcp[12] >> 4) * 4 :]
        half = len(addresses) // 2
        key = (addresses[:half], source, addresses[half:], target)
        if flags & _SYN:
            stream = self.streams[(*key, len(self.streams))] = Stream(next_seq=(seq + 1) % 2**32)
            stream.hello = 0 if flags & _ACK else _HELLO_BYTES
            self.streams[key] = stream
        elif payload and key in self.streams:
            self._segment(self.streams[key], seq, payload)
        elif payload:
            self.lost = True  # a connection whose beginning was not seen

    def _segment(self, stream: Stream, seq: int, payload: memoryview) -> None:
        assert stream.next_seq is not None
        ahead = (seq - stream.next_seq) % 2**32
        if ahead >= 2**31:  # sent before: what of it is new?
            payload = payload[2**32 - ahead :]
        elif ahead:
            self.lost = True
            stream.num_bytes += ahead
            stream.framed = False
        stream.num_bytes += len(payload)
        stream.next_seq = (stream.next_seq + (ahead if ahead < 2**31 else 0) + len(payload)) % 2**32
        if stream.framed:
            self._parse(stream, payload)

    def _parse(self, stream: Stream, payload: memoryview) -> None:
        while payload and stream.framed:
            if stream.hello or stream.left:
                skip = min(stream.hello or stream.left, len(payload))
                if stream.hello:
                    stream.hello -= skip
                    stream.said_hello += skip
                else:
                    stream.left -= skip
                payload = payload[skip:]
                continue
            need = _HEADER.size - len(stream.head)
            stream.head += payload[:need]
            payload = payload[need:]
            if len(stream.head) == _HEADER.size:
                self._header(stream, *_HEADER.unpack(stream.head))
                stream.head.clear()

    def _header(self, stream: Stream, size: int, code: int, slot: int, _: int, length: int, __: int) -> None:
        body = size - _HEADER.size
        if not 0 <= body < _MAX_MESSAGE_BYTES or code not in (1, 2, 3) or self._count >= MAX_MESSAGES:
            stream.framed = False
            return
        stream.left = body
        if code == _DATA:
            stream.messages.append((self._count, _COLLECTIVES.get(slot >> 56, "send"), body))
            self._count += 1

    def traffic(self, ports: Sequence[Iterable[int]]) -> Traffic:
        """What was seen so far, where rank r's connections have the local ports ``ports[r]``."""
        self.read()
        rank_of = {port: rank for rank, each in enumerate(ports) for port in each}
        sent = [0] * len(ports)
        other, complete, messages = self.foreign_bytes, not self.lost, []
        for key, stream in self._unique():
            source, target = rank_of.get(key[1]), rank_of.get(key[3])
            if source is None:
                other += stream.num_bytes
            else:  # which side connects, and so says hello, is a matter of chance
                sent[source] += stream.num_bytes - (stream.said_hello if target is not None else 0)
            framed = stream.framed and source is not None and target is not None
            complete = complete and (framed or not stream.num_bytes)
            if framed:
                messages += [(number, source, target, what, size) for number, what, size in stream.messages]
        in_order = tuple((source, target, what, size) for _, source, target, what, size in sorted(messages))
        return Traffic(tuple(sent), other, in_order, complete)  # type: ignore[arg-type]

    def _unique(self) -> list[tuple[tuple[Any, ...], Stream]]:
        """Each stream once, those under a numbered key: several connections may use a port, one after another."""
        return [(key, stream) for key, stream in self.streams.items() if len(key) == 5]


def ports_of(pid: int) -> set[int]:
    """The local ports of the TCP connections that a process of this network namespace holds open."""
    inodes = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                link = os.readlink(f"/proc/{pid}/fd/{name}")
                if link.startswith("socket:["):
                    inodes.add(link[8:-1])
    ports = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/self/net/{table}") as file:
            for line in list(file)[1:]:
                fields = line.split()
                if fields[9] in inodes:
                    ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports
