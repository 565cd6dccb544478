"""A crew: the ranks of one run, as the process that owns them starts, serves and ends them.

A rank says ``X`` and a few bytes where it meets the others, ``D`` when it is done and ``E`` when it failed; it
leaves when it is told to go. The first failure ends the run, or the others go on, as the crew's policy says.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import shutil
import signal
import socket
import tempfile
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from .channel import anonymous_file, join, open_fd, recv_frame, send_frame
from .namespace import enter_private_network, family
from .rank import Failure, RankFiles

MAX_OUTPUT_BYTES = 512 * 2**20
NO_NETWORK_FOR_SPAWNED = "ranks that are spawned share the machine's network"
_POLL_SECONDS = 0.05


@dataclass
class Rank:
    """A rank as its supervisor sees it. `state` is one of running, done, raised, died."""

    pid: int
    sock: socket.socket
    files: RankFiles
    state: str = "running"
    failure: Failure | None = None
    waiting: bytes | None = None


@dataclass(frozen=True)
class Report:
    """How a run ended, told to the parent: one state a rank, and failures by rank."""

    states: list[str]
    failures: dict[int, Failure] = field(default_factory=dict)
    first: int | None = None
    timed_out: bool = False
    network_error: str = ""
    stays: bool = False
    """Whether the ranks are there still, idle, and wait for another task."""
    refused: str = ""
    """Why no rank was started."""
    steps: dict[int, int] = field(default_factory=dict)
    """The last step that a rank marked, by rank."""
    happened: tuple[int, ...] = ()
    """Which of the faults that the ranks were to have did happen."""


class Crew(ABC):
    """The ranks of one run, `world_size` of them: a subclass says what a rank does.

    They may take `timeout_s`; their `network` is ``"private"`` where that can be had, or ``"host"``. `fork` says that
    this process may be forked. `control` is the channel to the parent. Where `goes_on`, a rank that fails ends alone:
    the others run on, and those that wait to meet it are told that they wait in vain.
    """

    frame_seconds = 10.0  # for a frame that a broken rank began and never ends
    grace_seconds = 0.1  # errors that follow from the first one arrive within this time

    def __init__(
        self,
        world_size: int,
        control: socket.socket,
        *,
        fork: bool,
        timeout_s: float = 0.0,
        network: str = "host",
        goes_on: bool = False,
    ) -> None:
        self.world_size, self.control, self.fork, self.goes_on = world_size, control, fork, goes_on
        self.timeout_s, self.network = timeout_s, network
        self.ranks: list[Rank] = []
        self.network_error = ""
        self._deadline = self._next_look = 0.0
        self.store_path, self.store_fd, self.store_directory = "", -1, ""

    def start(self) -> None:
        """Start all ranks, in a network of their own where that is asked for and possible."""
        self.make_network()
        self._make_store()
        files = [
            RankFiles(*(anonymous_file(f"dtlib-{rank}-{what}") for what in ("result", "output", "stack")))
            for rank in range(self.world_size)
        ]
        for rank, own in enumerate(files):
            os.set_blocking(own.output, True)
            here, there = socket.socketpair()
            here.settimeout(self.frame_seconds)
            start = self.fork_rank if self.fork else self.spawn_rank
            pid = start(rank, there, here, own)
            there.close()
            self.ranks.append(Rank(pid, here, own))

    def make_network(self) -> None:
        """Be in the network in which the ranks are to start, or say in `network_error` why that cannot be."""
        if self.network == "private":
            self.network_error = enter_private_network() if self.fork else NO_NETWORK_FOR_SPAWNED

    def _make_store(self) -> None:
        if self.fork and os.path.isdir("/proc/self/fd"):
            self.store_fd = anonymous_file("dtlib-store")  # a rendezvous that cannot be left behind
            self.store_path = f"/proc/{os.getpid()}/fd/{self.store_fd}"
        else:
            self.store_directory = tempfile.mkdtemp(prefix="dtlib-")
            self.store_path = os.path.join(self.store_directory, "store")

    def fork_rank(self, rank: int, there: socket.socket, here: socket.socket, files: RankFiles) -> int:
        """Start a rank as a fork of this process: its id."""
        pid = os.fork()
        if pid:
            return pid
        try:
            self.control.close()
            here.close()
            for other in self.ranks:
                other.sock.close()
            self.be_rank(rank, there, files)
        finally:
            os._exit(1)

    @abstractmethod
    def be_rank(self, rank: int, sock: socket.socket, files: RankFiles) -> None:
        """Live the life of a rank, in its own process: never returns."""

    @abstractmethod
    def spawn_rank(self, rank: int, there: socket.socket, here: socket.socket, files: RankFiles) -> int:
        """Start a rank as a fresh process, see `spawn`: its id."""

    def watch(self) -> Report:
        """Serve the ranks until all are done, one has failed, or the time is up."""
        return self.serve_all() or self.dismiss()

    def dismiss(self) -> Report:
        """Let all ranks go."""
        for rank in self.ranks:
            tell(rank, b"go")
        return self._report()

    def serve_all(self) -> Report | None:
        """Serve the ranks until none is running: None; or until one fails that ends the run, or the time is up."""
        self._deadline = time.monotonic() + self.timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self.control, selectors.EVENT_READ, None)
            for number, rank in enumerate(self.ranks):
                selector.register(rank.sock, selectors.EVENT_READ, number)
            while any(rank.state == "running" for rank in self.ranks):
                ready = selector.select(self.pause())
                for key, _ in ready:
                    if key.data is None:
                        if not self.control.recv(1):
                            raise EOFError("the parent left")
                        return self._timed_out()  # it was interrupted, and asks where the ranks are
                    if not self.serve(key.data):
                        selector.unregister(key.fileobj)
                if not ready or any(rank.state != "running" for rank in self.ranks):
                    self._notice_deaths()
                time_is_up = self.tend()
                self.let_meet()
                if not self.goes_on and self._has_failed():
                    return self._failed(selector)
                if time_is_up:
                    return self._timed_out()
        return None

    def serve(self, number: int) -> bool:
        """Read one frame of a rank; whether the rank may still speak."""
        rank = self.ranks[number]
        try:
            message, _ = recv_frame(rank.sock)
        except (EOFError, OSError, ValueError):
            return False  # its death is noticed by its process id
        self.hear(number, message[:1], message[1:])
        return True

    def hear(self, number: int, kind: bytes, payload: bytes) -> None:
        """Do what a rank's frame of this kind asks for."""
        rank = self.ranks[number]
        if kind == b"X":
            rank.waiting = payload
        elif kind == b"D":
            rank.state = "done"
        else:
            rank.state = "raised"
            rank.failure = self.read_failure(rank)

    def let_meet(self) -> None:
        """Give the ranks what they told each other, when all are there; nothing, where one will not come any more."""
        waiting = [rank for rank in self.ranks if rank.waiting is not None]
        if len(waiting) < self.world_size and not (self.goes_on and self._has_failed()):
            return
        met = join([rank.waiting or b"" for rank in waiting]) if len(waiting) == self.world_size else b""
        for rank in waiting:
            rank.waiting = None
            tell(rank, met)

    def _has_failed(self) -> bool:
        return any(rank.state in ("raised", "died") for rank in self.ranks)

    def read_failure(self, rank: Rank) -> Failure:
        """Why a rank that says so did not return."""
        with open_fd(rank.files.result, "rb") as file:
            failure: Failure = pickle.load(file)
        return failure

    def _notice_deaths(self) -> None:
        for number, rank in enumerate(self.ranks):
            if rank.pid and rank.state == "running":
                pid, status = os.waitpid(rank.pid, os.WNOHANG)
                if pid:
                    rank.pid, rank.state = 0, "died"
                    rank.failure = Failure(self.how_it_died(number, status))

    def how_it_died(self, number: int, status: int) -> str:
        """What is said of a rank whose process ended with `status`."""
        return _how_it_died(status)

    def _failed(self, selector: selectors.BaseSelector) -> Report:
        """Name the rank to blame: one that died before any that raised (they raise because it died)."""
        order = [number for number, rank in enumerate(self.ranks) if rank.state in ("raised", "died")]
        until = time.monotonic() + self.grace_seconds
        while time.monotonic() < until and any(rank.state == "running" for rank in self.ranks):
            for key, _ in selector.select(0.01):
                if key.data is None:
                    raise EOFError("the parent left")
                if not self.serve(key.data):
                    selector.unregister(key.fileobj)
            self._notice_deaths()
            order += [
                number
                for number, rank in enumerate(self.ranks)
                if rank.state in ("raised", "died") and number not in order
            ]
        first = next((number for number in order if self.ranks[number].state == "died"), order[0])
        blame = self.ranks[first].failure
        first = min(number for number in order if self.ranks[number].failure == blame)
        return self._report(first=first)

    def _timed_out(self) -> Report:
        self.ask_where()
        return self._report(timed_out=True)

    def ask_where(self) -> None:
        """Have each rank that still runs write where it is, its Python stack, into its file."""
        for rank in self.ranks:
            if rank.state == "running" and rank.pid:
                os.kill(rank.pid, signal.SIGUSR1)  # faulthandler writes the rank's Python stack
        time.sleep(0.2)

    def pause(self) -> float:
        """For how many seconds to wait for word of the ranks, before they are looked after again."""
        return min(_POLL_SECONDS, max(0.0, self._deadline - time.monotonic()))

    def tend(self) -> bool:
        """Look after the ranks: end one that prints without end. Whether their time is up."""
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _POLL_SECONDS
            for rank in self.ranks:
                if os.fstat(rank.files.output).st_size > MAX_OUTPUT_BYTES:
                    rank.state = "raised"
                    rank.failure = Failure(f"printed more than {MAX_OUTPUT_BYTES // 2**20} MiB and was stopped")
        return now >= self._deadline

    def _report(self, first: int | None = None, timed_out: bool = False) -> Report:
        failures = {number: rank.failure for number, rank in enumerate(self.ranks) if rank.failure is not None}
        states = [rank.state for rank in self.ranks]
        return Report(states, failures, first, timed_out, self.network_error)

    def end(self) -> None:
        """Leave no process of this run alive, the ranks' own children included, and no file."""
        finished = all(rank.state != "running" for rank in self.ranks) and (self.goes_on or not self._has_failed())
        patience = time.monotonic() + (5.0 if finished else 0.0)
        for rank in self.ranks:
            while rank.pid:
                pid, _ = os.waitpid(rank.pid, os.WNOHANG)
                if pid:
                    rank.pid = 0
                elif time.monotonic() >= patience:
                    os.kill(rank.pid, signal.SIGKILL)
                    os.waitpid(rank.pid, 0)
                    rank.pid = 0
                else:
                    time.sleep(0.001)
        _kill_descendants()
        if self.store_fd >= 0:
            os.close(self.store_fd)
            self.store_fd = -1
        if self.store_directory:
            shutil.rmtree(self.store_directory, ignore_errors=True)

    def report(self, report: Report) -> None:
        """Tell the parent, rank by rank, how it ended; hand over the files."""
        send_frame(self.control, pickle.dumps(report))
        for rank in self.ranks:
            send_frame(self.control, b"F", [rank.files.result, rank.files.output, rank.files.stack])


def tell(rank: Rank, payload: bytes) -> None:
    """Send a rank a frame."""
    with contextlib.suppress(OSError):  # it died meanwhile, which the next look at its process shows
        send_frame(rank.sock, payload)


def _how_it_died(status: int) -> str:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        text = f"was killed by signal {number} ({signal.Signals(number).name})"
        if number == signal.SIGKILL:
            text += "; if nobody sent it, the machine ran out of memory"
        if number == signal.SIGABRT:
            text += ": a library gave up, and what it printed says why"
        return text
    return f"exited with code {os.waitstatus_to_exitcode(status)} before it returned a result"


def _kill_descendants() -> None:
    """Kill what the ranks left behind: as orphans these are now children of this process."""
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for pid in family(os.getpid())[1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)
