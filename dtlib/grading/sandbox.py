"""Runs a learner's cells behind walls: what `runner` does for a notebook, for code that nobody trusts.

The grader keeps to plain data: it sends sources and drawn cases, and reads back JSON and npz of bounded size, beside
what the warden saw from outside. It never imports, unpickles or evaluates anything of a submission, nor loads torch.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from dtlib.processes.channel import anonymous_file, open_fd
from dtlib.processes.starter import ForkServer

from . import plain
from .drawn import Array, for_rank
from .exercise import Case, Exercise, Run, Trouble
from .returned import Returned, marked, receive, runs_of
from .runner import cut
from .walls import WALLS
from .walls.limits import Limits
from .walls.view import HOME, TEMPORARY, hidden_paths

_USERS = 4096  # how many inmates may live at once: each has a number of its own


class Cell(Protocol):
    """A code cell of a notebook."""

    @property
    def id(self) -> str: ...

    @property
    def source(self) -> str: ...


@dataclass(frozen=True)
class Outcome:
    """What came of an exercise: a `Run` for each case, what was printed (cut), and what was measured from outside.

    `peak_resident_bytes` is the most that all processes of a case held beyond what they started with; `metered` says
    how the traffic was counted.
    """

    runs: list[Run]
    printed: str = ""
    peak_resident_bytes: int = 0
    seconds: float = 0.0
    metered: str = ""


class SandboxError(RuntimeError):
    """The sandbox itself failed, which no submission can bring about by what it computes."""


class Sandbox:
    """Walls, and a fork server behind them. Use it as a context manager; `run` may be called from several threads.

    `without` leaves walls out, which is for tests that show what a wall is good for. `hidden` are folders that nobody
    inside may see even if a folder around them is in sight. Walls that this machine does not grant are left out too:
    `walls` tells for each name "" where it stands, else why it does not. Raises ``ValueError`` for an unknown wall and
    `SandboxError` on another system than Linux.
    """

    def __init__(
        self, limits: Limits | None = None, without: Collection[str] = (), hidden: Collection[Path] = ()
    ) -> None:
        unknown = sorted(set(without) - set(WALLS))
        if unknown:
            raise ValueError(f"without must name walls ({', '.join(WALLS)}), not {', '.join(map(repr, unknown))}")
        if sys.platform != "linux":
            raise SandboxError(f"submissions are run on Linux alone, and this is {sys.platform}; a container will do")
        self.limits = limits or Limits()
        self.walls = {wall: "left out" if wall in without else "" for wall in WALLS}
        self._hidden = [str(path) for path in hidden_paths(hidden)]
        self._numbers = itertools.cycle(range(0, _USERS, 128))
        self._lock = threading.Lock()
        self._server: ForkServer | None = None
        self._try_walls()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the fork server; cases that still run are ended by those who wait for them."""
        with self._lock:
            server, self._server = self._server, None
        if server is not None:
            server.close()

    @property
    def standing(self) -> list[str]:
        """The walls that stand."""
        return [wall for wall, why_not in self.walls.items() if not why_not]

    def run(self, exercise: Exercise, cells: Sequence[Cell], cases: Sequence[Case]) -> Outcome:
        """Run the learner's function for `exercise`, found in `cells`, on each case, each in fresh processes.

        Cases without a ``"world_size"`` share one process. After a case that hangs, or once it is clear that there is
        no function to run, the remaining cases are skipped. Nothing that the cells do raises here; `SandboxError` does
        where a fork server cannot be kept alive.
        """
        start = time.monotonic()
        printed: list[str] = []
        peak = 0
        runs: list[Run] = []
        # As bytes: plain data cut long texts.
        sources = _as_array(json.dumps([[cell.id, cell.source] for cell in cells]).encode())
        on_ranks = any("world_size" in case for case in cases)
        for group in [[case] for case in cases] if on_ranks else [list(cases)]:
            left = self.limits.exercise_seconds - (time.monotonic() - start)
            skipped = _skip(runs, left)
            if skipped is not None:
                runs += [Run(case, trouble=skipped) for case in group]
                continue
            task = self._task(exercise, sources, group, min(exercise.timeout_s, left))
            back = self._perform(task)
            if "lost" in back.facts:  # nobody inside can end a warden, so something outside did
                back = self._perform(task)
            runs += runs_of(group, task, back)
            peak = max(peak, int(back.facts.get("peak_bytes", 0)))
            printed += marked(back.outputs)
        return Outcome(runs, cut("".join(printed)), peak, time.monotonic() - start, self._metered())

    def _metered(self) -> str:
        if not self.walls["network"]:
            return "packets on the private loopback device, read outside of the submission's processes"
        return f"the submission's own processes, since there is no private network ({self.walls['network']})"

    def _task(self, exercise: Exercise, sources: Array, group: list[Case], timeout_s: float) -> dict[str, Any]:
        world_size = group[0].get("world_size", 1)
        return {
            "cells": sources,
            "cell_id": exercise.id.replace(".", "-"),
            "function": exercise.function,
            "harness": exercise.harness,
            "world_size": world_size,
            "cases": [_packed([for_rank(case, rank) for case in group]) for rank in range(world_size)],
            "num_cases": len(group),
            "together": "world_size" not in group[0],
            "timeout_s": timeout_s,
        }

    def _try_walls(self) -> None:
        task = {
            "cells": _as_array(b"[]"),
            "cell_id": "",
            "function": "",
            "harness": "paper.call",
            "world_size": 1,
            "cases": [_packed([])],
            "num_cases": 1,
            "together": True,
            "timeout_s": 30.0,
            "try_walls": True,
        }
        for _ in range(len(WALLS) + 1):
            facts = self._perform(task).facts
            if "no_wall" not in facts:
                return
            self.walls[facts["no_wall"]] = facts["why"]
        raise SandboxError(f"no wall stands on this machine: {self.walls}")

    def _perform(self, task: Mapping[str, Any]) -> Returned:
        """Have a warden run `task`, and wait until all its processes are gone."""
        with self._lock:
            number = next(self._numbers)
        whole = {
            **task,
            "number": number,
            "limits": asdict(self.limits),
            "walls": self.standing,
            "hidden": self._hidden,
            "directory": os.getcwd(),
        }
        job_fd = anonymous_file("dtlib-task")
        try:
            with open_fd(job_fd, "wb") as file:
                file.write(plain.pack(whole))
            control, pid = self._start(job_fd)
        finally:
            os.close(job_fd)
        with contextlib.closing(control):
            control.settimeout(task["timeout_s"] + 30)
            try:
                return receive(control, task["world_size"])
            except (OSError, EOFError, ValueError) as error:
                facts = {"lost": f"the warden of this case ended without a report ({type(error).__name__}: {error})"}
                return Returned(facts)
            finally:
                with contextlib.suppress(OSError):
                    control.shutdown(socket.SHUT_RDWR)
                _wait_for(pid)

    def _start(self, job_fd: int) -> tuple[socket.socket, int]:
        with self._lock:
            for attempt in range(2):
                if self._server is None or self._server.process.poll() is not None:
                    self._server = ForkServer(
                        "dtlib.grading.walls.warden:guard",
                        _MODULES,
                        None if self.walls["environment"] else _ENVIRONMENT,
                    )
                try:
                    return self._server.start(job_fd)
                except (OSError, EOFError) as error:
                    self._server.close()
                    self._server = None
                    if attempt:
                        raise SandboxError(f"the sandbox's fork server does not live: {error}") from error
        raise AssertionError("unreachable")


# All that a submission sees of the environment. The server starts with it, so that /proc/self/environ says no more.
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": HOME,
    "USER": "learner",
    "LOGNAME": "learner",
    "LANG": "C.UTF-8",
    "TMPDIR": TEMPORARY,
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
_MODULES = (
    "dtlib.grading.harness.activations",
    "dtlib.grading.harness.cells",
    "dtlib.grading.harness.collectives",
    "dtlib.grading.harness.dp",
    "dtlib.grading.harness.memory",
    "dtlib.grading.harness.paper",
    "dtlib.grading.harness.zero",
    "dtlib.ranks",
)


def _packed(cases: list[Any]) -> Array:
    """What one rank is told: packed by itself, so that the others need not unpack it."""
    return _as_array(plain.pack(cases))


def _as_array(data: bytes) -> Array:
    return np.frombuffer(data, np.uint8)


def _wait_for(pid: int) -> None:
    """Wait until the warden's anchor is gone, and with it every process of the case."""
    with contextlib.suppress(OSError):
        anchor = os.pidfd_open(pid)
        try:
            select.select([anchor], [], [], 15)
        finally:
            os.close(anchor)


def _skip(runs: Sequence[Run], seconds_left: float) -> Trouble | None:
    """Why the next case is not run, if it is not."""
    last = runs[-1].trouble if runs else None
    if last is not None and last.kind in ("hung", "skipped"):
        return Trouble("skipped", "not run, because an earlier case hung")
    if last is not None and last.kind in ("blank", "missing", "syntax", "limit", "tampered", "not sent"):
        return last
    if seconds_left <= 0:
        return Trouble("limit", "not run, because the time for this exercise was used up")
    return None


__all__ = ["Limits", "Outcome", "Sandbox", "SandboxError"]
