"""A rank as a process: its files, where its words go, and how one is started without a fork."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass

from .channel import anonymous_file, open_fd


@dataclass(frozen=True)
class RankFiles:
    """Descriptors of a rank's nameless files."""

    result: int
    output: int
    stack: int


@dataclass(frozen=True)
class Failure:
    """Why a rank did not return, in plain strings."""

    summary: str
    traceback: str = ""


def redirect(files: RankFiles) -> None:
    """Read from nowhere, print into the rank's own file, and write stacks into another when asked to."""
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(files.output, 1)
    os.dup2(files.output, 2)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    # Both write from C, without the interpreter's lock: they answer from a rank that hangs in a collective.
    # Of all threads where it dies: a library that gives up does so in a thread of its own, which has no such stack.
    faulthandler.enable(file=files.stack, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=files.stack, all_threads=False)


def spawn(module: str, told: bytes, there: socket.socket, files: RankFiles) -> int:
    """Start a rank as a fresh process that calls ``module.spawned(fd)``, where `fd` holds what it is told: its id."""
    job_fd = anonymous_file("dtlib-job")
    with open_fd(job_fd, "wb") as file:
        file.write(told)
    code = f"import sys; sys.path[:] = {sys.path!r}; from {module} import spawned; spawned({job_fd})"
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        pass_fds=(there.fileno(), job_fd, files.result, files.output, files.stack),
        stdin=subprocess.DEVNULL,
        stdout=files.output,
        stderr=files.output,
    )
    os.close(job_fd)
    child.returncode = 0  # reaped later by its process id; Popen must not warn
    return child.pid
