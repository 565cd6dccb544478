"""Exercises: checking them in the notebook (`check`), and grading what a class hands in (`classroom.grader.grade`).

Three rooms, each of which imports from those before it: `exercises` (what is asked, and how what comes back is judged),
`sandbox` (where answers run, behind walls), `classroom` (who is asked, and what is told whom).
"""

# ruff: noqa: F401  what type checkers import here is what `_HOME` names
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .classroom.check import check
    from .exercises.catalogue import all_exercises
    from .exercises.exercise import Check, Exercise, Finding, Mistake
    from .exercises.result import CheckResult, NoPoints, Result
    from .exercises.seen import Case, Observed, Trouble

_HOME = {
    "all_exercises": "exercises.catalogue",
    "check": "classroom.check",
    **dict.fromkeys(("Check", "Exercise", "Finding", "Mistake"), "exercises.exercise"),
    **dict.fromkeys(("CheckResult", "NoPoints", "Result"), "exercises.result"),
    **dict.fromkeys(("Case", "Observed", "Trouble"), "exercises.seen"),
}
__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is asked for: `import dtlib.grading` alone costs next to nothing."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
