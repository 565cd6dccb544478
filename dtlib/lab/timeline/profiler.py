"""Record what a process does with torch's profiler.

The profiler (Kineto) is the one observer that sees everything without being told: every operator on every
thread, and each asynchronous collective of gloo from the moment a communication thread begins it until it has
finished, whoever launched it (our code, DDP's reducer in C++, FSDP). Its clock is mapped to the machine's
monotonic one.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dtlib.processes.channel import anonymous_file, read_text

from .classify import Event

_KINETO = re.compile(r"[A-Z]+:\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \d+:\d+ \w+\.cpp:\d+\]")


@contextmanager
def recording(events: list[Event]) -> Iterator[None]:
    """Profile this process, all its threads, during the block; afterwards `events` holds what was seen."""
    import torch
    from torch._C._profiler import _ExperimentalConfig
    from torch.autograd.profiler import profile

    profiler = profile(
        use_kineto=True,
        use_device="cuda" if torch.cuda.is_available() else None,
        experimental_config=_ExperimentalConfig(profile_all_threads=True),
    )
    with _without_banner():
        profiler.__enter__()
    before = _clock_offset()
    try:
        yield
    finally:
        after = _clock_offset()
        with _without_banner():
            profiler.__exit__(None, None, None)
        results = profiler.kineto_results
        if results is not None:
            events += (_event(raw, before, after) for raw in results.events() if not _is_copy_of_annotation(raw))


def _clock_offset() -> tuple[int, int]:
    """(when, wall clock minus monotonic clock) in nanoseconds: the tightest of a few readings."""
    readings = []
    for _ in range(5):
        first, wall, second = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        readings.append((second - first, wall, wall - (first + second) // 2))
    _, when, offset = min(readings)
    return when, offset


def _event(raw: Any, before: tuple[int, int], after: tuple[int, int]) -> Event:
    def monotonic(wall_ns: int) -> float:
        share = min(max((wall_ns - before[0]) / max(after[0] - before[0], 1), 0.0), 1.0)
        return (wall_ns - before[1] - share * (after[1] - before[1])) * 1e-9

    start = raw.start_ns()
    return Event(
        name=raw.name(),
        start=monotonic(start),
        end=monotonic(start + raw.duration_ns()),
        thread=raw.device_resource_id(),
        annotation=raw.scope() == 7,  # RecordScope.USER_SCOPE
        is_async=raw.is_async(),
        device=_on_device(raw),
    )


def _on_device(raw: Any) -> bool:
    return str(raw.device_type()).rpartition(".")[2] != "CPU"


def _is_copy_of_annotation(raw: Any) -> bool:
    """On a GPU's row the profiler repeats the annotations of the CPU."""
    return _on_device(raw) and bool(raw.is_user_annotation())


@contextmanager
def _without_banner() -> Iterator[None]:
    """Keep the log lines of the profiler's start and stop out of what the rank prints; pass on all else."""
    sys.stderr.flush()
    caught, saved = anonymous_file("dtlib-profiler"), os.dup(2)
    os.dup2(caught, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        for line in read_text(caught).splitlines(keepends=True):
            if not _KINETO.match(line):
                os.write(2, line.encode())
        os.close(saved)
        os.close(caught)
