"""Which rank this process is, and how it talks to the other ranks without touching the network that is measured."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dtlib.processes.channel import recv_frame, send_frame, split


@dataclass(frozen=True)
class RankContext:
    """The place of this process in a run of `lab.run`."""

    rank: int
    world_size: int
    private_network: bool
    why_not_private: str
    exchange: Callable[[bytes], list[bytes]]
    """Give a few bytes, get those of every rank in rank order; returns when all ranks have called it."""
    latency_by: str | None = None
    """How the cables of a `lab.cluster` delay messages; None for a rank that has no cables."""
    mark: Callable[[int], list[Any]] | None = None
    """Tell that a step begins, and get the faults that the rank has to do by itself; None in a run without faults."""


_current: RankContext | None = None


def enter(context: RankContext) -> None:
    """Make `context` that of this process."""
    global _current
    if _current is not None:
        raise RuntimeError("this process is a rank already")
    _current = context


def leave() -> None:
    """Forget the context: this process is no rank any more."""
    global _current
    _current = None


def inside_rank() -> bool:
    """Whether this process is a rank of a running `lab.run`."""
    return _current is not None


def current(caller: str) -> RankContext:
    """The context of this rank; ``RuntimeError`` that names `caller` outside of `lab.run`."""
    if _current is None:
        raise RuntimeError(f"{caller} works inside a rank: call it in a function that lab.run runs")
    return _current


def barrier() -> None:
    """Wait until every rank of the run is here. Not one byte of it crosses the network of the ranks."""
    current("lab.barrier()").exchange(b"")


def exchange_over(sock: socket.socket) -> Callable[[bytes], list[bytes]]:
    """The exchange of a rank whose supervisor is at the other end of `sock`."""

    def exchange(payload: bytes) -> list[bytes]:
        send_frame(sock, b"X" + payload)
        if parts := split(recv_frame(sock)[0]):
            return parts
        raise RuntimeError("a rank of this run has failed: not all of them will meet here any more")

    return exchange


def mark_over(sock: socket.socket) -> Callable[[int], list[Any]]:
    """The marks of a rank whose supervisor, which strikes it where there is a fault, is at the other end of `sock`."""

    def mark(step: int) -> list[Any]:
        send_frame(sock, b"S%d" % step)
        faults: list[Any] = pickle.loads(recv_frame(sock)[0])
        return faults

    return mark
