"""Harness for exercises on paper: the function is called with plain arguments, and its answer is the observation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from dtlib.grading.plain import simplify


def call(function: Callable[..., Any], case: Mapping[str, Any]) -> dict[str, Any]:
    """``{"answer": function(*case["arguments"])}``, made plain."""
    return {"answer": simplify(function(*deepcopy(list(case["arguments"]))))}
