"""What lies outside of a sandbox while hostile submissions run: what to steal, to change, to reach; and the traces.

Whatever a case of the bank makes carries a mark of its own, so that the traces of one case are found on a machine on
which other things happen too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .answers import ROOT, cells
from .hostile_bank import reference_notebook

SECRET_VARIABLE = "DTLIB_TEST_TOKEN"
_WATCHED = ("dtlib", "solutions", "exercises", "chapters", "tests")


@dataclass(frozen=True)
class World:
    """The outside: `folder` is thrown away in the end, `submissions` are folders in several places."""

    folder: Path
    results: Path
    submissions: tuple[Path, ...]
    secret: str
    port: int
    name: str

    def knows(self, mark: str, results: Path | None = None) -> dict[str, Any]:
        """What stands above a case's code."""
        outside = {
            "results": str(results or self.results),
            "home": str(Path.home()),
            "submissions": [str(each) for each in self.submissions],
            "secret": self.secret,
            "processes": _namespace("pid"),
            "mounts": _namespace("mnt"),
            "group": os.getpgrp(),
        }
        return {"MARK": mark, "PORT": self.port, "SOCKET": self.name, "OUTSIDE": outside}


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return "unknown"


def new_mark() -> str:
    """A name for one try; a process can bear it (15 characters at most)."""
    return f"hostile-{secrets.token_hex(3)}"


@contextmanager
def world() -> Iterator[World]:
    """Build the outside, and take it down again."""
    name = f"hostile-{secrets.token_hex(4)}"
    bases = [Path(tempfile.gettempdir()), ROOT / "_build"]
    folders = [base / name for base in bases]
    secret = f"token-{secrets.token_hex(8)}"
    os.environ[SECRET_VARIABLE] = secret
    with _listening(name, cells("collectives")["collectives-2"]) as port, contextlib.ExitStack() as cleanup:
        for folder in folders:
            cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
            neighbour = folder / "submissions" / "neighbour"
            neighbour.mkdir(parents=True)
            (neighbour / "collectives.ipynb").write_text(json.dumps(reference_notebook("collectives")))
        results = folders[1] / "results"
        results.mkdir()
        (results / "results.json").write_text(json.dumps({"points": 0, "status": "not attempted"}))
        (results / "scores.csv").write_text("learner,points\nneighbour,0\n")
        os.chmod(results, 0o777)  # no wall, but an open door: the test must not pass thanks to the permissions alone
        for path in results.iterdir():
            path.chmod(0o666)
        yield World(folders[0], results, tuple(folder / "submissions" for folder in folders), secret, port, name)
    del os.environ[SECRET_VARIABLE]


@contextmanager
def _listening(name: str, answer: str) -> Iterator[int]:
    """Give `answer` away to whoever connects on this machine: by TCP, UDP and an abstract socket."""
    with contextlib.ExitStack() as cleanup:
        tcp = cleanup.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = int(tcp.getsockname()[1])
        udp = cleanup.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(("127.0.0.1", port))
        listeners = [tcp]
        if sys.platform == "linux":
            unix = cleanup.enter_context(socket.socket(socket.AF_UNIX))
            unix.bind("\0" + name)
            unix.listen()
            listeners.append(unix)

        def give_away(listener: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while True:
                    with listener.accept()[0] as connection, contextlib.suppress(OSError):
                        connection.sendall(answer.encode())

        def answer_datagrams() -> None:
            with contextlib.suppress(OSError, TypeError):  # an address of None says that the socket was shut
                while True:
                    udp.sendto(answer.encode(), udp.recvfrom(2**16)[1])

        for listener in listeners:
            threading.Thread(target=give_away, args=(listener,), daemon=True).start()
        threading.Thread(target=answer_datagrams, daemon=True).start()
        yield port
        for listener in (*listeners, udp):
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)


def processes(mark: str) -> list[int]:
    """The processes that bear the mark as their name."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):  # no glob: it fails where one ends meanwhile
        with contextlib.suppress(OSError):
            if Path("/proc", name, "comm").read_text().strip() == mark:
                found.append(int(name))
    return found


def end_processes(mark: str) -> None:
    """End what a control run left."""
    for pid in processes(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def files(mark: str, *folders: Path) -> list[Path]:
    """The files that bear the mark, where anybody may write and in `folders`."""
    homes = {Path.home(), Path(pwd.getpwuid(os.getuid()).pw_dir)}
    shared = {Path(each) for each in (tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm", "/run", ".", ROOT)}
    near = [path for folder in shared | homes if folder.is_dir() for path in folder.glob(f"*{mark}*")]
    near += [path for folder in homes for path in folder.glob(f".*{mark}*")]
    return sorted({*near, *(path for folder in folders for path in folder.rglob(f"*{mark}*"))})


def remove(paths: list[Path]) -> None:
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def fingerprints(folder: Path) -> dict[str, str]:
    """A digest of every file in `folder`, links as links."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or (path.is_file() and "__pycache__" not in path.parts)
    }


def project() -> dict[str, str]:
    """A digest of every file of the project that a submission might like to change."""
    return {f"{name}/{path}": digest for name in _WATCHED for path, digest in fingerprints(ROOT / name).items()}


class Naive:
    """The naive grader of `naive.py`, waiting for jobs."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("naive.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=folder,
            text=True,
            start_new_session=True,
        )
        self._answer()

    def grade(self, folder: Path, work: Path, exercise: str, style: str, seconds: float) -> dict[str, Any]:
        """How it ended: ``hangs``, ``grown_bytes``, ``group``, and ``points``, None where there is no verdict."""
        assert self.process.stdin is not None
        job = {"folder": str(folder), "work": str(work), "exercise": exercise, "style": style, "seconds": seconds}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        answer = self._answer()
        verdict = work / "verdict.json"
        report = verdict.read_text() if verdict.exists() else ""
        return answer | {"points": json.loads(report)["points"] if report else None, "report_bytes": len(report)}

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(10)


def wait_until(condition: Any, seconds: float = 3.0) -> bool:
    """Whether `condition()` becomes true in time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())
