"""Reads a private network from outside: who sent how many bytes to whom, and which messages of gloo they were.

The tap takes packets from the kernel, so nothing that a rank does to its own process changes what it sees. Every byte
that TCP carries is counted once, repeats left out. Gloo's own framing, a header of six 64-bit numbers before each
message, tells a send from a piece of a collective, and which collective it is. Gloo also tells the other side what it
is ready for: the sender that it has something to send, the receiver that it wants it. So the network shows when a rank
has *begun* to send or to receive, even while its partner is not there.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

_ETH_P_ALL, _OUTGOING, _ETHERNET_BYTES = 3, 4, 14
_SO_RCVBUFFORCE, _SOL_PACKET, _PACKET_STATISTICS = 33, 263, 6
_BUFFER_BYTES = 256 * 2**20
_TCP, _SYN, _ACK, _ENDS = 6, 0x02, 0x10, 0x05  # FIN or RST
_HEADER = struct.Struct("<QQQQQQ")  # bytes of all, code, slot, offset, length, offset at the receiver
_KINDS = {1: "data", 2: "send", 3: "receive"}  # what a header stands for: see `Entry`
_HELLO_BYTES = 8  # the side that connects says which of the other's pairs it wants
_MAX_MESSAGE_BYTES = 2**32
MAX_ENTRIES = 50_000  # since `Tap.begin`
# The highest byte of a slot names the algorithm (gloo/types.h); a point-to-point message has its tag there, small.
_COLLECTIVES = {
    1: "gather", 2: "all_gather", 3: "reduce", 4: "all_reduce", 5: "scatter", 6: "broadcast", 7: "barrier",
    8: "all_to_all", 9: "reduce_scatter",
}  # fmt: skip
_SLOT_TAG = 24  # above the bits that an algorithm counts its steps with stands the number of the collective

Entry = tuple[str, int, int, str, int, int]
"""(kind, from, to, operation, which one, bytes): ``data`` that rank *from* sent to rank *to*, or the notice that it has
begun to ``send`` to it, or to ``receive`` from it. The operation is ``send`` or the name of a collective; *which one*
tells the calls of a collective apart, and is the tag of a message."""


@dataclass
class Stream:
    """One direction of a TCP connection, between two ports. `framed` is False as soon as its bytes are not gloo's."""

    ports: tuple[int, int]
    next_seq: int
    num_bytes: int = 0
    before: int = 0  # bytes when the present count began
    framed: bool = True
    left: int = 0  # bytes of the current message's payload still to come
    head: bytearray = field(default_factory=bytearray)
    hello: int = 0  # bytes of the greeting still to come
    said_hello: int = 0
    ended: bool = False


@dataclass(frozen=True)
class Traffic:
    """What crossed a private network since `Tap.begin`: payload of TCP.

    `sent_bytes` are those of each rank, `other_bytes` what no rank's open connection accounts for; both with gloo's
    headers. `log` has each header of gloo's in order. `complete` is False where packets were lost to the tap, bytes
    were not framed as gloo's, or a connection was ended: then only the counts can be relied on, and where packets were
    `lost` these neither.
    """

    sent_bytes: tuple[int, ...]
    other_bytes: int
    log: list[Entry]
    complete: bool
    lost: bool


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
        self.streams: list[Stream] = []  # all that there ever were
        self.entries: list[tuple[str, Stream, str, int, int]] = []
        self.foreign_bytes = 0  # of anything but TCP over IPv4 or IPv6
        self.lost = False
        self.num_packets = 0  # since `begin`
        self._open: dict[tuple[Any, ...], Stream] = {}
        self._buffer = bytearray(2**17)
        self._foreign_before = 0

    def begin(self) -> None:
        """Count anew from here on."""
        self.read()
        self.num_packets = 0
        self.entries.clear()
        self._foreign_before = self.foreign_bytes
        for stream in self.streams:
            stream.before = stream.num_bytes

    @property
    def position(self) -> int:
        """How many headers were seen since `begin`."""
        return len(self.entries)

    def read(self, at_most: int = 100_000) -> None:
        """Take in the packets that have arrived."""
        for _ in range(at_most):
            try:
                size, address = self.sock.recvfrom_into(self._buffer)
            except BlockingIOError:
                break
            if address[2] == _OUTGOING:  # on a loopback device each packet is seen going and coming
                self.num_packets += 1
                self._packet(memoryview(self._buffer)[:size])
        dropped = struct.unpack("=II", self.sock.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8))[1]
        self.num_packets += dropped
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
            hello = 0 if flags & _ACK else _HELLO_BYTES
            stream = self._open[key] = Stream((source, target), (seq + 1) % 2**32, hello=hello)
            self.streams.append(stream)
            return
        known = self._open.get(key)
        if known is not None:
            known.ended = known.ended or bool(flags & _ENDS)
        if payload and known is not None:
            self._segment(known, seq, payload)
        elif payload:
            self.lost = True  # a connection whose beginning was not seen

    def _segment(self, stream: Stream, seq: int, payload: memoryview) -> None:
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
        kind = _KINDS.get(code, "")
        most = _MAX_MESSAGE_BYTES if kind == "data" else 1  # a notice is its header
        if not kind or not 0 <= body < most or len(self.entries) >= MAX_ENTRIES:
            stream.framed = False
            return
        stream.left = body
        what = _COLLECTIVES.get(slot >> 56, "send")
        which = slot if what == "send" else slot >> _SLOT_TAG
        self.entries.append((kind, stream, what, which, body if kind == "data" else min(length, 2**40)))

    def traffic(self, ports: Sequence[Iterable[int]]) -> Traffic:
        """What was seen since `begin`, where rank r's connections have the local ports ``ports[r]``."""
        self.read()
        rank_of = {port: rank for rank, each in enumerate(ports) for port in each}
        sent, other, complete = [0] * len(ports), self.foreign_bytes - self._foreign_before, not self.lost
        ends: dict[int, tuple[int, int]] = {}
        for stream in self.streams:
            source, target = (rank_of.get(port) for port in stream.ports)
            num_bytes = stream.num_bytes - stream.before
            if not stream.before and target is not None:  # which side connects, and says hello, is a matter of chance
                num_bytes -= stream.said_hello
            if source is None:
                other += num_bytes
            else:
                sent[source] += num_bytes
            if source is not None and target is not None:
                ends[id(stream)] = source, target
                complete = complete and stream.framed and not stream.ended
            else:
                complete = complete and not num_bytes
        log = [
            (kind, *ends[id(stream)], what, instance, size)
            for kind, stream, what, instance, size in self.entries
            if id(stream) in ends
        ]
        return Traffic(tuple(sent), other, log, complete, self.lost)


def ports_of(pids: Iterable[int], known: dict[str, int]) -> list[set[int]]:
    """The local ports of the TCP connections that each of these processes of this network namespace holds open.

    `known` has the port of each socket that was ever looked up, 0 where it has none: the kernel takes milliseconds.
    """
    held = [set(_sockets(f"/proc/{pid}/fd")) for pid in pids]
    if new := set().union(*held) - known.keys():
        known.update(dict.fromkeys(new, 0))
        for table in ("tcp", "tcp6"):
            with contextlib.suppress(OSError), open(f"/proc/self/net/{table}") as file:
                for fields in map(str.split, list(file)[1:]):
                    known[f"socket:[{fields[9]}]"] = int(fields[1].rpartition(":")[2], 16)
    return [{known[each] for each in sockets} - {0} for sockets in held]


def _sockets(folder: str) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                link = os.readlink(f"{folder}/{name}")
                if link.startswith("socket:"):
                    yield link
