"""Harnesses: they run a learner's function on what a desk hands out, and return plain data. They know no answers.

This package is all of the grading that the process of a submission needs to see: no check, no theory, no solution.
A harness is named by ``"module.function"`` and called as ``harness(function, desk)`` in each rank, while a `Watch`
notes calls. What it returns, and what was noted, is what the submission's process says, and is judged as such.
"""

from __future__ import annotations

import importlib
import linecache
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from dtlib.grading.exercises.plain import short, simplify

from .cells import explain
from .desk import Desk
from .watch import Watch

Harness = Callable[[Callable[..., Any], Desk], dict[str, Any]]
PAPER = "paper."  # so begin the harnesses whose answers are small
TROUBLE_MARK = "dtlib-grading-trouble"
_WATCHES: dict[str, Callable[[], Watch]] = {
    "paper.predict": partial(Watch, nothing_runs=True),
    "zero.stack": partial(Watch, allowed=("torch's checkpoint.",)),  # a way to do it
}


def resolve(name: str) -> Harness:
    """The harness called `name`, such as ``"collectives.all_reduce"``, under watch. ``ValueError`` if there is none."""
    module, _, function = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(f"{__name__}.{module}"), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"name must be that of a harness, module.function, not {name!r} ({error})") from error

    def watched(function: Callable[..., Any], desk: Desk) -> dict[str, Any]:
        watch = _WATCHES.get(name, Watch)()
        with watch.watching():
            said = found(function, desk)
        if name.startswith(PAPER):
            said = {**said, "answer": short(said["answer"])}
        return {**said, **watch.told}

    return watched


def describe_error(error: BaseException, function: Callable[..., Any] | None) -> dict[str, Any]:
    """What was raised and in which line of the learner's, as plain data."""
    if isinstance(error, SystemExit):
        text = f"sys.exit({simplify(error.code)!r}) was called"
        return {"kind": "raised", "type": "SystemExit", "text": text}
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
        "number": last.lineno if last else None,
        "function": last.name if last else None,
        "source": linecache.getline(last.filename, last.lineno or 0).strip() if last else "",
    }


def _first_line(error: BaseException) -> str:
    try:
        return (str(error).strip().splitlines() or [""])[0][:300]
    except Exception:
        return "(its text cannot be read)"
