"""`lab.paced`: a network of known bandwidth, on one machine."""

from __future__ import annotations

import math
import os
import socket
import stat
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from dtlib.lab.launch import context

_SO_MAX_PACING_RATE = 47  # asm-generic/socket.h
_UNLIMITED = 2**64 - 1


@contextmanager
def paced(link_bytes_per_s: float) -> Iterator[None]:
    """Inside the block no connection of this rank sends faster than `link_bytes_per_s`; enter it in every rank.

    The kernel spaces out the packets of each TCP connection that is open now, so that a rank that waits for the
    network leaves its core alone, as a network card would: communication that overlaps computing costs nothing, and
    what a slow link costs can be measured on a laptop. Each direction of each pair of ranks is one link. Latency stays
    what it is. Rates from about 1 MB/s to 1 GB/s are kept within a few percent for messages of 100 kB and more.

    Raises ``ValueError`` for a rate that is not a positive number, and ``RuntimeError`` outside of a rank or where the
    kernel cannot pace (anything but Linux).
    """
    if isinstance(link_bytes_per_s, bool) or not 1 <= link_bytes_per_s < math.inf:
        raise ValueError(f"link_bytes_per_s must be a finite number, at least 1, not {link_bytes_per_s!r}")
    context.current("lab.paced()")
    if not sys.platform.startswith("linux"):
        raise RuntimeError(f"lab.paced() needs the pacing of Linux's TCP, and this is {sys.platform}")
    _pace(int(link_bytes_per_s))
    try:
        yield
    finally:
        _pace(_UNLIMITED)


def _pace(rate: int) -> None:
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            copy = os.dup(int(name))
        except OSError:  # the descriptor of the listing itself, closed by now
            continue
        with socket.socket(fileno=copy) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=Q", rate))
