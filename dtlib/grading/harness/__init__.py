"""Harnesses: they run a learner's function on one drawn case and return plain data. They know no answers.

This package is all of the grading that the process of a submission needs to see: no check, no theory, no solution.
A harness is named by ``"module.function"`` and called as ``harness(function, case)`` in each rank of a process group of
``case["world_size"]`` ranks.
"""

from __future__ import annotations

import importlib
import json
import linecache
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dtlib.grading.plain import pack, simplify

from .cells import explain

Harness = Callable[[Callable[..., Any], Mapping[str, Any]], dict[str, Any]]
TROUBLE_MARK = "dtlib-grading-trouble:"
SETTLE = b"settle"  # what a rank says at a meeting before which its messages are to arrive; then how many bytes
MAX_EVENTS = 4000  # a record of communication that goes on for ever is cut here


class LearnerError(Exception):
    """The learner's function raised. Its text is the mark and then the trouble as JSON: it survives any pipe."""


def resolve(name: str) -> Harness:
    """The harness called `name`, such as ``"collectives.all_reduce"``. Raises ``ValueError`` where there is none."""
    module, _, function = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(f"{__name__}.{module}"), function)
    except (ImportError, AttributeError, ValueError):
        raise ValueError(f"name must be that of a harness, module.function, not {name!r}") from None
    return found  # type: ignore[no-any-return]


def observe(function: Callable[..., Any], harness: str, cases: Sequence[Mapping[str, Any]]) -> bytes:
    """Run this rank's of `cases`, one for each rank: what the harness returns, packed. An exception: `LearnerError`.

    The exception leaves this rank, so that the launcher ends the other ranks, which may wait for this one.
    """
    from torch.distributed import get_rank

    try:
        return pack(resolve(harness)(function, cases[get_rank()]))
    except Exception as error:
        trouble = describe_error(error, function)
    raise LearnerError(TROUBLE_MARK + json.dumps(trouble))


def observe_all(function: Callable[..., Any], harness: str, cases: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Run cases that need one rank only, one after another: for each what `observe` returns, or the trouble packed."""
    packed = []
    for case in cases:
        try:
            packed.append(pack(resolve(harness)(function, case)))
        except Exception as error:
            packed.append(pack({TROUBLE_MARK: describe_error(error, function)}))
    return packed


def describe_error(error: BaseException, function: Callable[..., Any]) -> dict[str, Any]:
    """What was raised and in which line of the learner's, as plain data."""
    file = getattr(getattr(function, "__code__", None), "co_filename", None)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == file or frame.filename.startswith("<cell ")]
    last = own[-1] if own else None
    innermost_is_own = last is not None and frames[-1] is last
    why = explain(error)
    return {
        "kind": "blank" if isinstance(error, NotImplementedError) and innermost_is_own else "raised",
        "type": type(error).__name__,
        "text": simplify(_first_line(error) + (f": {why}" if why else "")),
        "file": last.filename if last else file,
        "number": last.lineno if last else None,
        "function": last.name if last else None,
        "source": linecache.getline(last.filename, last.lineno or 0).strip() if last else "",
    }


def _first_line(error: BaseException) -> str:
    try:
        return (str(error).strip().splitlines() or [""])[0][:300]
    except Exception:
        return "(its text cannot be read)"
