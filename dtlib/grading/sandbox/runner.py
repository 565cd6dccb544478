"""Runs a learner's function on cases, in processes that a warden watches, and brings back what was seen and said.

The grader keeps to plain data: it sends sources and what is handed out, and reads back bounded data, beside what the
warden saw from outside. It never imports, unpickles or evaluates anything of a submission, nor loads torch. A notebook
uses the same way for a function of its own, without the walls that only strangers need.
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
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dtlib.grading.exercises import plain
from dtlib.grading.exercises.exercise import Exercise
from dtlib.grading.exercises.seen import Case, Observed, Trouble
from dtlib.processes.channel import anonymous_file, open_fd
from dtlib.processes.starter import ForkServer, start_supervisor

from . import costs
from .reports import Start, read_start, receive
from .walls import WALLS
from .walls.limits import Limits
from .walls.view import HOME, TEMPORARY, hidden_paths

_USERS = 4096  # how many inmates may live at once: each has a number of its own
_MOST_HANGS = 2  # after so many, the cases that are left are not tried
_FIRST_PLACE = 8  # in the file of a task, behind the bytes that say where the task itself begins
_GUARD = f"{__package__}.walls.warden:guard"
#: After these, nothing of the exercise counts, and nothing more of it is run.
WHOLE = ("blank", "missing", "syntax", "limit", "tampered")


class Cell(NamedTuple):
    """A code cell: its id, "" where it has none, and its source with ``\\n`` at line ends."""

    id: str
    source: str


@dataclass(frozen=True)
class Outcome:
    """What came of an exercise: what was observed of each case, what was printed (cut), and what it took."""

    observed: list[Observed]
    printed: str = ""
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    starved_seconds: float = 0.0


class SandboxError(RuntimeError):
    """The sandbox itself failed, which no submission can bring about by what it computes."""


class Sandbox:
    """Walls, and a fork server behind them. Use it as a context manager; `run` may be called from several threads.

    `without` leaves walls out. `hidden` are folders that nobody inside may see even if a folder around them is in
    sight. Walls that this machine does not grant are left out too: `walls` tells for each name "" where it stands, else
    why it does not. Raises ``ValueError`` for an unknown wall and `SandboxError` on another system than Linux, unless
    all walls but the network's are left out.
    """

    def __init__(
        self, limits: Limits | None = None, without: Collection[str] = (), hidden: Collection[Path] = ()
    ) -> None:
        unknown = sorted(set(without) - set(WALLS))
        if unknown:
            raise ValueError(f"without must name walls ({', '.join(WALLS)}), not {', '.join(map(repr, unknown))}")
        self.is_open = set(WALLS) - set(without) <= {"network"}
        if sys.platform != "linux" and not self.is_open:
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

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the fork server; jobs that still run are ended by those who wait for them."""
        with self._lock:
            server, self._server = self._server, None
        if server is not None:
            server.close()

    @property
    def standing(self) -> list[str]:
        """The walls that stand."""
        return [wall for wall, why_not in self.walls.items() if not why_not]

    def run(
        self,
        exercise: Exercise,
        answer: Answer,
        cases: Sequence[Case],
        tell: Callable[[int, str], None] = lambda done, words: None,
    ) -> Outcome:
        """Run the learner's function for `exercise` on each case, in fresh processes that a few cases share.

        After cases that hang, or once it is clear that there is no function to run, the others are skipped. A case that
        is ended though nobody can tell why is tried once more, alone. ``tell(done, words)`` is called before each
        start. Nothing that an answer does raises here; `SandboxError` does where a fork server cannot be kept alive.
        """
        return _Errand(self, exercise, answer, cases, tell).run()

    def perform(self, task: dict[str, Any], blobs: Sequence[bytes]) -> Start:
        """Have a warden run `task` with the `blobs` that it hands out; returns when all its processes are gone."""
        with self._lock:
            number = next(self._numbers)
        whole = {
            "try_walls": False,
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
                file.write((_FIRST_PLACE + sum(map(len, blobs))).to_bytes(_FIRST_PLACE, "big"))
                file.writelines([*blobs, plain.pack(whole)])
            control, pid = self._start(job_fd)
        finally:
            os.close(job_fd)
        with contextlib.closing(control):
            control.settimeout(sum(job["cpu_seconds"] for job in task["jobs"]) + self.limits.wall_seconds + 60)
            try:
                return receive(control, task["world_size"])
            except (OSError, EOFError, ValueError) as error:
                return Start(lost=f"the warden of this case ended without a report ({type(error).__name__}: {error})")
            finally:
                with contextlib.suppress(OSError):
                    control.shutdown(socket.SHUT_RDWR)
                _wait_for(pid)

    def _try_walls(self) -> None:
        task = {"world_size": 1, "answers": [], "jobs": [], "try_walls": True}
        for _ in range(len(WALLS) + 1):
            start = self.perform(task, [])
            if "no_wall" not in start.facts:
                return
            self.walls[start.facts["no_wall"]] = start.facts["why"]
        raise SandboxError(f"no wall stands on this machine: {self.walls}")

    def _start(self, job_fd: int) -> tuple[socket.socket, int]:
        if self.is_open:  # the learner's own processes: the lab's fork server will do
            return start_supervisor(job_fd, _GUARD, ("dtlib.lab", *_MODULES))
        with self._lock:
            for attempt in range(2):
                if self._server is None or self._server.process.poll() is not None:
                    self._server = ForkServer(_GUARD, _MODULES, None if self.walls["environment"] else _ENVIRONMENT)
                try:
                    return self._server.start(job_fd)
                except (OSError, EOFError, RuntimeError) as error:
                    self._server.close()
                    self._server = None
                    if attempt:
                        raise SandboxError(f"a fork server cannot be kept alive: {error}") from error
        raise AssertionError("unreachable")


class Answer:
    """What a learner wrote, on its way to the ranks: the cells of a notebook, or a function `sent` by value.

    Then the one cell is the file in which the function stands.
    """

    def __init__(self, cells: Sequence[Cell] = (), sent: bytes = b"") -> None:
        self.cells = [(cell.id, cell.source) for cell in cells]
        key, data = ("sent", sent) if sent else ("cells", json.dumps(self.cells).encode())
        self.packed = {key: np.frombuffer(data, np.uint8)}  # as bytes: plain data cut long texts


Job = tuple[Exercise, Answer, Case]


@dataclass
class _Errand:
    """One exercise of one answer: which cases are left, and what was observed of those that are done."""

    sandbox: Sandbox
    exercise: Exercise
    answer: Answer
    cases: Sequence[Case]
    tell: Callable[[int, str], None]
    done: dict[int, Observed] = field(default_factory=dict)
    retried: set[int] = field(default_factory=set)
    starts: list[Start] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)

    def run(self) -> Outcome:
        for group in self._groups():
            while left := [index for index in group if index not in self.done]:
                trouble = self._why_not()
                if trouble is not None:
                    self.done |= {index: Observed(self.cases[index], trouble=trouble) for index in left}
                else:
                    self._start(left)
        jobs = [job for start in self.starts for job in start.jobs]
        return Outcome(
            [self.done[index] for index in range(len(self.cases))],
            cut("".join(line for start in self.starts for line in start.printed())),
            time.monotonic() - self.begun,
            sum(sum(job["cpu_seconds"]) for job in jobs),
            sum(sum(job["starved_seconds"]) for job in jobs),
        )

    def _groups(self) -> Iterator[list[int]]:
        """The cases that share processes: those of as many ranks; one that is weighed has its own."""
        shared: dict[int, list[int]] = {}
        for index, case in enumerate(self.cases):
            if not case.get("weighed"):
                shared.setdefault(case.get("world_size", 1), []).append(index)
        yield from shared.values()
        yield from ([index] for index, case in enumerate(self.cases) if case.get("weighed"))

    def _why_not(self) -> Trouble | None:
        """Why nothing more is run, if it is not."""
        troubles = [each.trouble for each in self.done.values() if each.trouble is not None]
        whole = next((each for each in troubles if each.kind in WHOLE), None)
        if whole is not None:
            return whole
        hangs = sum(each.kind == "hung" for each in troubles)
        alone = "world_size" not in self.cases[0]  # on paper most points can be earned though some cases hang
        if hangs >= _MOST_HANGS and (not alone or hangs == len(self.done)):
            return Trouble("skipped", "not run, because earlier cases hung")
        hung = (each.seen.seconds for each in self.done.values() if each.trouble and each.trouble.kind == "hung")
        if sum(hung) > self.sandbox.limits.wall_seconds:
            return Trouble("skipped", "not run, because earlier cases hung for long")
        if time.monotonic() - self.begun > self.sandbox.limits.exercise_seconds:
            return Trouble("not known", "not run, because the time for this exercise was used up")
        return None

    def _start(self, indices: list[int]) -> None:
        n = self.cases[indices[0]].get("world_size", 1)
        self.tell(len(self.done), f"{n} ranks" if n > 1 else "one process")
        jobs = [(self.exercise, self.answer, self.cases[index]) for index in indices]
        start = self.sandbox.perform(*task_of(jobs, self.sandbox.limits.cpu_seconds))
        self.starts.append(start)
        observed = read_start(start, [(self.exercise, self.answer.cells, case) for _, _, case in jobs])
        start.results, start.stacks = [], []  # read, and perhaps large
        for index, each in zip(indices, observed, strict=False):  # after one that was ended, others may not have begun
            if each.trouble is not None and each.trouble.kind == "not known" and index not in self.retried:
                self.retried.add(index)
                self._start([index])
            else:
                self.done[index] = each


def task_of(jobs: Sequence[Job], least_seconds: float) -> tuple[dict[str, Any], list[bytes]]:
    """A task for `Sandbox.perform`: `jobs` of as many ranks, one after the other, and the blobs that it hands out."""
    blobs: list[bytes] = []
    answers: list[Answer] = []
    planned, end = [], _FIRST_PLACE

    def place(piece: Any) -> list[int]:
        """Where a piece stands in the file of the task: its first byte, and how many it has."""
        nonlocal end
        blobs.append(plain.pack(piece))
        end += len(blobs[-1])
        return [end - len(blobs[-1]), len(blobs[-1])]

    for exercise, answer, case in jobs:
        if not answers or answers[-1] is not answer:
            answers.append(answer)
        ranks = range(case.get("world_size", 1))
        planned.append(
            {
                "answer": len(answers) - 1,
                "cell_id": exercise.id.replace(".", "-"),
                "function": exercise.function,
                "harness": exercise.harness,
                "alone": "world_size" not in case,
                "weigh": bool(case.get("weighed")),
                "cpu_seconds": costs.limit(exercise.id, least_seconds),
                "pieces": [[place(piece) for _, piece in exercise.handed_out(case, rank)] for rank in ranks],
                "named": [{label: place(each) for label, each in exercise.named(case, rank).items()} for rank in ranks],
                "holds": [list(hold) for hold in exercise.holds(case)],
            }
        )
    world_size = jobs[0][2].get("world_size", 1)
    return {"world_size": world_size, "answers": [each.packed for each in answers], "jobs": planned}, blobs


def cut(text: str, most: int = 4000) -> str:
    """What was printed, its end cut off where it is long."""
    return text if len(text) <= most else text[:most] + "\n… (the rest is not shown)"


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
    "PYTHONWARNINGS": "ignore:`torch.distributed:FutureWarning",  # of names that newer versions have for old calls
}
_MODULES = (
    *(f"{__package__}.harness.{name}" for name in ("cells", "collectives", "paper")),
    f"{__package__}.walls.inmate",
    "dtlib.ranks",
)


def _wait_for(pid: int) -> None:
    """Wait until the warden's anchor is gone, and with it every process of the start."""
    with contextlib.suppress(AttributeError, OSError):  # no pidfd (not Linux), or gone already
        anchor = os.pidfd_open(pid)
        try:
            select.select([anchor], [], [], 15)
        finally:
            os.close(anchor)
