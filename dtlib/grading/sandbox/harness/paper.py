"""Harnesses for exercises on paper: the function is called with plain arguments, and its answer is what is judged."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .desk import Desk
from .given import Given
from .watch import note_escape


def call(function: Callable[..., Any], desk: Desk) -> dict[str, Any]:
    """``{"answer": function(*arguments)}``, and which arguments it ``changed``."""
    arguments = desk.next()
    given = Given(function, arguments)
    return {"answer": function(*arguments), "changed": given.changed()}


predict = call  # of an answer that is to be worked out: whatever torch or the lab runs is told


def encode(function: Callable[..., Any], desk: Desk) -> dict[str, Any]:
    """The same of an answer that is bytes: ``form`` says what came, ``shortcut`` which operations of torch made a
    bfloat16 tensor meanwhile."""
    seen, start = _Bfloat16(), threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        note_escape("another thread")  # what torch does in it is not seen
        start(thread)

    with mock.patch.object(threading.Thread, "start", noted), seen:
        said = call(function, desk)
    is_bytes = isinstance(said["answer"], bytes | bytearray | memoryview)
    return said | {"form": "bytes" if is_bytes else type(said["answer"]).__name__, "shortcut": sorted(seen.made)}


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
