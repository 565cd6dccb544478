"""The tap counts every byte of TCP once and reads gloo's framing, from packets made by hand."""

from __future__ import annotations

import struct

import pytest

from dtlib.grading.walls.tap import Stream, Tap

SYN, ACK = 0x02, 0x10


class Wire:
    """A tap that is fed packets instead of listening."""

    def __init__(self) -> None:
        self.tap = Tap.__new__(Tap)
        self.tap.streams, self.tap.foreign_bytes, self.tap.lost, self.tap._count = {}, 0, False, 0
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
    return struct.pack("<QQQQQQ", 48 + num_bytes, code, slot, 0, num_bytes, 0) + bytes(num_bytes)


HELLO = bytes(8)


def test_counts_payload_and_reads_messages_of_both_directions():
    wire = Wire()
    wire.connect(1, 2)
    wire.tcp(1, 2, 1000, HELLO + message(100))
    wire.tcp(2, 1, 2000, message(7, slot=4 << 56))
    traffic = wire.tap.traffic([{1}, {2}])
    assert traffic.sent_bytes == (148, 55)  # without the greeting
    assert traffic.total_bytes == 148 + 55
    assert traffic.messages == ((0, 1, "send", 100), (1, 0, "all_reduce", 7))
    assert traffic.complete
    assert traffic.other_bytes == 0


def test_a_message_may_be_cut_anywhere():
    data = HELLO + message(100) + message(0, code=2) + message(30, slot=3)
    for cut in range(1, len(data)):
        wire = Wire()
        wire.connect(1, 2)
        wire.tcp(1, 2, 1000, data[:cut])
        wire.tcp(1, 2, 1000 + cut, data[cut:])
        traffic = wire.tap.traffic([{1}, {2}])
        assert traffic.sent_bytes == (len(data) - 8, 0)
        assert traffic.messages == ((0, 1, "send", 100), (0, 1, "send", 30))


def test_what_is_sent_again_counts_once():
    wire = Wire()
    wire.connect(1, 2)
    data = HELLO + message(100)
    wire.tcp(1, 2, 1000, data)
    wire.tcp(1, 2, 1000, data)
    wire.tcp(1, 2, 1050, data[50:] + message(5))
    traffic = wire.tap.traffic([{1}, {2}])
    assert traffic.sent_bytes == (len(data) - 8 + 53, 0)
    assert traffic.messages == ((0, 1, "send", 100), (0, 1, "send", 5))
    assert traffic.complete


def test_sequence_numbers_may_wrap_around():
    wire = Wire()
    wire.tcp(1, 2, 2**32 - 11, flags=SYN)
    data = HELLO + message(100)
    wire.tcp(1, 2, 2**32 - 10, data[:20])
    wire.tcp(1, 2, 10, data[20:])
    assert wire.tap.traffic([{1}, {2}]).messages == ((0, 1, "send", 100),)


def test_a_gap_is_counted_and_makes_the_record_incomplete():
    wire = Wire()
    wire.connect(1, 2)
    wire.tcp(1, 2, 1000, HELLO)
    wire.tcp(1, 2, 1108, message(10))
    traffic = wire.tap.traffic([{1}, {2}])
    assert traffic.sent_bytes == (100 + 58, 0)
    assert not traffic.complete


def test_bytes_that_gloo_did_not_frame_make_the_record_incomplete():
    wire = Wire()
    wire.connect(1, 2)
    wire.tcp(1, 2, 1000, HELLO + b"x" * 200)
    traffic = wire.tap.traffic([{1}, {2}])
    assert traffic.sent_bytes == (200, 0)
    assert not traffic.complete


def test_connections_of_nobody_and_other_protocols_are_told_apart():
    wire = Wire()
    wire.connect(1, 2)
    wire.connect(3, 4)
    wire.tcp(1, 2, 1000, HELLO)
    wire.tcp(3, 4, 1000, b"y" * 500)
    wire.ip(17, b"u" * 80)
    traffic = wire.tap.traffic([{1}, {2}])
    assert traffic.sent_bytes == (0, 0)
    assert traffic.other_bytes == 500 + 100
    assert not traffic.complete


def test_a_port_that_is_used_again_starts_a_stream_of_its_own():
    wire = Wire()
    for _ in range(2):
        wire.connect(1, 2)
        wire.tcp(1, 2, 1000, HELLO + message(4))
    traffic = wire.tap.traffic([{1}, {2}])
    assert traffic.sent_bytes == (2 * 52, 0)
    assert len(traffic.messages) == 2


@pytest.mark.parametrize("size", [0, 13, 14, 20, 33, 40])
def test_a_broken_packet_is_counted_and_never_raises(size: int):
    wire = Wire()
    wire.tap._packet(memoryview(bytes([0] * 14 + [0x45] * size))[: max(size, 14)])
    assert wire.tap.traffic([]).sent_bytes == ()


def test_a_stream_starts_empty():
    assert Stream().messages == []
