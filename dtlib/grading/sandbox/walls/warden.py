"""The process that keeps the inmates of one start: raises the walls, watches over them, ends them all, reports."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from dtlib.grading.exercises import plain
from dtlib.grading.sandbox.harness import resolve
from dtlib.processes.channel import open_fd, send_frame
from dtlib.processes.namespace import adopt_orphans, die_with_parent, enter_namespaces, raise_loopback
from dtlib.processes.rank import RankFiles, spawn

from . import kernel, limits, view
from .tap import Tap
from .ward import Ward

_NAMESPACES = {
    "processes": kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS | kernel.CLONE_NEWNS,
    "network": kernel.CLONE_NEWNET,
    "files": kernel.CLONE_NEWNS,
}


class NoWall(Exception):
    """A wall that was asked for cannot stand on this machine; `wall` names it."""

    def __init__(self, wall: str, why: OSError) -> None:
        super().__init__(f"{wall}: {why}")
        self.wall = wall
        self.why = f"{type(why).__name__}: {why.strerror or why}" + (f" ({why.filename})" if why.filename else "")


def guard(control: socket.socket, job_fd: int, *, fork: bool = True) -> None:
    """Run the task that `job_fd` holds and report over `control`: never returns.

    The file holds where in it the task begins (8 bytes), what is handed out, and the task as plain data. The forked
    process is the warden's anchor outside; the warden itself is its child and the first process of the new
    process namespace, so that nothing inside can kill it, and nothing outlives it.
    """
    try:
        send_frame(control, str(os.getpid()).encode())
        with open_fd(job_fd, "rb") as file:
            file.seek(int.from_bytes(file.read(8), "big"))
            task = plain.unpack(file.read())
        for job in task["jobs"] if fork else ():  # what it cannot import here is no fault of what runs later
            resolve(job["harness"])
        if os.getsid(0) != os.getpid():
            os.setsid()  # a signal to its process group reaches no process outside
        standing = frozenset(task["walls"])
        if task["try_walls"]:
            _try_each((wall for wall in _NAMESPACES if wall in standing), _enter_namespaces)
        _enter_namespaces(standing)
        if "processes" in standing:
            pid = os.fork()
            if pid:
                control.close()
                os.waitpid(pid, 0)
                os._exit(0)
            die_with_parent()
            os.setsid()  # nor does one from inside reach the anchor
        _keep(Walled(task, job_fd, control, standing, fork=fork))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the grader is gone: nobody waits for an answer
    except NoWall as missing:
        _report(control, {"no_wall": missing.wall, "why": missing.why})
    except Exception as error:  # a fault of the warden's own: told, and never a verdict
        with contextlib.suppress(OSError):
            _report(control, {"broken": f"{type(error).__name__}: {error}"[:500]})
    finally:
        os._exit(0)


def _enter_namespaces(standing: frozenset[str]) -> None:
    flags = 0
    for wall in standing & set(_NAMESPACES):
        flags |= _NAMESPACES[wall]
    if flags:
        enter_namespaces(flags)


def _try_each(walls: Iterable[str], put_up: Callable[[frozenset[str]], None]) -> None:
    """Call ``put_up({wall})`` for one wall after another, in processes of their own. Raises `NoWall`."""
    for wall in walls:
        pid = os.fork()
        if pid == 0:
            number = 255
            try:
                put_up(frozenset({wall}))
                number = 0
            except OSError as error:
                number = error.errno if error.errno and error.errno < 256 else 255
            finally:
                os._exit(number)
        number = abs(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        if number:
            raise NoWall(wall, OSError(number, os.strerror(number)))


@contextlib.contextmanager
def _raising(wall: str) -> Iterator[None]:
    """An ``OSError`` in the block means that this wall cannot stand."""
    try:
        yield
    except OSError as error:
        raise NoWall(wall, error) from error


def _keep(ward: Walled) -> None:
    """Be the warden, in the namespaces that stand."""
    try:
        ward.prepare()
        ward.start()
        report = ward.watch()
        exits = [rank.failure.summary if rank.failure else "" for rank in ward.ranks]
        ward.end()
        _report(
            ward.control,
            {
                "jobs": ward.jobs_done,
                "states": report.states,
                "first": report.first,
                "exits": exits,
                "limit": ward.broken_limit,
                "tapped": ward.tap is not None,
            },
        )
        for kept, rank in zip(ward.kept_fds, ward.ranks, strict=True):
            send_frame(ward.control, b"F", [kept, rank.files.output, rank.files.stack])
    finally:
        ward.end()


def _report(control: socket.socket, facts: dict[str, Any]) -> None:
    send_frame(control, json.dumps(facts).encode())


class Walled(Ward):
    """A ward, and the walls around it."""

    def __init__(
        self, task: dict[str, Any], job_fd: int, control: socket.socket, standing: frozenset[str], *, fork: bool
    ) -> None:
        super().__init__({**task, "bounded": "limits" in standing}, job_fd, control, fork=fork)
        self.standing = standing

    def prepare(self) -> None:
        """Raise the walls that are left: the network's tap and the view. Raises `NoWall`."""
        if "network" in self.standing:
            with _raising("network"):
                raise_loopback()
                self.tap = Tap()
        own_processes = "processes" in self.standing
        users = limits.users(self.task["number"], self.task["world_size"])
        if "files" in self.standing:
            with _raising("files"):
                view.enter_view(map(Path, self.task["hidden"]), users, own_processes=own_processes)
        elif own_processes:
            with _raising("processes"):
                view.see_own_processes()
        if self.task["try_walls"]:
            from .inmate import give_up_privileges

            privileges = (wall for wall in ("files", "limits", "syscalls") if wall in self.standing)
            _try_each(privileges, partial(give_up_privileges, self.task, 0))
        if not own_processes:
            adopt_orphans()

    def fork_rank(self, rank: int, there: socket.socket, here: socket.socket, files: RankFiles) -> int:
        """Fork an inmate; behind the wall of processes as the first one of a namespace of its own."""
        if "processes" not in self.standing:
            return super().fork_rank(rank, there, here, files)
        own = os.open("/proc/self/ns/pid", os.O_RDONLY)
        try:
            kernel.unshare(kernel.CLONE_NEWPID)
            return super().fork_rank(rank, there, here, files)
        finally:
            kernel.enter(own)
            os.close(own)

    def be_rank(self, rank: int, sock: socket.socket, files: RankFiles) -> None:
        """Become an inmate."""
        from .inmate import live

        if self.tap is not None:
            self.tap.close()
        live(self.task, rank, sock, files, self.store_fd, self.standing)

    def spawn_rank(self, rank: int, there: socket.socket, here: socket.socket, files: RankFiles) -> int:
        """Start an inmate as a fresh process, without walls."""
        told = plain.pack([self.task, rank, there.fileno(), vars(files), self.store_path])
        return spawn(f"{__package__}.inmate", told, there, files)

    def end(self) -> None:
        """Leave no process of this start alive."""
        if self.tap is not None:
            self.tap.close()
        if "processes" not in self.standing:
            if not self.task.get("let_live"):
                super().end()
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(-1, signal.SIGKILL)  # all others of this namespace
        self._bury()
        if self.store_fd >= 0:
            os.close(self.store_fd)
            self.store_fd = -1

    def _bury(self) -> None:
        until = time.monotonic() + 5
        while time.monotonic() < until:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    time.sleep(0.001)
            except ChildProcessError:
                return
