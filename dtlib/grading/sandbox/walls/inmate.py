"""A rank behind walls: gives up every privilege, executes the learner's cells, runs the harness, writes plain data."""

from __future__ import annotations

import contextlib
import ctypes
import json
import linecache
import os
import pickle
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dtlib.grading.exercises import plain
from dtlib.grading.sandbox.harness import TROUBLE_MARK, cells, describe_error, resolve
from dtlib.grading.sandbox.harness.collectives import fair_collectives
from dtlib.grading.sandbox.harness.desk import Desk
from dtlib.grading.sandbox.harness.told import telling
from dtlib.lab.launch import context
from dtlib.processes.channel import open_fd, recv_frame, send_frame
from dtlib.processes.namespace import die_with_parent
from dtlib.processes.rank import RankFiles, redirect

from . import kernel, limits, view

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # of mallopt(3)
_AT_ONCE = 128 * 1024


def live(
    task: Mapping[str, Any],
    rank: int,
    sock: socket.socket,
    files: RankFiles,
    store_fd: int,
    standing: frozenset[str],
    store_path: str = "",
) -> None:
    """Be rank `rank` of `task` behind the walls that stand: never returns."""
    try:
        die_with_parent()
        with contextlib.suppress(PermissionError):  # a spawned one may lead a group already
            os.setsid()  # a signal to its process group reaches no other rank
        _keep_only([sock.fileno(), files.result, files.output, files.stack, *([store_fd] if store_fd >= 0 else [])])
        redirect(files)
        _settle(task, rank, standing)
        give_up_privileges(task, rank, standing - {"syscalls"})
        context.enter(
            context.RankContext(
                rank=rank,
                world_size=task["world_size"],
                private_network="network" in standing,
                why_not_private="" if "network" in standing else "there is no private network here",
                exchange=context.exchange_over(sock),
            )
        )
        if any(not job["alone"] for job in task["jobs"]):
            _join_group(task, rank, store_fd, store_path)
        if "syscalls" in standing:
            kernel.forbid_syscalls()  # now that all connections are open
        _work(task, files, sock, tapped="network" in standing)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        recv_frame(sock)  # nobody leaves before all are done
    except (EOFError, OSError):
        pass  # the warden is gone, and so is the reason to live
    finally:
        os._exit(0)


def spawned(task_fd: int) -> None:
    """The main function of an inmate that was spawned rather than forked, and has no walls."""
    with open_fd(task_fd, "rb") as file:
        task, rank, sock_fd, files, store_path = plain.unpack(file.read())
    os.close(task_fd)
    live(task, rank, socket.socket(fileno=sock_fd), RankFiles(**files), -1, frozenset(), store_path)


def give_up_privileges(task: Mapping[str, Any], rank: int, standing: frozenset[str]) -> None:
    """Raise the walls that a process raises around itself. Raises ``OSError`` where one cannot stand."""
    bounds = limits.Limits(**task["limits"])
    if "files" in standing:
        view.make_scratch(bounds.scratch_bytes)
        os.chdir(view.HOME)
    if "limits" in standing:
        limits.obey(bounds, sum(job["cpu_seconds"] for job in task["jobs"]))
        limits.become_nobody(task["number"] + rank)
    if "syscalls" in standing:
        kernel.forbid_syscalls()


def _keep_only(descriptors: list[int]) -> None:
    """Close what this process inherited, apart from `descriptors` and the standard streams."""
    low = 2
    for fd in sorted(descriptors):
        os.closerange(low + 1, fd)
        low = fd
    os.closerange(low + 1, 65536)


def _settle(task: Mapping[str, Any], rank: int, standing: frozenset[str]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(task["world_size"]))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    os.nice(5)  # the warden, its clock and the tap come first
    if "files" not in standing:
        os.chdir(task["directory"])
    sys.argv[:] = [""]
    tempfile.tempdir = None  # found anew: what the fork server found is not there any more
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    if any(job["weigh"] for job in task["jobs"]) and sys.platform == "linux":
        libc = ctypes.CDLL(None)  # what is freed goes back to the system at once, so that it is not held any more
        libc.mallopt(_MMAP_THRESHOLD, _AT_ONCE)
        libc.mallopt(_TRIM_THRESHOLD, _AT_ONCE)


def _join_group(task: Mapping[str, Any], rank: int, store_fd: int, store_path: str) -> None:
    n = task["world_size"]
    path = store_path or f"/proc/self/fd/{store_fd}"  # the rendezvous is a nameless file that every rank inherits
    with contextlib.nullcontext() if store_path else open_fd(store_fd, "rb"):
        store = dist.FileStore(path, n)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=timedelta(hours=2))
    dist.barrier()  # all connections stand
    if store_path:
        return
    with tempfile.TemporaryFile() as own:  # a copy: in a common file the ranks could exchange data unseen
        own.write(os.pread(store_fd, os.fstat(store_fd).st_size, 0))
        own.flush()
        os.dup2(own.fileno(), store_fd)
    store.set_timeout(timedelta(seconds=1))  # whoever waits there for another rank waits in vain


def _work(task: Mapping[str, Any], files: RankFiles, sock: socket.socket, *, tapped: bool) -> None:
    """Do all jobs: what each harness returns goes into the result file; ``D`` at the end, or ``E`` and the trouble."""
    desk = Desk(sock)
    with open_fd(files.result, "wb") as results, fair_collectives():
        function: Callable[..., Any] | None = None
        loaded: tuple[Any, ...] = ()
        try:
            for job in task["jobs"]:
                wanted = (job["answer"], job["cell_id"], job["function"])
                if wanted != loaded:
                    function, loaded = None, ()
                    function, loaded = _load(task["answers"][job["answer"]], job), wanted
                assert function is not None
                _write(results, _observe(job, function, desk, tapped=tapped))
                send_frame(sock, b"J")
        except BaseException as error:
            _write(results, {TROUBLE_MARK: _told(error, function)})
            send_frame(sock, b"E")
            return
        send_frame(sock, b"D")


def _observe(job: Mapping[str, Any], function: Callable[..., Any], desk: Desk, *, tapped: bool) -> Any:
    if not job["alone"] and not tapped:
        with telling() as log:
            return {**resolve(job["harness"])(function, desk), "traffic": log}
    if not job["alone"]:
        return resolve(job["harness"])(function, desk)
    try:
        return resolve(job["harness"])(function, desk)
    except Exception as error:  # costs this case alone: nobody else waits for this process
        return {TROUBLE_MARK: _told(error, function)}


def _told(error: BaseException, function: Callable[..., Any] | None) -> dict[str, Any]:
    if isinstance(error, cells.Unusable):
        return {"kind": error.kind, "type": "", "text": error.text, "where": error.line}
    return describe_error(error, function)


def _write(results: Any, data: Any) -> None:
    packed = plain.pack(data)
    results.write(len(packed).to_bytes(8, "big") + packed)
    results.flush()


def _load(answer: Mapping[str, Any], job: Mapping[str, Any]) -> Callable[..., Any]:
    """The function to judge: out of a submission's cells, or one that a notebook sent by value."""
    if "cells" in answer:
        sources = [(name, source) for name, source in json.loads(answer["cells"].tobytes())]
        return cells.load(sources, job["cell_id"], job["function"])
    sent = pickle.loads(answer["sent"].tobytes())
    sys.path[:] = sent["path"]
    linecache.cache.update(sent["sources"])
    function, _ = pickle.loads(sent["call"])
    return function  # type: ignore[no-any-return]
