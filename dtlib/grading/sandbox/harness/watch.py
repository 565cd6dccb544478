"""Watches which functions of the library a learner's function calls: the answer to many a task stands there.

Every Python call is seen, in every thread. What would happen out of sight (another process, a thread below `threading`,
a profiler set or taken away) is noticed as such. A copy of the library's text is not: nobody can tell it from work.
"""

from __future__ import annotations

import _thread
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from dtlib.course import stems

# Paths are those that code is known by, which a link in them is part of.
_DTLIB = str(Path(__file__).absolute().parents[3]) + os.sep
_OF_STEMS = tuple(os.path.join("grading", "exercises", stem) for stem in stems("exercises"))
_ANSWERS = tuple(_DTLIB + each + os.sep for each in ("theory", "ranks", *_OF_STEMS))
# Constants, conversions and the registry are tools: they answer nothing.
_TOOLS = tuple(
    os.path.join(_DTLIB + "theory", *each)
    for each in (("units.py",), ("hardware.py",), ("formula.py",), ("models", "presets.py"))
)
# Where torch itself splits weights, gradients, states or stages among ranks, or computes a layer again.
_TORCH = Path(getattr(importlib.util.find_spec("torch"), "origin", "")).absolute().parent
_SHARDING = ("fsdp", "_composable", "_shard", "tensor", "optim", "algorithms", "checkpoint", "pipelining")
_BUILT_INS = (
    *(str(_TORCH / "distributed" / each) + os.sep for each in _SHARDING),
    str(_TORCH / "nn" / "parallel" / "distributed.py"),
    str(_TORCH / "utils" / "checkpoint.py"),
)
_RUNS = (str(_TORCH) + os.sep, _DTLIB + "lab" + os.sep)
_OUT_OF_SIGHT = {
    "sys.setprofile": "sys.setprofile",
    "gc.get_objects": "gc.get_objects",
    "gc.get_referrers": "gc.get_referrers",
    **dict.fromkeys(("os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"), "another process"),
}
_GET_PROFILER, _START_THREAD = sys.getprofile, _thread.start_new_thread
_active: list[Watch] = []


class Watch:
    """Notes calls while `watching`: `called` names functions of the library, `built_in` those of torch that shard a
    model (FSDP, DTensor, sharded optimizers, pipelines) or recompute it, `escaped` ways out of sight. With
    `nothing_runs` all that torch or the lab does is noted as `built_in`, for answers that are to be worked out; what
    begins as one of `allowed` is not."""

    def __init__(self, *, nothing_runs: bool = False, allowed: tuple[str, ...] = ()) -> None:
        self._built_ins = _RUNS if nothing_runs else _BUILT_INS
        self._nothing_runs, self._allowed = nothing_runs, allowed
        self.called: set[str] = set()
        self.built_in: set[str] = set()
        self.escaped: set[str] = set()

    @property
    def told(self) -> dict[str, list[str]]:
        """What was noted, as plain data for an observation."""
        return {
            "library": sorted(self.called),
            "built_in": sorted(each for each in self.built_in if not each.startswith(self._allowed))[:50],
            "escaped": sorted(self.escaped),
        }

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the calls of this process in the block."""
        _listen()
        see = self._see
        threading.setprofile(see)
        sys.setprofile(see)
        _active.append(self)
        try:
            yield
            if sys.getprofile() is not see or threading.getprofile() is not see:
                self.escaped.add("sys.setprofile")
        finally:
            _active.remove(self)
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]

    def _see(self, frame: Any, event: str, arg: Any) -> None:
        # Called for every function call, so it must be quick.
        if event != "call":
            if event == "c_call" and (arg is _GET_PROFILER or arg is _START_THREAD):
                self._see_builtin(frame.f_code.co_filename, arg)
            elif event == "c_call" and self._nothing_runs:
                home = getattr(arg, "__module__", None) or type(getattr(arg, "__self__", None)).__module__
                if str(home).startswith("torch"):
                    self.built_in.add(f"torch's {arg.__name__}")
            return
        code = frame.f_code
        if code.co_filename.startswith(self._built_ins) and not _is_imported(frame):
            owner = "lab" if code.co_filename.startswith(_DTLIB) else "torch"
            self.built_in.add(f"{owner}'s {Path(code.co_filename).stem}.{code.co_name}")
            return
        if not code.co_filename.startswith(_ANSWERS) or code.co_name == "<module>":
            return
        caller = frame.f_back.f_code.co_filename if frame.f_back else ""
        if not code.co_filename.startswith(_TOOLS) and not caller.startswith(_ANSWERS) and not _is_imported(frame):
            module = code.co_filename[len(_DTLIB) :].removesuffix(".py").replace(os.sep, ".")
            self.called.add(f"{module}.{code.co_name}")

    def _see_builtin(self, caller: str, function: Any) -> None:
        if function is _GET_PROFILER and caller != __file__:
            self.escaped.add("sys.getprofile")
        elif function is _START_THREAD and caller != threading.__file__:
            self.escaped.add("a thread that is not of threading")


def _is_imported(frame: Any) -> bool:
    """Whether a call is part of the import of one of the library's modules, which answers nothing."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith((*_ANSWERS, *_BUILT_INS)):
            return True
        frame = frame.f_back
    return False


def note_escape(way: str) -> None:
    """Have who watches note a way out of sight."""
    _active[-1].escaped.add(way)


@cache
def _listen() -> None:
    """Hear, from now on and for good, of what `sys.audit` tells: such a hook cannot be taken away."""
    ways, active = dict(_OUT_OF_SIGHT), _active
    starts_thread = vars(threading.Thread)["_bootstrap_inner"].__code__

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        # A thread of threading takes over the profiler by itself.
        if active and event in ways and sys._getframe(1).f_code is not starts_thread:
            active[-1].escaped.add(ways[event])

    sys.addaudithook(hear)
