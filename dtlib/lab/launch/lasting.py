"""The life of a rank in a session: task after task, in one namespace, until there are no more."""

from __future__ import annotations

import ast
import linecache
import pickle
import traceback
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from dtlib.processes.rank import Failure

from . import context

MAX_BYTES = 16 * 2**20
"""What a rank may send back at once."""


def live() -> None:
    """Do what the parent asks for, again and again; the last task is empty."""
    here = context.current("a session")
    names: dict[str, Any] = {"torch": torch, "dist": dist, "rank": here.rank, "world_size": here.world_size}
    said: tuple[Any, Failure | None] = (b"", None)
    while task := here.next_task(pickle.dumps(said)):
        kind, what = pickle.loads(task)
        try:
            answer = _DOES[kind](names, what)
            if len(answer) > MAX_BYTES:
                raise ValueError(f"the result has {len(answer)} bytes, and a rank may send {MAX_BYTES} at once")
            said = answer, None
        except Exception as error:
            frame = error.__traceback__
            while frame is not None and frame.tb_frame.f_code.co_filename == __file__:
                frame = frame.tb_next
            text = "".join(traceback.format_exception(type(error), error, frame)).rstrip()
            said = b"", Failure(f"raised {type(error).__name__}: {error}", text)


def _cell(names: dict[str, Any], what: tuple[str, str]) -> bytes:
    """Execute code; how the value of its last line is written, if that is an expression and has one."""
    source, name = what
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), names)
    value = eval(compile(ast.Expression(last.value), name, "eval"), names) if isinstance(last, ast.Expr) else None
    return pickle.dumps(None if value is None or source.rstrip().endswith(";") else repr(value))


def _value(names: dict[str, Any], expression: str) -> bytes:
    return bytes(cloudpickle.dumps(eval(expression, names)))


def _call(names: dict[str, Any], packed: bytes) -> bytes:
    function, args = pickle.loads(packed)
    return bytes(cloudpickle.dumps(function(*args)))


_DOES: dict[str, Callable[[dict[str, Any], Any], bytes]] = {"cell": _cell, "value": _value, "call": _call}
