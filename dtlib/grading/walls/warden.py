"""The process that keeps the inmates of one case: raises the walls, counts from outside, ends them all, reports."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dtlib.grading import plain
from dtlib.grading.harness import SETTLE
from dtlib.lab.supervisor import Rank, Run
from dtlib.lab.worker import Failure, Job, RankFiles
from dtlib.processes.channel import anonymous_file, open_fd, send_frame
from dtlib.processes.namespace import adopt_orphans, die_with_parent, enter_namespaces, raise_loopback

from . import kernel, limits, view
from .inmate import give_up_privileges, live
from .tap import Tap, Traffic, ports_of

_NAMESPACES = {
    "processes": kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS | kernel.CLONE_NEWNS,
    "network": kernel.CLONE_NEWNET,
    "files": kernel.CLONE_NEWNS,
}


_MAX_FRAME_BYTES, _MAX_MEETINGS = 64, 64  # so much is needed, and more would be a way to exchange data unseen
_LONGEST_SETTLE_SECONDS = 2.0


class NoWall(Exception):
    """A wall that was asked for cannot stand on this machine; `wall` names it."""

    def __init__(self, wall: str, why: OSError) -> None:
        super().__init__(f"{wall}: {why}")
        self.wall = wall
        self.why = f"{type(why).__name__}: {why.strerror or why}" + (f" ({why.filename})" if why.filename else "")


def guard(control: socket.socket, job_fd: int, *, fork: bool = True) -> None:
    """Run the task that `job_fd` holds and report over `control`: never returns.

    The forked process is the warden's anchor outside; the warden itself is its child and the first process of the new
    process namespace, so that nothing inside can kill it, and nothing outlives it.
    """
    try:
        send_frame(control, str(os.getpid()).encode())
        with open_fd(job_fd, "rb") as file:
            task = plain.unpack(file.read(), max_bytes=2**31)
        os.close(job_fd)
        os.setsid()  # a signal to its process group reaches no process outside
        standing = frozenset(task["walls"])
        missing = _first_refused(standing) if task.get("try_walls") else None
        if missing is not None:
            _report(control, {"no_wall": missing.wall, "why": missing.why})
            os._exit(0)
        _enter_namespaces(standing)
        if "processes" in standing:
            pid = os.fork()
            if pid:
                control.close()
                os.waitpid(pid, 0)
                os._exit(0)
            die_with_parent()
            os.setsid()  # nor does one from inside reach the anchor
        _keep(control, task, standing)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the grader is gone: nobody waits for an answer
    finally:
        os._exit(0)


def _enter_namespaces(standing: frozenset[str]) -> None:
    flags = 0
    for wall in standing & set(_NAMESPACES):
        flags |= _NAMESPACES[wall]
    if flags:
        enter_namespaces(flags)


def _first_refused(standing: frozenset[str]) -> NoWall | None:
    """Which of the namespaces the kernel does not grant, tried one after another in processes of their own."""
    for wall in (each for each in _NAMESPACES if each in standing):
        number = _try(lambda wall=wall: _enter_namespaces(frozenset({wall})))  # type: ignore[misc]
        if number:
            return NoWall(wall, OSError(number, os.strerror(number)))
    return None


def _try(call: Callable[[], None]) -> int:
    """Call in a process of its own: 0, or the number of the error that it raised."""
    pid = os.fork()
    if pid == 0:
        try:
            call()
        except OSError as error:
            os._exit(error.errno if error.errno and error.errno < 256 else 255)
        except BaseException:
            os._exit(255)
        os._exit(0)
    return abs(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _keep(control: socket.socket, task: dict[str, Any], standing: frozenset[str]) -> None:
    """Be the warden, in the namespaces that stand."""
    cell = Cell(task, control, standing)
    try:
        cell.prepare()
        cell.start()
        report = cell.watch()
        facts = cell.facts()
        cell.end()
        _report(control, {"states": report.states, "first": report.first, "timed_out": report.timed_out, **facts})
        for rank in cell.ranks:
            send_frame(control, b"F", [rank.files.result, rank.files.output, rank.files.stack])
    except NoWall as missing:
        _report(control, {"no_wall": missing.wall, "why": missing.why})
    finally:
        cell.end()


def _report(control: socket.socket, facts: dict[str, Any]) -> None:
    send_frame(control, json.dumps(facts).encode())


class Cell(Run):
    """The inmates of one case."""

    frame_seconds = 1.0

    def __init__(self, task: dict[str, Any], control: socket.socket, standing: frozenset[str]) -> None:
        job = Job(b"", task["world_size"], task["timeout_s"], 1, "host", {}, "/", [], [], {})
        super().__init__(job, control, fork=True)
        self.task, self.standing = task, standing
        self.limits = limits.Limits(**task["limits"])
        self.tap: Tap | None = None
        self.traffic: Traffic | None = None
        self.peak_bytes = 0
        self.first_bytes = limits.resident_bytes()[0]
        self.broken_limit = ""
        self.settled: list[list[int]] = []
        self._num_meetings = 0
        self._begun: dict[int, float] = {}

    def prepare(self) -> None:
        """Raise the walls that are left: the network's tap and the view. Raises `NoWall`."""
        if "network" in self.standing:
            try:
                raise_loopback()
                self.tap = Tap()
            except OSError as error:
                raise NoWall("network", error) from error
        own_processes = "processes" in self.standing
        if "files" in self.standing:
            try:
                view.enter_view(map(Path, self.task["hidden"]), self._users(), own_processes=own_processes)
            except OSError as error:
                raise NoWall("files", error) from error
        elif own_processes:
            try:
                view.see_own_processes()
            except OSError as error:
                raise NoWall("processes", error) from error
        if self.task.get("try_walls"):
            self._try_privileges()
        if "processes" not in self.standing:
            adopt_orphans()

    def _users(self) -> list[int]:
        return limits.users(self.task["number"], self.task["world_size"])

    def _try_privileges(self) -> None:
        """See, in a process that does nothing else, whether an inmate could give up its privileges."""
        for wall in ("files", "limits", "syscalls"):
            if wall in self.standing:
                number = _try(lambda wall=wall: give_up_privileges(self.task, 0, frozenset({wall})))  # type: ignore[misc]
                if number:
                    raise NoWall(wall, OSError(number, os.strerror(number)))

    def _make_store(self) -> None:
        self.store_fd = anonymous_file("dtlib-store")

    def be_rank(self, rank: int, sock: socket.socket, files: RankFiles) -> None:
        """Become an inmate."""
        if self.tap is not None:
            self.tap.close()
        live(self.task, rank, sock, files, self.store_fd, self.standing)

    def read_failure(self, rank: Rank) -> Failure:
        """What an inmate wrote is left for the grader to read, as plain data."""
        return Failure("told")

    def _serve(self, number: int) -> bool:
        """Read one frame of an inmate, as soon as it is there as a whole: nobody may keep the warden waiting."""
        sock = self.ranks[number].sock
        try:
            ready = sock.recv(4 + _MAX_FRAME_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError:
            return False
        length = int.from_bytes(ready[:4], "big") if len(ready) >= 4 else 0
        if length > _MAX_FRAME_BYTES:
            self._break("tampered", "wrote to the grader's own channel")
            return False
        if ready and len(ready) < 4 + length:
            if time.monotonic() - self._begun.setdefault(number, time.monotonic()) > self.frame_seconds:
                self._break("tampered", "wrote to the grader's own channel")
                return False
            time.sleep(0.01)
            return True
        self._begun.pop(number, None)
        return super()._serve(number)

    def all_meet(self, said: list[bytes]) -> None:
        """Count the meetings, and where all want it, let what is under way arrive and note what each rank has sent."""
        self._num_meetings += 1
        if self._num_meetings > _MAX_MEETINGS:
            self._break("tampered", "used the grader's own channel to exchange data")
        if self.tap is None or not all(each.startswith(SETTLE) for each in said):
            return
        ports = [ports_of(rank.pid) for rank in self.ranks]
        announced = [int.from_bytes(each[len(SETTLE) :], "big") for each in said]
        until = time.monotonic() + _LONGEST_SETTLE_SECONDS
        while True:
            sent = self.tap.traffic(ports).sent_bytes
            arrived = all(seen >= wanted for seen, wanted in zip(sent, announced, strict=True))
            if arrived or time.monotonic() > until:
                break
            time.sleep(0.002)
        self.settled.append(list(sent))

    def look_after(self) -> None:
        """Drain the tap, and end what uses too much memory or prints too much."""
        if self.tap is not None:
            self.tap.read(at_most=2000)
        if "limits" not in self.standing:
            return
        self._count()
        if self.peak_bytes > self.limits.memory_bytes:
            self._break("memory", f"used more than {self.limits.memory_bytes / 2**20:.0f} MiB of memory and was ended")
        for rank in self.ranks:
            if os.fstat(rank.files.output).st_size > self.limits.output_bytes:
                self._break("output", f"printed more than {self.limits.output_bytes / 2**20:g} MiB and was ended")

    def _break(self, kind: str, text: str) -> None:
        self.broken_limit = self.broken_limit or f"{kind}: {text}"
        for rank in self.ranks:
            if rank.state == "running":
                rank.state, rank.failure = "raised", Failure(text)

    def _count(self) -> None:
        """Count the inmates and what they started, and their memory beyond what a rank has when it is forked."""
        own = os.getpid()
        found = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != own]
        inmates = [pid for pid in found if "processes" in self.standing or self._is_rank(pid)]
        grown = sum(max(0, limits.resident_bytes(pid)[0] - self.first_bytes) for pid in inmates)
        self.peak_bytes = max(self.peak_bytes, grown)
        most = (self.limits.processes + 1) * len(self.ranks)  # the kernel holds each rank to it, but not the root user
        if len(inmates) > most:
            self._break("processes", f"started more than {most} processes and was ended")

    def _is_rank(self, pid: int) -> bool:
        return any(rank.pid == pid for rank in self.ranks)

    def all_done(self) -> None:
        """While all inmates wait to leave: stop them, and read the counters."""
        if "processes" in self.standing:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(-1, signal.SIGSTOP)
        if self.tap is not None:
            self.traffic = self.tap.traffic([ports_of(rank.pid) for rank in self.ranks])
        highest = [limits.resident_bytes(rank.pid)[1] - self.first_bytes for rank in self.ranks if rank.pid]
        self.peak_bytes = max(self.peak_bytes, sum(max(0, each) for each in highest))

    def facts(self) -> dict[str, Any]:
        """What was seen from outside, as plain data."""
        exits = [rank.failure.summary if rank.failure else "" for rank in self.ranks]
        facts: dict[str, Any] = {"exits": exits, "limit": self.broken_limit, "peak_bytes": self.peak_bytes}
        if self.traffic is not None:
            seen = self.traffic
            facts["traffic"] = {
                "sent_bytes": seen.sent_bytes,
                "other_bytes": seen.other_bytes,
                "messages": seen.messages,
                "complete": seen.complete,
                "settled": self.settled,
            }
        return facts

    def end(self) -> None:
        """Leave no process of this case alive."""
        if self.tap is not None:
            self.tap.close()
        if "processes" in self.standing:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(-1, signal.SIGKILL)  # all others of this namespace
            self._bury()
            if self.store_fd >= 0:
                os.close(self.store_fd)
                self.store_fd = -1
        elif not self.task.get("let_live"):
            super().end()

    def _bury(self) -> None:
        until = time.monotonic() + 5
        while time.monotonic() < until:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    time.sleep(0.001)
            except ChildProcessError:
                return
