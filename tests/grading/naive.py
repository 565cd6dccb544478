"""A grader such as many are, for control runs: it executes a submission and asserts things about it in one process.

It has no walls, and believes what it finds: what came through its pipe, else ``results.json``, else the last JSON on
standard output, else that a process which ended with code 0 has passed. `main` serves jobs, one JSON line each; every
job gets a grader of its own, in a session of its own. Like all that execute strangers' code, it has torch loaded.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import re
import resource
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import dtlib.grading
import dtlib.lab
from dtlib.grading.exercises import plain

POINTS = 5
SKIPPED = ("nbval-skip", "raises-exception")


def main() -> None:
    """Answer the jobs of standard input, ``{"folder", "work", "exercise", "style", "seconds"}``, by how each ended."""
    if (pid := os.fork()) == 0:
        os._exit(0)
    baseline = os.wait4(pid, 0)[2].ru_maxrss * 1024
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.close(0)
            grade(Path(job["folder"]), Path(job["work"]), job["exercise"], job["style"])
            os._exit(0)
        ended, peak = _wait(pid, job["seconds"], Path(job["work"]) / "started")
        print(json.dumps({"group": pid, "hangs": not ended, "grown_bytes": peak - baseline}), flush=True)


def _wait(pid: int, seconds: float, started: Path) -> tuple[bool, int]:
    """Whether it ends within `seconds` after it has started on the submission, and its largest size in bytes."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        ended, _, usage = os.wait4(pid, os.WNOHANG)
        if ended:
            return True, usage.ru_maxrss * 1024
        if started.exists():
            until = min(until, started.stat().st_mtime - time.time() + time.monotonic() + seconds)
        time.sleep(0.005)
    os.killpg(pid, signal.SIGKILL)
    return False, os.wait4(pid, 0)[2].ru_maxrss * 1024


def grade(folder: Path, work: Path, exercise: str, style: str) -> None:
    """Grade the notebook in `folder` and write ``verdict.json`` in `work`, unless the submission prevents it."""
    os.chdir(work)
    os.environ.update(HOME=str(work), TMPDIR=str(work))
    output = os.open("output.txt", os.O_CREAT | os.O_RDWR, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    Path("started").touch()
    if style == "catches":
        try:
            space = run_cell(folder, exercise)
        except OSError:
            space = {}
        try:
            check(space, exercise, style)
            points, text = POINTS, ""
        except Exception as error:
            points, text = 0, str(error)
        Path("verdict.json").write_text(json.dumps({"points": points, "text": text}))
        return
    here, there = os.pipe()
    runners = []
    for rank in range(2 if style == "ranks" else 1):
        pid = os.fork()
        if pid == 0:
            os.close(here)
            _be_runner(folder, exercise, style, there, rank)
        runners.append(pid)
    os.close(there)
    told = _read(here)
    codes = [os.waitpid(pid, 0)[1] for pid in runners]
    Path("verdict.json").write_text(json.dumps({"points": _points(told, style, codes)}))


def _be_runner(folder: Path, exercise: str, style: str, there: int, rank: int) -> None:
    code = 1
    try:
        if style == "ranks":
            store = dist.FileStore("store", 2)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        answer = (
            check(run_cell(folder, exercise), exercise, style) if style != "cells" else _run_cells(folder, exercise)
        )
        os.write(there, answer or json.dumps({"points": POINTS}).encode())
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            _leave_properly()
        os._exit(code)


def _leave_properly() -> None:
    """What an interpreter does at its end: wait for threads, then call what was registered."""
    import atexit
    import threading

    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def run_cell(folder: Path, exercise: str) -> dict[str, Any]:
    """What the exercise's cell leaves behind, after the answers before it."""
    notebook = json.loads((folder / f"{exercise.partition('.')[0]}.ipynb").read_text())
    space: dict[str, Any] = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code" and not cell["id"].endswith("-check"):
            exec("".join(cell["source"]), space)
            if cell["id"] == exercise.replace(".", "-"):
                return space
    raise KeyError(exercise)


def check(space: dict[str, Any], exercise: str, style: str) -> bytes:
    """Assert that the answer is right. What is returned goes through the pipe in place of a plain verdict."""
    if style == "check":
        return json.dumps({"points": dtlib.grading.check(exercise, namespace=space).points}).encode()
    if style == "ranks":
        everybody = [torch.arange(1000.0) * (rank + 1) for rank in range(2)]
        tensor = everybody[dist.get_rank()].clone()
        space["ring_all_reduce"](tensor, "sum")
        assert torch.equal(tensor, sum(everybody)), "the sum is wrong"  # type: ignore[call-overload]
        return b""
    if style == "alarm":
        signal.signal(signal.SIGALRM, _raise_timeout)
        signal.alarm(1)
    if style == "cpu":
        resource.setrlimit(resource.RLIMIT_CPU, (1, resource.RLIM_INFINITY))
    if style == "limited":
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    expected = 2 * 7 / 8 * 25 * 2**20, 2 * 7 / 8 * 25 * 2**20 / 50e9
    start = time.monotonic()
    answer = space["ring_on_paper"](25 * 2**20, 8, 50e9)
    if style == "stopwatch":
        assert time.monotonic() - start < 1, "too slow"
    if style == "list":
        answer = list(answer)
    if style == "npz":
        return _pack({"answer": answer})
    if style == "pickle":
        return pickle.dumps(answer)
    for seen, wanted in zip(answer, expected, strict=True):
        _compare(seen, wanted, style)
    return b""


def _compare(seen: Any, wanted: float, style: str) -> None:
    if style == "equal":
        assert seen == wanted, f"{seen} is not {wanted}"
    elif style == "numpy":
        import numpy.testing as checker

        checker.assert_allclose(seen, wanted)
    elif abs(seen - wanted) > 1e-6 * wanted:
        raise AssertionError(f"{seen} is not {wanted}")


def _pack(data: Any) -> bytes:
    return plain.pack(data)


def _run_cells(folder: Path, exercise: str) -> bytes:
    """Run the whole notebook and its checks, as nbval and nbgrader do; tags are believed."""
    os.environ["NBGRADER_EXECUTION"] = "autograde"
    stem, number = exercise.split(".")
    space: dict[str, Any] = {"__name__": "__main__"}
    for cell in json.loads((folder / f"{stem}.ipynb").read_text())["cells"]:
        wanted = cell["id"] == "setup" or re.fullmatch(rf"{stem}-{number}(-check)?", cell["id"])
        if cell["cell_type"] == "code" and wanted:
            try:
                exec("".join(cell["source"]), space)
            except Exception:
                if not set(SKIPPED) & set(cell["metadata"].get("tags", [])):
                    raise
    return b""


def _raise_timeout(*_: Any) -> None:
    raise TimeoutError("too slow")


def _read(fd: int) -> bytes:
    told = bytearray()
    while some := os.read(fd, 2**20):
        told += some
    return bytes(told)


def _points(told: bytes, style: str, codes: list[int]) -> int:
    if style == "pickle" and told:
        answer = pickle.loads(told)
        return POINTS if answer == "never" else 0
    if style == "npz" and told:
        with np.load(io.BytesIO(told), allow_pickle=True) as archive:
            return POINTS if all(archive[name].size == 1 for name in archive.files) else 0
    if style == "ranks":
        return POINTS if codes == [0, 0] else 0
    printed = Path("output.txt").read_bytes()[-(2**16) :]
    results = Path("results.json").read_bytes() if Path("results.json").exists() else b""
    for text in (told, results, printed):
        found = re.findall(rb"\{[^{}]*\}", text)
        for each in reversed(found):
            with contextlib.suppress(ValueError):
                return int(json.loads(each).get("points", 0))
    return POINTS if codes == [0] else 0


if __name__ == "__main__":
    main()
