"""What a rank of a session does: a cell, an expression or a call at a time, in one namespace."""

from __future__ import annotations

import ast
import linecache
import pickle
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist


def new_names(rank: int, world_size: int) -> dict[str, Any]:
    """The names that cells begin with: those of a module ``__main__``, so that objects of their classes travel."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    names = vars(main)
    names.update(torch=torch, dist=dist, rank=rank, world_size=world_size)
    return names


def do(names: dict[str, Any], task: bytes) -> Any:
    """Do what the parent asks for, a pickled pair of a kind and its matter: what comes of it."""
    kind, matter = pickle.loads(task)
    return _DOES[kind](names, matter)


def _cell(names: dict[str, Any], matter: tuple[str, str]) -> str | None:
    """Execute code; how the value of its last line is written, if that is an expression and has one."""
    source, name = matter
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec", dont_inherit=True), names)
    if not isinstance(last, ast.Expr):
        return None
    value = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), names)
    return None if value is None or source.rstrip().endswith(";") else repr(value)


def _value(names: dict[str, Any], expression: str) -> Any:
    return eval(expression, names)


def _call(names: dict[str, Any], packed: bytes) -> Any:
    function, args = pickle.loads(packed)
    return function(*args)


_DOES: dict[str, Callable[[dict[str, Any], Any], Any]] = {"cell": _cell, "value": _value, "call": _call}
