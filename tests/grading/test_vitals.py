"""What is seen of a process from outside cannot be reset by it."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dtlib.grading.sandbox.walls import vitals
from dtlib.processes.namespace import family

pytestmark = pytest.mark.skipif(not vitals.can_be_read(), reason="this system tells nothing of a process")
MiB = 2**20


@contextmanager
def child(work: Callable[[], object]) -> Iterator[int]:
    """A process that does its work, and then waits to be ended."""
    here, there = os.pipe()
    pid = os.fork()
    if pid == 0:
        kept = work()
        os.write(there, b"x")
        signal.pause()
        os._exit(bool(kept))
    os.read(here, 1)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(here)
        os.close(there)


def private() -> object:
    memory = mmap.mmap(-1, 30 * MiB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # not what somebody else left in the heap
    memory.write(b"x" * 30 * MiB)
    return memory


def shared() -> object:
    memory = mmap.mmap(-1, 30 * MiB)
    memory.write(b"x" * 30 * MiB)
    return memory


def reset() -> object:
    kept = private()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return kept


@pytest.mark.parametrize("work", [private, shared, reset])
def test_memory_is_seen_however_it_is_held(work: Callable[[], object]):
    with child(lambda: None) as empty, child(work) as full:
        grown = vitals.held_bytes(full) - vitals.held_bytes(empty)
    assert 30 * MiB <= grown <= 34 * MiB


def behind_a_thread_that_has_ended() -> object:
    """The first thread of the process ends, another holds memory."""
    done = threading.Event()

    def hold() -> None:
        kept = private()
        done.set()
        time.sleep(60 + bool(kept))

    threading.Thread(target=hold, daemon=True).start()
    done.wait()
    return None


def test_memory_is_seen_where_only_another_thread_lives():
    here, there = os.pipe()
    pid = os.fork()
    if pid == 0:
        behind_a_thread_that_has_ended()
        os.write(there, b"x")
        ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)  # of this thread alone
    os.read(here, 1)
    try:
        until = time.monotonic() + 10
        while "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
            assert time.monotonic() < until
        assert vitals.held_bytes(pid) >= 30 * MiB
        assert vitals.apportioned_bytes(pid) >= 30 * MiB
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_what_a_child_shares_with_its_parent_counts_with_its_part_alone():
    with child(lambda: private()) as parent:
        alone = vitals.held_bytes(parent)

    def fork() -> object:
        kept = private()
        if os.fork() == 0:
            signal.pause()
        return kept

    with child(fork) as parent:
        first, *others = family(parent)
        try:
            together = vitals.held_bytes(first) + sum(map(vitals.apportioned_bytes, others))
        finally:
            for each in others:
                os.kill(each, signal.SIGKILL)
    assert len(others) == 1
    assert alone - MiB <= together <= 1.5 * alone + MiB


def test_what_a_child_alone_holds_counts_in_full():
    with child(lambda: None) as parent:
        before = vitals.apportioned_bytes(parent)
    with child(private) as parent:
        assert vitals.apportioned_bytes(parent) - before >= 29 * MiB


def test_a_process_that_waits_is_told_from_one_that_works():
    with child(lambda: None) as pid:
        seen: dict[tuple[int, bytes], float] = {}
        first = vitals.pulse([pid], seen)
        time.sleep(0.1)
        second = vitals.pulse([pid], seen)
        assert not second.awake
        assert second.running_seconds - first.running_seconds < 0.01
    pid = os.fork()
    if pid == 0:
        while True:
            pass
    try:
        until = time.monotonic() + 20
        while vitals.pulse([pid], {}).running_seconds < 0.05:
            assert time.monotonic() < until
        assert vitals.pulse([pid], {}).awake
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_what_is_gone_holds_nothing():
    assert vitals.held_bytes(2**22 - 1) == 0
    assert vitals.pulse([2**22 - 1], {}) == vitals.Pulse()
    assert vitals.scratch_bytes(2**22 - 1, "/") == 0
    assert family(2**22 - 1) == [2**22 - 1]
    assert os.getpid() in family(os.getppid())


def test_what_lies_in_pipes_is_counted_once_however_many_hold_them():
    with child(lambda: [os.pipe() for _ in range(10)]) as pid:
        found = vitals.pipe_bytes([pid])
        assert found >= 10 * 2**16
        assert vitals.pipe_bytes([pid, pid]) == found
