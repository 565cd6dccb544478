"""A rank behind walls: gives up every privilege, executes the learner's cells, runs the harness, writes plain data."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dtlib.grading import plain
from dtlib.grading.harness import TROUBLE_MARK, cells, describe_error, resolve
from dtlib.lab import context
from dtlib.lab.worker import RankFiles
from dtlib.processes.channel import open_fd, recv_frame, send_frame
from dtlib.processes.namespace import die_with_parent

from . import kernel, limits, view
from .seal import Seal


def live(
    task: Mapping[str, Any],
    rank: int,
    sock: socket.socket,
    files: RankFiles,
    store_fd: int,
    standing: frozenset[str],
) -> None:
    """Be rank `rank` of `task` behind the walls that stand: never returns."""
    try:
        die_with_parent()
        _keep_only([sock.fileno(), files.result, files.output, files.stack, store_fd])
        _redirect(files)
        os.nice(5)  # the warden, its clock and the tap come first
        _settle(task, rank, standing)
        give_up_privileges(task, rank, standing)
        context.enter(
            context.RankContext(
                rank=rank,
                world_size=task["world_size"],
                private_network="network" in standing,
                why_not_private="" if "network" in standing else "the grader's network wall is down",
                exchange=context.exchange_over(sock),
            )
        )
        verdict = _work({**task, "cases": _own_cases(task, rank)}, rank, files, store_fd)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        send_frame(sock, verdict)
        recv_frame(sock)  # nobody leaves before all are done
    except (EOFError, OSError):
        pass  # the warden is gone, and so is the reason to live
    finally:
        os._exit(0)


def give_up_privileges(task: Mapping[str, Any], rank: int, standing: frozenset[str]) -> None:
    """Raise the walls that a process raises around itself. Raises ``OSError`` where one cannot stand."""
    bounds = limits.Limits(**task["limits"])
    if "files" in standing:
        view.make_scratch(bounds.scratch_bytes)
        os.chdir(view.HOME)
    if "limits" in standing:
        limits.obey(bounds, task["timeout_s"] * task["num_cases"])
        limits.become_nobody(task["number"] + rank)
    if "syscalls" in standing:
        kernel.gain_nothing()
        kernel.forbid_syscalls()


def _part_with(store: dist.Store, store_fd: int) -> None:
    """Have a copy of the file in which the ranks have met: in a common one they could exchange data unseen."""
    with tempfile.TemporaryFile() as own:
        own.write(os.pread(store_fd, os.fstat(store_fd).st_size, 0))
        own.flush()
        os.dup2(own.fileno(), store_fd)
    store.set_timeout(timedelta(seconds=1))  # whoever waits there for another rank waits in vain


def _own_cases(task: Mapping[str, Any], rank: int) -> list[Any]:
    """What this rank is told of the cases. What the others are told, which was forked along, is wiped out."""
    own: list[Any] = plain.unpack(task["cases"][rank].tobytes())
    for packed in task["cases"]:
        packed[:] = 0
    return own


def _keep_only(descriptors: list[int]) -> None:
    """Close what this process inherited, apart from `descriptors` and the standard streams."""
    low = 2
    for fd in sorted(descriptors):
        os.closerange(low + 1, fd)
        low = fd
    os.closerange(low + 1, 65536)


def _redirect(files: RankFiles) -> None:
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(files.output, 1)
    os.dup2(files.output, 2)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    faulthandler.enable(file=files.stack, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=files.stack, all_threads=False)


def _settle(task: Mapping[str, Any], rank: int, standing: frozenset[str]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(task["world_size"]))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if "files" not in standing:
        os.chdir(task["directory"])
    sys.argv[:] = [""]
    tempfile.tempdir = None  # found anew: what the fork server found is not there any more
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)


def _work(task: Mapping[str, Any], rank: int, files: RankFiles, store_fd: int) -> bytes:
    """Run the cases of this rank; ``D`` and their observations, or ``E`` and the trouble, in the result file."""
    harness, seal = resolve(task["harness"]), Seal()
    with open_fd(store_fd, "rb"):  # the rendezvous is a nameless file that every rank inherits
        store = dist.FileStore(f"/proc/self/fd/{store_fd}", task["world_size"])
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=task["world_size"], timeout=timedelta(seconds=task["timeout_s"] + 60)
    )
    _part_with(store, store_fd)
    function = None
    try:
        sources = [(name, source) for name, source in json.loads(task["cells"].tobytes())]
        function = cells.load(sources, task["cell_id"], task["function"])
        observations: list[Any] = []
        for case in task["cases"]:
            try:
                observations.append(plain.simplify(harness(function, case)))
            except Exception as error:
                if not task["together"]:
                    raise  # leaves this rank, so that the warden ends the others, which may wait for this one
                observations.append({TROUBLE_MARK: describe_error(error, function)})
        packed = plain.pack({"observations": observations, "tampered": seal.broken()})
        verdict = b"D"
    except cells.Unusable as error:
        trouble = {"kind": error.kind, "type": "", "text": error.text, "where": error.line}
        packed, verdict = json.dumps(trouble).encode(), b"E"
    except SystemExit as stop:
        told = {"kind": "raised", "type": "SystemExit", "text": f"sys.exit({plain.simplify(stop.code)!r}) was called"}
        packed, verdict = json.dumps(told).encode(), b"E"
    except BaseException as error:
        told = describe_error(error, function) if function else {"kind": "raised", "type": type(error).__name__}
        packed, verdict = json.dumps(told).encode(), b"E"
    os.ftruncate(files.result, 0)
    with open_fd(files.result, "wb") as file:
        file.write(packed)
    return verdict
