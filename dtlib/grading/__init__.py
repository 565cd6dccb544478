"""Exercises: checking them in the notebook (`check`), and grading what a class hands in (`grader.grade`)."""

# ruff: noqa: F401  what type checkers import here is what `_HOME` names
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checks import all_exercises
    from .exercise import Check, Exercise, Finding, Mistake
    from .notebook import check
    from .result import CheckResult, NoPoints, Result
    from .seen import Case, Observed, Trouble

_HOME = {
    "all_exercises": "checks",
    "check": "notebook",
    **dict.fromkeys(("Check", "Exercise", "Finding", "Mistake"), "exercise"),
    **dict.fromkeys(("CheckResult", "NoPoints", "Result"), "result"),
    **dict.fromkeys(("Case", "Observed", "Trouble"), "seen"),
}
__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is asked for: `import dtlib.grading` alone costs next to nothing."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
