"""Harness for exercises on paper: the function is called with plain arguments, and its answer is the observation.

What the task asks for is often in the library too. So the harness notes which of the library's own functions ran
meanwhile, by watching every call, as `recorder` does on ranks.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

from dtlib.grading.plain import simplify

_DTLIB = str(Path(__file__).resolve().parents[2]) + os.sep
_ANSWERS = tuple(_DTLIB + each + os.sep for each in ("theory", "ranks", os.path.join("grading", "checks")))
# Constants, unit conversions and the registry are tools; they answer nothing.
_TOOLS = tuple(_DTLIB + os.path.join("theory", each + ".py") for each in ("units", "hardware", "formula"))


def call(function: Callable[..., Any], case: Mapping[str, Any]) -> dict[str, Any]:
    """``{"answer": function(*case["arguments"]), "library": [...], "watched": True}``, made plain.

    ``library`` names the functions of the library that the learner's function called; ``watched`` is False where
    it ended the watch over its calls.
    """
    arguments = deepcopy(list(case["arguments"]))
    with _watching() as watch:
        returned = function(*arguments)
        watched = sys.getprofile() == watch.see
    return {"answer": simplify(returned), "library": sorted(watch.called), "watched": watched}


class _Watch:
    """Names of the library's functions that code outside of the library called."""

    def __init__(self) -> None:
        self.called: set[str] = set()

    def see(self, frame: Any, event: str, arg: Any) -> None:
        # Called for every function call, so it must be quick.
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(_ANSWERS) or code.co_name == "<module>":
            return
        caller = frame.f_back.f_code.co_filename if frame.f_back else ""
        if not code.co_filename.startswith(_TOOLS) and not caller.startswith(_ANSWERS):
            module = code.co_filename[len(_DTLIB) :].removesuffix(".py").replace(os.sep, ".")
            self.called.add(f"{module}.{code.co_name}")


@contextmanager
def _watching() -> Iterator[_Watch]:
    watch = _Watch()
    threading.setprofile(watch.see)
    sys.setprofile(watch.see)
    try:
        yield watch
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
