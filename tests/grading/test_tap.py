"""The tap counts every byte of TCP once and reads gloo's framing, from packets made by hand."""

from __future__ import annotations

import struct

import pytest

from dtlib.grading.sandbox.walls import tap as taps
from dtlib.grading.sandbox.walls.tap import Tap

SYN, ACK = 0x02, 0x10
HELLO = bytes(8)


class Wire:
    """A tap that is fed packets instead of listening."""

    def __init__(self) -> None:
        self.tap = Tap.__new__(Tap)
        self.tap.streams, self.tap.entries, self.tap.foreign_bytes, self.tap.lost = [], [], 0, False
        self.tap._open, self.tap._foreign_before, self.tap.num_packets = {}, 0, 0
        self.tap.read = lambda at_most=0: None  # type: ignore[method-assign]

    def connect(self, source: int, target: int) -> None:
        self.tcp(source, target, 999, flags=SYN)
        self.tcp(target, source, 1999, flags=SYN | ACK)

    def tcp(self, source: int, target: int, seq: int, payload: bytes = b"", flags: int = ACK) -> None:
        segment = struct.pack("!HHIIBBHHH", source, target, seq % 2**32, 0, 5 << 4, flags, 0, 0, 0) + payload
        self.ip(6, segment)

    def ip(self, protocol: int, body: bytes) -> None:
        header = struct.pack(
            "!BBHHHBBH4s4s", 0x45, 0, 20 + len(body), 0, 0, 64, protocol, 0, b"\x7f\0\0\1", b"\x7f\0\0\1"
        )
        self.tap._packet(memoryview(bytes(14) + header + body))


def message(num_bytes: int, code: int = 1, slot: int = 0) -> bytes:
    size = 48 + (num_bytes if code == 1 else 0)
    return struct.pack("<QQQQQQ", size, code, slot, 0, num_bytes, 0) + bytes(size - 48)


def data(log: list[taps.Entry]) -> list[tuple[int, int, str, int]]:
    return [(source, target, op, size) for kind, source, target, op, _, size in log if kind == "data"]


def test_counts_payload_and_reads_messages_of_both_directions():
    wire = Wire()
    wire.connect(1, 2)
    wire.tcp(1, 2, 1000, HELLO + message(100))
    wire.tcp(2, 1, 2000, message(7, slot=4 << 56))
    traffic = wire.tap.traffic([{1}, {2}])
    assert traffic.sent_bytes == (148, 55)  # without the greeting
    assert data(traffic.log) == [(0, 1, "send", 100), (1, 0, "all_reduce", 7)]
    assert (traffic.complete, traffic.lost, traffic.other_bytes) == (True, False, 0)


def test_a_notice_is_its_header_and_carries_nothing():
    wire = Wire()
    wire.connect(1, 2)
    wire.tcp(1, 2, 1000, HELLO + struct.pack("<QQQQQQ", 48 + 8, 3, 7 << 56, 0, 0, 0) + b"a secret")
    traffic = wire.tap.traffic([{1}, {2}])
    assert not traffic.complete


def test_notices_tell_who_has_begun_what():
    wire = Wire()
    wire.connect(1, 2)
    wire.tcp(1, 2, 1000, HELLO + message(100, code=2) + message(50, code=3, slot=4 << 56 | 7 << 24 | 3))
    log = wire.tap.traffic([{1}, {2}]).log
    assert log == [("send", 0, 1, "send", 0, 100), ("receive", 0, 1, "all_reduce", 4 << 32 | 7, 50)]


def test_a_message_may_be_cut_anywhere():
    whole = HELLO + message(100) + message(0, code=2) + message(30, slot=3)
    for cut in range(1, len(whole)):
        wire = Wire()
        wire.connect(1, 2)
        wire.tcp(1, 2, 1000, whole[:cut])
        wire.tcp(1, 2, 1000 + cut, whole[cut:])
        traffic = wire.tap.traffic([{1}, {2}])
        assert traffic.sent_bytes == (len(whole) - 8, 0)
        assert data(traffic.log) == [(0, 1, "send", 100), (0, 1, "send", 30)]


def test_what_is_sent_again_counts_once():
    wire = Wire()
    wire.connect(1, 2)
    whole = HELLO + message(100)
    wire.tcp(1, 2, 1000, whole)
    wire.tcp(1, 2, 1000, whole)
    wire.tcp(1, 2, 1050, whole[50:] + message(5))
    traffic = wire.tap.traffic([{1}, {2}])
    assert traffic.sent_bytes == (len(whole) - 8 + 53, 0)
    assert data(traffic.log) == [(0, 1, "send", 100), (0, 1, "send", 5)]


def test_sequence_numbers_may_wrap():
    wire = Wire()
    wire.tcp(1, 2, 2**32 - 11, flags=SYN)
    wire.tcp(1, 2, 2**32 - 10, HELLO + message(3))
    wire.tcp(1, 2, 2**32 - 10 + 59, message(4))
    traffic = wire.tap.traffic([{1}, {2}])
    assert data(traffic.log) == [(0, 1, "send", 3), (0, 1, "send", 4)]


def test_a_count_may_begin_anew():
    wire = Wire()
    wire.connect(1, 2)
    wire.tcp(1, 2, 1000, HELLO + message(100))
    wire.tap.begin()
    assert wire.tap.position == 0
    wire.tcp(1, 2, 1156, message(9))
    traffic = wire.tap.traffic([{1}, {2}])
    assert (wire.tap.position, traffic.sent_bytes, data(traffic.log)) == (1, (57, 0), [(0, 1, "send", 9)])


@pytest.mark.parametrize("protocol", [17, 1])
def test_what_is_not_tcp_is_other_traffic(protocol: int):
    wire = Wire()
    wire.ip(protocol, bytes(500))
    assert wire.tap.traffic([{1}, {2}]).other_bytes == 520


def test_bytes_of_connections_that_are_gone_are_other_traffic():
    wire = Wire()
    wire.connect(5, 6)
    wire.tcp(5, 6, 1000, bytes(5000))
    traffic = wire.tap.traffic([{1}, {2}])
    assert traffic.other_bytes >= 4992
    assert not traffic.complete


def test_bytes_that_are_not_gloos_are_seen():
    wire = Wire()
    wire.connect(1, 2)
    wire.tcp(1, 2, 1000, HELLO + message(10) + b"hello" * 20)
    assert not wire.tap.traffic([{1}, {2}]).complete


def test_a_hole_is_a_loss():
    wire = Wire()
    wire.connect(1, 2)
    wire.tcp(1, 2, 1000, HELLO + message(10))
    wire.tcp(1, 2, 2000, message(10))
    traffic = wire.tap.traffic([{1}, {2}])
    assert traffic.lost
    assert not traffic.complete


def test_more_headers_than_anybody_needs_are_not_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(taps, "MAX_ENTRIES", 3)
    wire = Wire()
    wire.connect(1, 2)
    wire.tcp(1, 2, 1000, HELLO + 5 * message(1))
    traffic = wire.tap.traffic([{1}, {2}])
    assert len(traffic.log) == 3
    assert not traffic.complete
