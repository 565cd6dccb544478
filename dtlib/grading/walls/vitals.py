"""What the kernel tells of a process from outside (Linux): what it holds, how long it computed, whether it waits.

Nothing here is asked of the process itself, and nothing here can it reset.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass

_TICKS = os.sysconf("SC_CLK_TCK")
_HELD = ("RssAnon:", "RssShmem:", "VmSwap:")
_PARTS = ("Pss_Anon:", "Pss_Shmem:", "SwapPss:")
_AWAKE = frozenset((b"R", b"D"))  # running, or waiting for a processor or a disk


def can_be_read() -> bool:
    """Whether this system tells all this."""
    return sys.platform == "linux" and os.path.exists("/proc/self/schedstat")


def held_bytes(pid: int | str) -> int:
    """Private and shared memory of a process, what was swapped out included; files that it only reads are not."""
    held = 0
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith(_HELD):
                held += int(line.split()[1]) * 1024
    return held


def apportioned_bytes(pid: int) -> int:
    """The same, where a page that several processes share counts for each with its part; 0 of one that is gone.

    A process that forks shares all its pages with its child until one of them writes.
    """
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return 1024 * sum(int(line.split()[1]) for line in file if line.startswith(_PARTS))
    except PermissionError:
        return held_bytes(pid)
    except (OSError, ValueError):
        return 0


@dataclass(frozen=True)
class Pulse:
    """What some processes do: seconds computed, those of the threads that live (`running_seconds`, finer), and seconds
    that these waited for a processor. `awake` is whether any of them runs or wants to."""

    cpu_seconds: float = 0.0
    running_seconds: float = 0.0
    starved_seconds: float = 0.0
    awake: bool = False


def pulse(pids: Iterable[int]) -> Pulse:
    """The pulse of processes, their threads that have ended included in the seconds computed."""
    cpu, running, starved, awake = 0.0, 0, 0, False
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = _stat(f"/proc/{pid}/stat")
            cpu += sum(map(int, fields[11:15])) / _TICKS  # of its own and of children that it has buried
            for thread in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(OSError, ValueError, IndexError):
                    ran, waited, _ = map(int, _read(f"/proc/{pid}/task/{thread}/schedstat").split())
                    running, starved = running + ran, starved + waited
                    awake = awake or _stat(f"/proc/{pid}/task/{thread}/stat")[0] in _AWAKE
    return Pulse(cpu, running / 1e9, starved / 1e9, awake)


def _stat(path: str) -> list[bytes]:
    return _read(path).rpartition(b")")[2].split()


def _read(path: str) -> bytes:
    """A short file of the kernel's: read hundreds of times a second, and `open` takes four times as long."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)


def scratch_bytes(pid: int, folder: str) -> int:
    """What the file system that a process sees at `folder` holds; 0 where that cannot be told."""
    with contextlib.suppress(OSError):
        told = os.statvfs(f"/proc/{pid}/root{folder}")
        return (told.f_blocks - told.f_bfree) * told.f_frsize
    return 0
