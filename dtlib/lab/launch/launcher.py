"""`lab.run`: call a function in fresh processes that form a process group, and bring the results home."""

from __future__ import annotations

import contextlib
import linecache
import numbers
import operator
import os
import pickle
import select
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from dtlib.processes.channel import anonymous_file, open_fd, read_text, recv_frame
from dtlib.processes.crew import Report
from dtlib.processes.starter import start_supervisor
from dtlib.theory.cluster import Cluster

from . import context, torchrun
from .errors import RankError, RankTimeout, after, error_of, timeout_of
from .faults import Fault, checked
from .ship import pack
from .worker import Job

MAX_WORLD_SIZE = 128


class _Default(int):
    """A number that is told from an equal one that somebody gave."""


LEFT_OUT = _Default(4)
"""How many ranks there are where nobody says: a cluster says."""
_NETWORKS = ("private", "host")
_SUPERVISE = f"{__package__}.supervisor:supervise"
_WHERE_THE_READER_HAS_IT = ("dtlib.lab", "dtlib.ranks", "dtlib.theory", "torch.distributed.checkpoint")
"""What the fork server imports as well: else each rank of each run would, by itself."""


def run(
    fn: Callable[..., Any],
    world_size: int = LEFT_OUT,
    *,
    args: Sequence[Any] = (),
    timeout_s: float = 60,
    threads_per_rank: int = 1,
    network: str = "private",
    cluster: Cluster | None = None,
    return_exceptions: bool = False,
    faults: Sequence[Fault] = (),
) -> list[Any]:
    """Call ``fn(*args)`` in `world_size` fresh processes and return their results in rank order.

    In each process the default process group is ready: gloo on CPU, NCCL as well where each rank has a GPU. `fn`
    may be a closure, a lambda or a function of a notebook cell; it travels by value, as do `args` and the results.
    What the ranks print appears here, in rank order, each line marked with its rank.

    With ``network="private"`` the ranks live in a network namespace of their own where the kernel grants one, so
    that `lab.wire` sees their traffic alone and they reach no other host; ``"host"`` leaves them on the machine's
    network. With a `cluster` of `lab.cluster` they stand on its nodes, ranks 0 to g - 1 on the first, and are joined by
    its links. With ``return_exceptions=True`` the others run on where a rank fails, and its `RankError` stands in the
    place of its result: for ranks that are meant to fail, and what the others notice of it. Under ``torchrun`` the
    processes that are there are the ranks, and all but `fn` and `args` is torchrun's business.

    `faults` happen to ranks where they mark a step with `lab.step`, each of them once: `lab.kill`, `lab.stop`,
    `lab.slow`, `lab.fill`, `lab.flip`, and with a `cluster` `lab.cut` and `lab.slow` of a link. The errors then say at
    which step a rank was struck, and at which step and in which call of torch.distributed the others were. Where all
    ranks return and a fault has not happened, as its step was not marked, that is a ``RuntimeError``: what they
    returned was not tested.

    Ranks that ask a collective for different dtypes of one size get wrong numbers without a word. With
    ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` in ``os.environ`` torch compares before each call, and that is an error. It is
    not the default: every comparison sends some hundred bytes a rank, and `lab.wire` would count more than theory does.

    Raises ``ValueError`` or ``TypeError`` for a bad argument before anything starts, ``RuntimeError`` for faults under
    ``torchrun``, whose processes are not ours to strike, `RankError` when a rank raises, or one of its threads does
    before the rank returns (with which they end), or it exits or is killed (the others are ended at once),
    `RankTimeout` when `timeout_s` seconds have passed, with the Python stack of each rank that did not return, and
    ``RuntimeError`` inside a rank, or where this machine cannot have the cluster.
    """
    if context.inside_rank():
        raise RuntimeError("lab.run inside lab.run: this function is a rank already; call lab.run outside of the ranks")
    check_call(fn, args)
    if not isinstance(return_exceptions, bool):
        raise TypeError(f"return_exceptions must be True or False, not {return_exceptions!r}")
    job = job_of((fn, tuple(args)), world_size, timeout_s, threads_per_rank, network, cluster)
    struck = checked(faults, job.world_size, cluster is not None)
    if not torchrun.is_active():
        return run_job(replace(job, goes_on=return_exceptions, faults=struck))
    if struck:
        raise RuntimeError("faults need ranks that lab.run has started itself: under torchrun leave faults out")
    return torchrun.run_here(fn, tuple(args))


def check_call(fn: object, args: object) -> None:
    """``TypeError`` that names the argument unless `fn` can be called with the arguments `args`."""
    if not callable(fn):
        raise TypeError(f"fn must be callable, not {fn!r}")
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise TypeError(f"args must be a tuple of the arguments of fn, not {args!r}")


def job_of(
    call: tuple[Callable[..., Any], tuple[Any, ...]],
    world_size: Any,
    timeout_s: Any,
    threads_per_rank: Any,
    network: Any,
    cluster: Any,
    *,
    lasts: bool = False,
) -> Job:
    """The job of these ranks, with the arguments checked; see `run`."""
    if network not in _NETWORKS:
        raise ValueError(f"network must be one of {', '.join(_NETWORKS)}, not {network!r}")
    if cluster is not None:
        if not isinstance(cluster, Cluster):
            raise TypeError(f"cluster must be what lab.cluster returns, not {cluster!r}")
        if network == "host":
            raise ValueError(
                "network must be private with a cluster, whose ranks have networks of their own, not 'host'"
            )
        if world_size is not LEFT_OUT and world_size != cluster.world_size:
            raise ValueError(f"world_size must be the cluster's {cluster.world_size}, or left out, not {world_size!r}")
        world_size = cluster.world_size
    return Job(
        world_size=_integer("world_size", world_size, MAX_WORLD_SIZE),
        timeout_s=positive("timeout_s", timeout_s),
        threads_per_rank=_integer("threads_per_rank", threads_per_rank, 1024),
        network=network,
        call=b"" if torchrun.is_active() else pack(*call),
        environment=dict(os.environ),
        directory=os.getcwd(),
        path=list(sys.path),
        argv=list(sys.argv),
        sources={name: entry for name, entry in linecache.cache.items() if not os.path.exists(name)},
        lasts=lasts,
        cluster=cluster,
    )


def run_job(job: Job) -> list[Any]:
    """What each rank of `job` returned, in rank order; `RankError` or `RankTimeout` where one did not."""
    control, pid = start(job)
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(leave, control, pid)
        return outcome(job, receive_report(job, control), control)


def start(job: Job) -> tuple[socket.socket, int]:
    """Start the ranks of `job`: the channel to their supervisor, and its process id."""
    job_fd = anonymous_file("dtlib-job")
    try:
        with open_fd(job_fd, "wb") as file:
            pickle.dump(job, file)
        modules = [name for name in _WHERE_THE_READER_HAS_IT if name in sys.modules]
        return start_supervisor(job_fd, _SUPERVISE, modules)
    finally:
        os.close(job_fd)


def receive_report(job: Job, control: socket.socket) -> Report:
    """How the run went, or the task of a session; ``RuntimeError`` if the supervisor is gone.

    An interrupt is a ``KeyboardInterrupt`` that says where the ranks were, as `RankTimeout` does.
    """
    try:
        return _report(control)
    except KeyboardInterrupt:
        raise _interrupted(job, control) from None


def _report(control: socket.socket) -> Report:
    report: Report = pickle.loads(_receive(control)[0])
    return report


def _interrupted(job: Job, control: socket.socket) -> KeyboardInterrupt:
    error = KeyboardInterrupt()
    with contextlib.suppress(Exception):  # the ranks have just returned, or raised: no matter now
        control.sendall(b"?")
        try:
            outcome(job, _report(control), control)
        except RankTimeout as late:
            message = "interrupted: " + str(late).removeprefix(after(job))
            error = KeyboardInterrupt(message)
            # What a notebook shows instead of the way through this machinery.
            error._render_traceback_ = f"KeyboardInterrupt: {message}".splitlines  # type: ignore[attr-defined]
    return error


def outcome(job: Job, report: Report, control: socket.socket) -> list[Any]:
    """What the ranks returned, in files that come over `control`, or the error of `report`."""
    if report.refused:
        raise RuntimeError(report.refused)
    with contextlib.ExitStack() as cleanup:
        files = []
        for _ in range(job.world_size):
            fds = _receive(control, max_fds=3)[1]
            for fd in fds:
                cleanup.callback(os.close, fd)
            files.append(fds)
        printed = [read_text(output) for _, output, _ in files]
        show(printed)
        stacks = [read_text(stack) for _, _, stack in files]
        if report.timed_out:
            raise timeout_of(job, report, stacks)
        if report.first is not None:
            raise error_of(job, report, report.first, stacks, printed[report.first])
        _refuse_missed(job, report)
        return [
            error_of(job, report, rank, stacks, printed[rank], alone=True)
            if rank in report.failures
            else _load(rank, result)
            for rank, (result, _, _) in enumerate(files)
        ]


def _receive(control: socket.socket, max_fds: int = 0) -> tuple[bytes, list[int]]:
    try:
        return recv_frame(control, max_fds)
    except (EOFError, ConnectionResetError):
        raise RuntimeError(
            "the process that watches the ranks ended without a report; it was killed, or the machine ran out of memory"
        ) from None


def leave(control: socket.socket, pid: int) -> None:
    """Close the channel, which ends the run if it still goes on, and wait until its processes are gone."""
    with control, contextlib.suppress(OSError):
        control.shutdown(socket.SHUT_WR)
        control.settimeout(10)
        while control.recv(2**16):
            pass
    with contextlib.suppress(AttributeError, OSError):  # no pidfd (not Linux), or gone already
        supervisor = os.pidfd_open(pid)
        try:
            select.select([supervisor], [], [], 1)
        finally:
            os.close(supervisor)


def _load(rank: int, fd: int) -> Any:
    with open_fd(fd, "rb") as file:
        try:
            return pickle.load(file)
        except Exception as error:
            raise RankError(
                f"the result of rank {rank} arrived but cannot be rebuilt here: {type(error).__name__}: {error}",
                rank,
            ) from error


def show(outputs: list[str]) -> None:
    """Print what ranks have printed, each line marked with its rank."""
    for rank, text in enumerate(outputs):
        if text:
            sys.stdout.write("".join(f"[rank {rank}] {line}\n" for line in text.removesuffix("\n").split("\n")))
    sys.stdout.flush()


def _refuse_missed(job: Job, report: Report) -> None:
    """``RuntimeError`` where all ranks returned, although one was to be struck before."""
    missed = [fault for index, fault in enumerate(job.faults) if index not in report.happened]
    if missed and not report.failures:
        rank = missed[0].rank
        last = f"was {report.steps[rank]}" if rank in report.steps else "there is not"
        raise RuntimeError(
            f"{missed[0]!r} has not happened: rank {rank} returned, and the last step that it marked {last}. "
            "The function that the ranks run marks each of its steps with lab.step(number)"
        )


def _integer(name: str, value: object, largest: int) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = 0
    if not 1 <= number <= largest:
        raise ValueError(f"{name} must be a whole number from 1 to {largest}, not {value!r}")
    return number


def positive(name: str, value: object) -> float:
    """`value` as a number of seconds; ``ValueError`` that names the argument unless it is positive and finite."""
    number = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else 0.0
    if not 0 < number < float("inf"):
        raise ValueError(f"{name} must be a positive number of seconds, not {value!r}")
    return number
