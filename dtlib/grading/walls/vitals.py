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
_AWAKE = frozenset("RD")  # running, or waiting for a processor or a disk


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


def highest_resident_bytes() -> int:
    """The highest resident memory of this process so far."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
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
                    with open(f"/proc/{pid}/task/{thread}/schedstat") as file:
                        ran, waited, _ = map(int, file.read().split())
                    running, starved = running + ran, starved + waited
                    awake = awake or _stat(f"/proc/{pid}/task/{thread}/stat")[0] in _AWAKE
    return Pulse(cpu, running / 1e9, starved / 1e9, awake)


def _stat(path: str) -> list[str]:
    with open(path) as file:
        return file.read().rpartition(")")[2].split()


def family(pid: int) -> list[int]:
    """A process, and all that descend from it and still live."""
    found = [pid]
    for each in found:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{each}/task"):
                with contextlib.suppress(OSError), open(f"/proc/{each}/task/{thread}/children") as file:
                    found += map(int, file.read().split())
    return found


def scratch_bytes(pid: int, folder: str) -> int:
    """What the file system that a process sees at `folder` holds; 0 where that cannot be told."""
    with contextlib.suppress(OSError):
        told = os.statvfs(f"/proc/{pid}/root{folder}")
        return (told.f_blocks - told.f_bfree) * told.f_frsize
    return 0
