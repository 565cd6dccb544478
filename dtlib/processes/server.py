"""A fork server of our own: a process that has imported torch once, and forks a supervisor for every run.

It is not the fork server of `multiprocessing`, which the reader's own programs may use and configure.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import select
import signal
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .channel import recv_frame

PRELOADED = (
    "numpy",
    "cloudpickle",
    "torch",
    "torch.distributed",
    "torch.distributed.algorithms.join",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.nn.parallel",
    "torch.optim",
    "torch.profiler",
    "torch.utils.data",
    "torch._dynamo",  # optimizers and DDP import it at first use, a second or more in every rank
)

_HUGE_PAGES, _MADV_COLLAPSE = Path("/sys/kernel/mm/transparent_hugepage"), 25


def serve(request_fd: int, supervisor: str, modules: Sequence[str] = ()) -> None:
    """Fork a process for each request that arrives, until the parent closes its end or dies.

    The process calls the function that the request names, ``"module:function"``, or else `supervisor`; `modules` are
    imported beside `PRELOADED`.
    """
    requests = socket.socket(fileno=request_fd)
    parent = os.getppid()
    _preload((*PRELOADED, supervisor.partition(":")[0], *modules))

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors need no burial
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    _take_huge_pages()
    requests.sendall(b"r")
    while True:
        if not select.select([requests], [], [], 1.0)[0]:
            if os.getppid() != parent:
                return
            continue
        try:
            entry, fds = recv_frame(requests, max_fds=2)
        except (EOFError, ConnectionResetError):
            return
        control_fd, job_fd = fds
        if os.fork() == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                call(entry.decode() or supervisor, socket.socket(fileno=control_fd), job_fd, fork=True)
            finally:
                os._exit(1)  # it never returns, and must not go on as a server where it cannot be imported
        os.close(control_fd)
        os.close(job_fd)


def call(entry: str, control: socket.socket, job_fd: int, *, fork: bool) -> None:
    """Call the function that `entry` names, ``"module:function"``, in a process of its own: never returns."""
    module, _, name = entry.partition(":")
    getattr(importlib.import_module(module), name)(control, job_fd, fork=fork)


def _take_huge_pages() -> None:
    """Have the kernel gather this process's memory into pages of 2 MiB: every fork copies the table of its pages.

    In pages of 4 KiB that is some 50,000 entries for what torch keeps, 5 ms a fork and as long when it ends. Where a
    machine wants no huge pages, has larger ones, or a kernel that does not know the request (Linux before 6.1), forks
    take what they take.
    """
    with contextlib.suppress(OSError, AttributeError):
        wanted, size = ((_HUGE_PAGES / name).read_text() for name in ("enabled", "hpage_pmd_size"))
        if "[never]" in wanted or int(size) > 2**21:
            return
        madvise = ctypes.CDLL(None).madvise
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, rights, *_ = line.split()
            start, stop = (int(each, 16) for each in addresses.split("-"))
            if "w" in rights:
                madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_COLLAPSE)


def _preload(modules: Sequence[str]) -> None:
    variable = "TORCHINDUCTOR_CACHE_DIR"  # where torch._dynamo makes a folder as soon as it is imported
    chosen = os.environ.get(variable)
    with tempfile.TemporaryDirectory(prefix="dtlib-") as folder:
        os.environ[variable] = chosen or folder
        for name in modules:
            importlib.import_module(name)
    if chosen is None:
        del os.environ[variable]
