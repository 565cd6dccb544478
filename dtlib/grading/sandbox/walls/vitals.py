"""What the kernel tells of a process from outside (Linux): what it holds, how long it computed, whether it waits.

Nothing here is asked of the process itself, and nothing here can it reset.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_TICKS = os.sysconf("SC_CLK_TCK")
_HELD = ("RssAnon:", "RssShmem:", "VmSwap:", "VmPTE:", "HugetlbPages:")
_PARTS = ("Pss_Anon:", "Pss_Shmem:", "SwapPss:", "Private_Hugetlb:", "Shared_Hugetlb:")
_PIPE_BYTES = 2**16  # that a pipe holds, as long as nobody may enlarge it
_AWAKE = frozenset((b"R", b"D"))  # running, or waiting for a processor or a disk


def can_be_read() -> bool:
    """Whether this system tells all this."""
    return sys.platform == "linux" and os.path.exists("/proc/self/schedstat")


def held_bytes(pid: int | str) -> int:
    """Private and shared memory of a process, page tables and what was swapped out included; files that it only reads
    are not."""
    return _sum(f"/proc/{pid}", "status", _HELD)


def apportioned_bytes(pid: int) -> int:
    """The same, where a page that several processes share counts for each with its part; 0 of one that is gone.

    A process that forks shares all its pages with its child until one of them writes.
    """
    try:
        return _sum(f"/proc/{pid}", "smaps_rollup", _PARTS) + _sum(f"/proc/{pid}", "status", ("VmPTE:",))
    except PermissionError:
        return held_bytes(pid)


def _sum(process: str, file: str, lines: tuple[str, ...]) -> int:
    """Bytes that some lines of a process's file add up to.

    Where its first thread has ended and others live on, the kernel tells of these alone.
    """
    for folder in (process, *_threads(process)):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, ValueError), open(f"{folder}/{file}") as told:
            found = [int(line.split()[1]) for line in told if line.startswith(lines)]
            if found:
                return 1024 * sum(found)
    return 0


def _threads(process: str) -> Iterator[str]:
    with contextlib.suppress(OSError):
        yield from (f"{process}/task/{name}" for name in os.listdir(f"{process}/task"))


@dataclass(frozen=True)
class Pulse:
    """What some processes do: seconds computed, those of the threads that live (`running_seconds`, finer), and seconds
    that these waited for a processor. `awake` is whether any of them runs or wants to."""

    cpu_seconds: float = 0.0
    running_seconds: float = 0.0
    starved_seconds: float = 0.0
    awake: bool = False


def pulse(pids: Iterable[int], computed: dict[tuple[int, bytes], float]) -> Pulse:
    """The pulse of processes, threads that have ended included in the seconds computed, and processes as well.

    `computed` has the seconds of all that were ever seen, and is brought up to date.
    """
    cpu, running, starved, awake = 0.0, 0, 0, False
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = _stat(f"/proc/{pid}/stat")
            own, buried = (sum(map(int, fields[at : at + 2])) / _TICKS for at in (11, 13))
            computed[pid, fields[19]] = own
            cpu += own + buried  # of children that it waited for; of others nothing is left but what was seen
            for thread in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(OSError, ValueError, IndexError):
                    ran, waited, _ = map(int, _read(f"/proc/{pid}/task/{thread}/schedstat").split())
                    running, starved = running + ran, starved + waited
                    awake = awake or _stat(f"/proc/{pid}/task/{thread}/stat")[0] in _AWAKE
    return Pulse(max(cpu, sum(computed.values())), running / 1e9, starved / 1e9, awake)


def _stat(path: str) -> list[bytes]:
    return _read(path).rpartition(b")")[2].split()


def _read(path: str) -> bytes:
    """A short file of the kernel's: read hundreds of times a second, and `open` takes four times as long."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)


def pipe_bytes(pids: Iterable[int]) -> int:
    """What the pipes hold at most that some processes have open: how full one is the kernel does not tell."""
    pipes: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    pipes.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    return _PIPE_BYTES * sum(each.startswith("pipe:") for each in pipes)


def scratch_bytes(pid: int, folder: str) -> int:
    """What the file system that a process sees at `folder` holds; 0 where that cannot be told."""
    with contextlib.suppress(OSError):
        told = os.statvfs(f"/proc/{pid}/root{folder}")
        return (told.f_blocks - told.f_bfree) * told.f_frsize
    return 0
