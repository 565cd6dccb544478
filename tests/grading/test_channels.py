"""Ranks reach each other through the network that is looked at, and nothing hides memory that nobody weighs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from dtlib.grading.sandbox import Sandbox

from .engine import on_ranks, run

# Each of these would be a way to another rank, or a place that no scale sees. What a line gives is what got through.
WAYS = """
import ctypes
import fcntl
import pathlib
import socket
import sys

LIBC = ctypes.CDLL(None, use_errno=True)
LIBRARY = open(torch.__file__)


def call(number, *arguments):
    result = LIBC.syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result


def others():
    # Another rank is of another user: where it can be named at all, it may not be signalled.
    for number in range(2, 300):
        try:
            os.kill(number, 0)
        except PermissionError:
            return
        except ProcessLookupError:
            continue
    raise OSError("there is nobody")


def neighbours():
    own = os.readlink("/proc/self").split("/")[-1]
    assert [each.name for each in pathlib.Path("/proc").glob("[0-9]*") if each.name != own]


def f(tensor):
    rank = dist.get_rank()
    ways = {
        "a lock on a shared file (flock)": lambda: fcntl.flock(LIBRARY, fcntl.LOCK_SH),
        "a lock on a shared file (lockf)": lambda: fcntl.lockf(LIBRARY, fcntl.LOCK_SH),
        "a lease": lambda: fcntl.fcntl(LIBRARY, fcntl.F_SETLEASE, fcntl.F_RDLCK),
        "a watch on a shared file": lambda: call(294, 0),
        "a socket": lambda: socket.socket(),
        "a socket with a name": lambda: socket.socket(socket.AF_UNIX),
        "netlink": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
        "a pair of sockets": lambda: socket.socketpair(),
        "a nameless file": lambda: os.memfd_create("kept"),
        "a larger pipe": lambda: fcntl.fcntl(os.pipe()[1], 1031, 2**20),
        "pages given to a pipe": lambda: call(278, os.pipe()[1], None, 0, 0),
        "shared memory of System V": lambda: call(29, 7, 4096, 0o1666),
        "a semaphore": lambda: call(64, 7, 1, 0o1666),
        "a message queue": lambda: call(68, 7, 0o1666),
        "keys of the kernel": lambda: call(248, b"user", b"key", b"x", 1, -2),
        "another rank by its number": others,
        "another rank in /proc": neighbours,
        "a thread that was there before": lambda: in_a_thread(),
    }
    through = []
    for name, way in ways.items():
        try:
            way()
            through.append(name)
        except (OSError, AssertionError):
            pass
    print(through)


def in_a_thread():
    import concurrent.futures

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(socket.socket).result()
"""


def through(sandbox: Sandbox) -> list[set[str]]:
    printed = run(sandbox, on_ranks(2), WAYS).printed
    return [set(eval(line.partition("] ")[2])) for line in printed.splitlines()]


@pytest.fixture(scope="module")
def sandbox(lacking: Callable[[str], None]) -> Iterator[Sandbox]:
    with Sandbox() as walled:
        if any(walled.walls.values()):
            lacking(f"walls are missing: {walled.walls}")
        yield walled


def test_no_way_but_the_network_is_open(sandbox: Sandbox):
    assert through(sandbox) == [set(), set()]


@pytest.mark.usefixtures("sandbox")  # all walls can stand here
def test_where_the_kernel_is_not_told_to_refuse_they_are():
    with Sandbox(without=("syscalls", "processes")) as sandbox:
        for found in through(sandbox):
            assert {"a lock on a shared file (flock)", "a socket", "a pair of sockets", "a nameless file"} <= found
            assert {"a larger pipe", "a watch on a shared file", "a thread that was there before"} <= found
            assert "another rank by its number" in found


MEETING = (
    "from dtlib.lab import context\ndef f(tensor):\n    print(context.current('f').exchange({}))\n    return tensor\n"
)


def test_ranks_that_meet_are_told_nothing_of_each_other(sandbox: Sandbox):
    outcome = run(sandbox, on_ranks(2), MEETING.format("b'secret'"))
    assert outcome.printed.splitlines() == ["[rank 0] [b'', b'']", "[rank 1] [b'', b'']"]
    told = run(sandbox, on_ranks(2), MEETING.format("b'a secret of more than one frame' * 9")).observed[0].trouble
    assert told is not None
    assert told.kind == "tampered"
