"""How much a submission may use, and how a process is held to it."""

from __future__ import annotations

import contextlib
import os
import resource
import stat
from dataclasses import dataclass, fields
from pathlib import Path

from dtlib.theory.units import MiB

from . import kernel

_OVERFLOW_USER = 65534  # who has no name in a user namespace
_FIRST_USER = 1_900_000_000  # far above every user that a machine has
_ADDRESSES_BYTES = 16 * 2**30  # empty mappings are free, but page tables are not, and looking through them takes time


@dataclass(frozen=True)
class Limits:
    """Bounds on one job: one case of one exercise.

    `cpu_seconds` is what a rank may compute, more where the reference needs more (see `costs`). Ranks are stuck when
    nothing has moved for `patience_seconds`, or have moved so little that no rank computed for `idle_seconds` of a case
    in all. `wall_seconds` ends what is not done by then, and `exercise_seconds` all cases of an exercise together;
    where ranks waited for a processor, what became of them is then not known. `memory_bytes` is what all
    processes of a job may hold beyond what they start with, `scratch_bytes` what each rank may write to its
    throw-away home, `file_bytes` the size of a file, `output_bytes` what a rank may print.
    """

    cpu_seconds: float = 10.0
    wall_seconds: float = 120.0
    exercise_seconds: float = 600.0
    patience_seconds: float = 3.0
    idle_seconds: float = 30.0
    memory_bytes: int = 1536 * MiB
    processes: int = 128
    file_bytes: int = 64 * MiB
    scratch_bytes: int = 64 * MiB
    output_bytes: int = 4 * MiB

    def __post_init__(self) -> None:
        """Refuse what is not positive."""
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ValueError(f"{field.name} must be positive, not {value!r}")


def obey(limits: Limits, cpu_seconds: float) -> None:
    """Hold this process, and all that it starts, to `limits`; nobody can raise them again."""
    settings = {
        resource.RLIMIT_CPU: int(2 * cpu_seconds) + 10,  # the warden's count comes first
        resource.RLIMIT_DATA: _told("VmData:") + limits.memory_bytes,
        resource.RLIMIT_AS: _told("VmSize:") + _ADDRESSES_BYTES,
        resource.RLIMIT_NPROC: limits.processes,  # threads count, and this user has no other processes
        resource.RLIMIT_FSIZE: limits.file_bytes,
        resource.RLIMIT_NOFILE: 128,
        resource.RLIMIT_CORE: 0,
    }
    for name, value in settings.items():
        hard = resource.getrlimit(name)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (value, value))


def become_nobody(number: int) -> None:
    """Take a user id that nobody else has, apart from other inmates: `number` tells these apart.

    Root takes an unused id. Anyone else keeps its id and, where the kernel allows it, enters a user namespace of its
    own, from which no process outside can be read. Raises ``OSError`` where privileges cannot be given up.
    """
    if os.geteuid() == 0 and _is_true_root() and _others_can_read(os.__file__):
        user = _FIRST_USER + number
        kernel.empty_bounding_set()
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        kernel.stay_visible()
    else:
        with contextlib.suppress(OSError):
            kernel.unshare(kernel.CLONE_NEWUSER)
        kernel.empty_bounding_set()
    kernel.drop_capabilities()


def users(number: int, world_size: int) -> list[int]:
    """The user ids that inmates may have, as they see them."""
    return sorted({os.geteuid(), _OVERFLOW_USER, *(_FIRST_USER + number + rank for rank in range(world_size))})


def _told(line: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(each.split()[1]) * 1024 for each in file if each.startswith(line))


def _others_can_read(file: str) -> bool:
    """Whether any user may read `file`. Where the files wall is down, Python may lie in a home closed to others."""
    parents = Path(file).resolve().parents
    return bool(os.stat(file).st_mode & stat.S_IROTH) and all(each.stat().st_mode & stat.S_IXOTH for each in parents)


def _is_true_root() -> bool:
    """Whether user 0 of this process's namespace may become any other user."""
    with open("/proc/self/uid_map") as file:
        return any(int(line.split()[2]) > _FIRST_USER for line in file)
