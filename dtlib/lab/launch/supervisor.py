"""The process that owns the ranks of one run of `lab.run`, or of a session: it starts them, and reports."""

from __future__ import annotations

import os
import pickle
import selectors
import signal
import socket
from dataclasses import replace

from dtlib.processes.channel import open_fd, recv_frame, send_frame
from dtlib.processes.crew import NO_NETWORK_FOR_SPAWNED, Crew, Report, tell
from dtlib.processes.namespace import adopt_orphans
from dtlib.processes.rank import RankFiles, spawn

from .cables import Cables, ClusterRefused
from .faults import Striker
from .worker import Job, run_rank


def supervise(control: socket.socket, job_fd: int, *, fork: bool) -> None:
    """Run the job that `job_fd` holds and report over `control`: never returns."""
    crew: _Crew | None = None
    try:
        send_frame(control, str(os.getpid()).encode())
        with open_fd(job_fd, "rb") as file:
            job: Job = pickle.load(file)
        os.close(job_fd)
        adopt_orphans()
        crew = (_LastingCrew if job.lasts else _Crew)(job, control, fork)
        crew.start()
        report = crew.watch()
        crew.end()
        crew.report(report)
    except ClusterRefused as error:
        send_frame(control, pickle.dumps(Report([], refused=str(error))))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the parent is gone or was interrupted: nobody waits for an answer
    finally:
        if crew is not None:
            crew.end()
        os._exit(0)


class _Crew(Crew):
    def __init__(self, job: Job, control: socket.socket, fork: bool) -> None:
        super().__init__(
            job.world_size, control, fork=fork, timeout_s=job.timeout_s, network=job.network, goes_on=job.goes_on
        )
        self.job = job
        self.cables: Cables | None = None
        self.striker = Striker(job.faults, self._cut)

    def make_network(self) -> None:
        """Lay the cables of a cluster, if the ranks are to stand in one."""
        if self.job.cluster is None:
            super().make_network()
        elif self.fork:
            self.cables = Cables(self.job.cluster, self.job.environment)
        else:
            raise ClusterRefused(f"a cluster needs a fork server, on Linux, and {NO_NETWORK_FOR_SPAWNED}")

    def be_rank(self, rank: int, sock: socket.socket, files: RankFiles) -> None:
        if self.cables:
            self.cables.enter(rank)
        latency_by = self.cables.latency_by if self.cables else None
        run_rank(self.job, rank, sock, files, self.store_path, self.network_error, latency_by)

    def spawn_rank(self, rank: int, there: socket.socket, here: socket.socket, files: RankFiles) -> int:
        told = (self.job, rank, there.fileno(), files, self.store_path, self.network_error)
        return spawn(__name__, pickle.dumps(told), there, files)

    def hear(self, number: int, kind: bytes, payload: bytes) -> None:
        """Strike a rank that marks a step, if it has a fault there; it goes on when it knows what it has to do."""
        if kind != b"S":
            return super().hear(number, kind, payload)
        rank = self.ranks[number]
        tell(rank, pickle.dumps(self.striker.mark(number, rank.pid, int(payload))))

    def pause(self) -> float:
        return min(super().pause(), max(0.0, self.striker.wait()))

    def tend(self) -> bool:
        self.striker.turn(self._is_there)
        return super().tend()

    def dismiss(self) -> Report:
        self.striker.release(self._is_there)
        return super().dismiss()

    def ask_where(self) -> None:
        self.striker.release(self._is_there)
        super().ask_where()

    def how_it_died(self, number: int, status: int) -> str:
        fault = self.striker.killed(number)
        is_by_it = fault and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        return f"{fault.told}: {fault!r}" if fault and is_by_it else super().how_it_died(number, status)

    def _failed(self, selector: selectors.BaseSelector) -> Report:
        self.striker.release(self._is_there)
        report = super()._failed(selector)
        if self.job.faults:
            self.ask_where()
        return report

    def _report(self, first: int | None = None, timed_out: bool = False) -> Report:
        report = super()._report(first, timed_out)
        return replace(report, steps=dict(sorted(self.striker.steps.items())), happened=tuple(self.striker.happened))

    def _is_there(self, number: int) -> bool:
        return self.ranks[number].pid != 0

    def _cut(self, number: int, factor: float) -> None:
        if self.cables:
            self.cables.cut(number, factor)


class _LastingCrew(_Crew):
    """Ranks of a session: idle between tasks, which come from the parent.

    Ranks that have all failed alike wait for no other one, so they stay.
    """

    grace_seconds = 1.0  # for the others to fail alike

    def watch(self) -> Report:
        """Serve task after task, until one fails on some ranks alone, its time is up, or there are no more."""
        while True:
            failed = self.serve_all()
            alike = len({rank.failure for rank in self.ranks}) == 1 and all(
                rank.state == "raised" for rank in self.ranks
            )
            if failed and not alike:
                return failed
            for rank in self.ranks:
                rank.state, rank.failure = "done", None
            self.report(replace(failed or self._report(), stays=True))
            try:
                self.timeout_s, task = pickle.loads(recv_frame(self.control)[0])
            except (EOFError, ConnectionResetError):
                self.dismiss()  # with time to remove what they keep in temporary folders
                raise
            for rank in self.ranks:
                os.ftruncate(rank.files.output, 0)
                os.lseek(rank.files.output, 0, os.SEEK_SET)  # the rank goes on there: it shares the position
                rank.state = "running"
                tell(rank, task)


def spawned(job_fd: int) -> None:
    """The main function of a rank that was spawned rather than forked."""
    with open_fd(job_fd, "rb") as file:
        job, rank, sock_fd, files, store_path, network_error = pickle.load(file)
    os.close(job_fd)
    run_rank(job, rank, socket.socket(fileno=sock_fd), files, store_path, network_error)
