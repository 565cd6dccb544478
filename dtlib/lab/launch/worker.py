"""The life of one rank: take its place, meet the others, call the function, hand back the result, leave together."""

from __future__ import annotations

import atexit
import contextlib
import functools
import linecache
import os
import pickle
import random
import resource
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import cloudpickle
import numpy as np
import torch
import torch.distributed as dist

from dtlib.processes.channel import open_fd, recv_frame, send_frame
from dtlib.processes.namespace import die_with_parent
from dtlib.processes.rank import Failure, RankFiles, redirect
from dtlib.theory.cluster import Cluster

from . import cables, context, lasting, threads
from .faults import Fault


@dataclass(frozen=True)
class Job:
    """What every rank of a run is told. `call` is the pickled (function, arguments)."""

    call: bytes
    world_size: int
    timeout_s: float
    threads_per_rank: int
    network: str
    environment: dict[str, str]
    directory: str
    path: list[str]
    argv: list[str]
    sources: dict[str, Any]
    """Lines of code that exist in no file (notebook cells), for tracebacks: entries of `linecache.cache`."""
    lasts: bool = False
    """Whether the ranks of a session live on from task to task."""
    goes_on: bool = False
    """Whether the others run on where a rank fails."""
    cluster: Cluster | None = None
    """The nodes and links among which the ranks stand."""
    faults: tuple[Fault, ...] = ()
    """What is to happen to ranks, and when."""


def run_rank(
    job: Job,
    rank: int,
    sock: socket.socket,
    files: RankFiles,
    store_path: str,
    network_error: str,
    latency_by: str | None = None,
) -> None:
    """Be rank `rank`: never returns."""
    try:
        die_with_parent()
        redirect(files)
        _settle(job, rank)
        context.enter(
            context.RankContext(
                rank=rank,
                world_size=job.world_size,
                private_network=job.network == "private" and not network_error,
                why_not_private=network_error,
                latency_by=latency_by,
                exchange=context.exchange_over(sock),
                mark=context.mark_over(sock) if job.faults else None,
            )
        )
        names = lasting.new_names(rank, job.world_size) if job.lasts else {}
        task = functools.partial(_call, job, rank, store_path)
        while True:
            verdict = _attempt(task, files)
            sys.stdout.flush()
            sys.stderr.flush()
            send_frame(sock, verdict)
            word, _ = recv_frame(sock)
            if word == b"go":  # nobody leaves before all are done: an early exit would break a rank that still connects
                break
            task = functools.partial(lasting.do, names, word)
        names.clear()  # what removes its files when it is dropped does so now
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except EOFError:
        pass  # the supervisor is gone, and so is the reason to live
    finally:
        os._exit(0)


def _settle(job: Job, rank: int) -> None:
    os.environ.clear()
    os.environ.update(job.environment, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job.world_size))
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):  # all ranks are on this machine
        os.environ.setdefault(name, "lo" if sys.platform == "linux" else "lo0")
    if job.cluster:
        per_node = job.cluster.ranks_per_node
        os.environ.update(GLOO_SOCKET_IFNAME=cables.ACROSS, NCCL_SOCKET_IFNAME=cables.ACROSS)
        os.environ.update(LOCAL_RANK=str(rank % per_node), LOCAL_WORLD_SIZE=str(per_node))
    dist.set_debug_level_from_env()  # torch looked when the fork server imported it
    os.chdir(job.directory)
    sys.path[:] = job.path
    sys.argv[:] = job.argv
    linecache.cache.update(job.sources)
    atexit._clear()  # what the fork server's modules registered is the server's to do
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # The fork copied one generator state into all ranks; a process of its own would have drawn fresh ones.
    random.seed()
    np.random.seed()  # noqa: NPY002
    torch.set_num_threads(job.threads_per_rank)
    threads.listen()


def _call(job: Job, rank: int, store_path: str) -> Any:
    _join_group(job, rank, store_path)
    function, args = pickle.loads(job.call)
    return function(*args)


def _attempt(task: Callable[[], Any], files: RankFiles) -> bytes:
    """Write what `task` returns into the rank's file, or why it did not: the word for the supervisor."""
    try:
        room = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            result = task()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, room)  # a disk that lab.fill has filled, until now
        threads.raise_first()
        os.ftruncate(files.result, 0)
        with open_fd(files.result, "wb") as file:
            _dump_result(result, file)
        return b"D"
    except SystemExit as stop:
        failure = Failure(f"called sys.exit({stop.code!r}) before it returned a result", _format(stop))
    except UnsendableResult as error:
        failure = Failure(str(error))
    except threads.ThreadRaised as told:
        what, text = type(told.error).__name__, _text(told.error)
        failure = Failure(f"raised {what} in its thread {told.name!r}: {text}", _format(told.error))
    except BaseException as error:
        failure = Failure(f"raised {type(error).__name__}: {_text(error)}", _format(error))
    os.ftruncate(files.result, 0)
    with open_fd(files.result, "wb") as file:
        pickle.dump(failure, file)
    return b"E"


def _join_group(job: Job, rank: int, store_path: str) -> None:
    has_gpu_each = torch.cuda.is_available() and torch.cuda.device_count() >= job.world_size
    if has_gpu_each:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if has_gpu_each else "gloo",
        store=dist.FileStore(store_path, job.world_size),
        rank=rank,
        world_size=job.world_size,
        # The supervisor's limit comes first and explains itself; in a session each task has one of its own.
        timeout=timedelta(days=365) if job.lasts else timedelta(seconds=job.timeout_s + 60),
    )
    _let_senders_finish()


def _let_senders_finish() -> None:
    """Keep gloo's own thread from taking the core of a sender, whose lock it would spin on for a whole slice, 4 ms."""
    with contextlib.suppress(AttributeError, OSError):  # Linux alone
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/comm") as name:
                if name.read().startswith("gloo_tcp_loop"):
                    os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))


class UnsendableResult(TypeError):
    """A rank's result cannot be pickled."""


def _dump_result(result: Any, file: Any) -> None:
    try:
        cloudpickle.dump(result, file)
    except Exception as error:
        raise UnsendableResult(
            f"returned a {type(result).__name__} that cannot be sent back: {type(error).__name__}: {_text(error)}. "
            "Return plain data: numbers, strings, lists, arrays, tensors."
        ) from None


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its message cannot be shown)"


def _format(error: BaseException) -> str:
    """The traceback from the reader's function on, without the frames of the lab."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename in (__file__, lasting.__file__, threading.__file__):
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame)).rstrip()
