"""Start the supervisor of a run: through this process's fork server, or by spawning where forking is unsafe."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence

from .channel import anonymous_file, read_text, recv_frame, send_frame

START_METHOD_VARIABLE = "DTLIB_START_METHOD"
_START_SECONDS = 120.0


def start_method() -> str:
    """``"fork"`` where a process that has loaded torch may be forked (Linux), else ``"spawn"``.

    The environment variable ``DTLIB_START_METHOD`` overrides it.
    """
    chosen = os.environ.get(START_METHOD_VARIABLE, "fork" if sys.platform == "linux" else "spawn")
    if chosen not in ("fork", "spawn"):
        raise ValueError(f"{START_METHOD_VARIABLE} must be fork or spawn, not {chosen!r}")
    return chosen


def start_supervisor(job_fd: int, entry: str, modules: Sequence[str] = ()) -> tuple[socket.socket, int]:
    """Start a process that runs the job in `job_fd`; the channel on which it will report, and its process id.

    `entry` names the function ``"module:name"`` that it calls. The fork server, where this is the
    first call, imports `modules` too.
    """
    if start_method() == "fork":
        return _ask_server(job_fd, entry, modules)
    here, there = socket.socketpair()
    with there:
        _spawn(there.fileno(), job_fd, entry)
    return here, int(recv_frame(here)[0])


class ForkServer:
    """A process that has imported torch and forks a supervisor for each request.

    `supervisor` names the function ``"module:name"`` that the forked process calls, `modules` what is imported beside
    what every rank needs, `environment` the environment of the server and of all that it forks (default: this one).
    Raises ``RuntimeError`` with what the server printed where it cannot start.
    """

    def __init__(
        self,
        supervisor: str,
        modules: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.pid = os.getpid()
        here, there = socket.socketpair()
        log = anonymous_file("dtlib-server-log")
        code = f"from dtlib.processes.server import serve; serve({there.fileno()}, {supervisor!r}, {tuple(modules)!r})"
        # A session of its own: Ctrl-C in a terminal interrupts the reader's program, which then ends its run.
        self.process = _python(code, (there.fileno(),), stderr=log, start_new_session=True, environment=environment)
        there.close()
        here.settimeout(_START_SECONDS)
        try:
            if here.recv(1) != b"r":
                raise RuntimeError(f"the fork server could not start:\n{read_text(log).strip()}")
        except BaseException:
            self.process.kill()
            self.process.wait()
            here.close()
            raise
        finally:
            os.close(log)
        here.settimeout(None)
        self.sock = here

    def start(self, job_fd: int, entry: str = "") -> tuple[socket.socket, int]:
        """Have a supervisor forked for the job in `job_fd`, or `entry` called: its channel and process id.

        Raises ``OSError`` or ``EOFError`` where the server is gone.
        """
        here, there = socket.socketpair()
        try:
            with there:
                send_frame(self.sock, entry.encode(), [there.fileno(), job_fd])
            # An answer means that a supervisor lives: a server that was killed may still have taken the request.
            return here, int(recv_frame(here)[0])
        except BaseException:
            here.close()
            raise

    def close(self) -> None:
        """End the server; runs that go on end by themselves."""
        self.sock.close()
        if self.pid == os.getpid():
            try:
                self.process.wait(timeout=2)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


_server: ForkServer | None = None
_lock = threading.Lock()


def _ask_server(job_fd: int, entry: str, modules: Sequence[str]) -> tuple[socket.socket, int]:
    global _server
    with _lock:
        while True:
            fresh = _server is None or _server.process.poll() is not None
            if fresh:
                stop_server(locked=True)
            server = _server = _server or ForkServer(entry, modules)
            try:
                return server.start(job_fd, entry)
            except (OSError, EOFError):
                stop_server(locked=True)
                if fresh:
                    raise


def stop_server(*, locked: bool = False) -> None:
    """End this process's fork server, if it has one; the next run starts another."""
    global _server
    with contextlib.nullcontext() if locked else _lock:
        server, _server = _server, None
        if server is not None:
            server.close()


def _forget_server() -> None:
    """In a forked child of the reader's process: the server belongs to the parent."""
    global _server, _lock
    _lock = threading.Lock()
    if _server is not None:
        _server.sock.close()
        _server.process.returncode = 0  # not this process's child: Popen must not wait for it
        _server = None


atexit.register(stop_server)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_server)


def _spawn(control_fd: int, job_fd: int, entry: str) -> None:
    warnings.warn(
        "this process spawns its ranks, because forking one that has loaded torch is unsafe on this system: "
        "expect several seconds a run",
        stacklevel=5,
    )
    code = (
        "import socket; from dtlib.processes.server import call; "
        f"call({entry!r}, socket.socket(fileno={control_fd}), {job_fd}, fork=False)"
    )
    process = _python(code, (control_fd, job_fd), start_new_session=True)
    threading.Thread(target=process.wait, daemon=True).start()


def _python(
    code: str,
    fds: tuple[int, ...],
    *,
    start_new_session: bool,
    stderr: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    environment = os.environ if environment is None else environment
    return subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {code}"],
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        env={**environment, "OPENBLAS_NUM_THREADS": "1"},  # a thread pool must not exist before a fork
        start_new_session=start_new_session,
    )
