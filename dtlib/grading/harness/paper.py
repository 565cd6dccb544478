"""Harnesses for exercises on paper: the function is called with plain arguments, and its answer is what is judged."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .desk import Desk
from .watch import Watch


def call(function: Callable[..., Any], desk: Desk) -> dict[str, Any]:
    """``{"answer": function(*arguments), "library": [...], "escaped": [...]}``: see `Watch`."""
    return _answer(function, desk, Watch())


def predict(function: Callable[..., Any], desk: Desk) -> dict[str, Any]:
    """The same of an answer that is to be worked out: whatever torch or the lab runs is told."""
    return _answer(function, desk, Watch(nothing_runs=True))


def encode(function: Callable[..., Any], desk: Desk) -> dict[str, Any]:
    """The same of an answer that is bytes: ``form`` says what came, ``shortcut`` which operations of torch made a
    bfloat16 tensor meanwhile."""
    watch, seen = Watch(), _Bfloat16()
    with _no_threads(watch), seen:
        told = _answer(function, desk, watch)
    is_bytes = isinstance(told["answer"], bytes | bytearray | memoryview)
    form = "bytes" if is_bytes else type(told["answer"]).__name__
    return {**told, "form": form, "shortcut": sorted(seen.made)}


def _answer(function: Callable[..., Any], desk: Desk, watch: Watch) -> dict[str, Any]:
    arguments = desk.next()
    with watch.watching():
        returned = function(*arguments)
    return {"answer": returned, **watch.told}


class _Bfloat16(TorchDispatchMode):
    """Notes the operations of torch that make a bfloat16 tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.made: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, torch.Tensor) and each.dtype is torch.bfloat16:
                self.made.add(str(func).partition(".")[2] or str(func))
        return result


@contextmanager
def _no_threads(watch: Watch) -> Iterator[None]:
    """Note threads that are started: what torch does in them is not seen."""
    start = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        watch.escaped.add("another thread")
        start(thread)

    with mock.patch.object(threading.Thread, "start", noted):
        yield
