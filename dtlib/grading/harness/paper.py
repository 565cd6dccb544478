"""Harness for exercises on paper: the function is called with plain arguments, and its answer is the observation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from dtlib.grading.plain import simplify

from .watch import Watch


def call(function: Callable[..., Any], case: Mapping[str, Any]) -> dict[str, Any]:
    """``{"answer": function(*case["arguments"]), "library": [...], "escaped": [...]}``, made plain.

    ``library`` and ``escaped`` tell what the function called meanwhile: see `Watch`.
    """
    arguments = deepcopy(list(case["arguments"]))
    watch = Watch()
    with watch.watching():
        returned = function(*arguments)
    return {"answer": simplify(returned), "library": sorted(watch.called), "escaped": sorted(watch.escaped)}
