"""Frames over sockets, file descriptors passed along, and files without a name: what our processes share."""

from __future__ import annotations

import os
import socket
import struct
import tempfile
from collections.abc import Iterable
from typing import BinaryIO

_LENGTH = struct.Struct("!I")
MAX_FRAME_BYTES = 64 * 2**20


def send_frame(sock: socket.socket, payload: bytes, fds: Iterable[int] = ()) -> None:
    """Send `payload` (at most 64 MiB) as one frame, with open file descriptors `fds` (at most 253) attached."""
    header = _LENGTH.pack(len(payload))
    fds = list(fds)
    if fds:
        socket.send_fds(sock, [header], fds)
        sock.sendall(payload)
    else:
        sock.sendall(header + payload)


def recv_frame(sock: socket.socket, max_fds: int = 0) -> tuple[bytes, list[int]]:
    """Receive one frame and the descriptors that came with it; ``EOFError`` when the other side is gone."""
    fds: list[int] = []
    header = b""
    while len(header) < _LENGTH.size:
        if max_fds and not header:
            part, fds, _, _ = socket.recv_fds(sock, _LENGTH.size, max_fds)
        else:
            part = sock.recv(_LENGTH.size - len(header))
        if not part:
            raise EOFError("the other side closed the channel")
        header += part
    (length,) = _LENGTH.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes is longer than {MAX_FRAME_BYTES}")
    payload = bytearray()
    while len(payload) < length:
        part = sock.recv(min(2**20, length - len(payload)))
        if not part:
            raise EOFError("the other side closed the channel in the middle of a frame")
        payload += part
    return bytes(payload), fds


def anonymous_file(name: str) -> int:
    """A descriptor of an empty file that has no name and vanishes with its last descriptor."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def open_fd(fd: int, mode: str) -> BinaryIO:
    """A file object that does not own `fd`, positioned at the start."""
    os.lseek(fd, 0, os.SEEK_SET)
    return open(fd, mode, closefd=False)  # type: ignore[return-value]


def read_text(fd: int) -> str:
    """All that was written to `fd`, as text."""
    with open_fd(fd, "rb") as file:
        return file.read().decode("utf-8", "replace")


def join(parts: list[bytes]) -> bytes:
    """Pack byte strings into one."""
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def split(packed: bytes) -> list[bytes]:
    """Undo `join`."""
    parts = []
    while packed:
        end = 4 + int.from_bytes(packed[:4], "big")
        parts.append(packed[4:end])
        packed = packed[end:]
    return parts
