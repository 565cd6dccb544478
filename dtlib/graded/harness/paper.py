"""Harness for exercises on paper: the function is called with plain arguments, and its answer is what is judged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .desk import Desk
from .watch import Watch


def call(function: Callable[..., Any], desk: Desk) -> dict[str, Any]:
    """``{"answer": function(*arguments), "library": [...], "escaped": [...]}``: see `Watch`."""
    arguments = desk.next()
    watch = Watch()
    with watch.watching():
        returned = function(*arguments)
    return {"answer": returned, **watch.told}
