"""Exercises: checking them in the notebook (`check`), and grading what a class hands in (`grader.grade`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checks import all_exercises
    from .exercise import Check, Exercise, Finding, Mistake
    from .notebook import check
    from .result import CheckResult, NoPoints, Result
    from .seen import Case, Observed, Trouble

__all__ = [
    "Case",
    "Check",
    "CheckResult",
    "Exercise",
    "Finding",
    "Mistake",
    "NoPoints",
    "Observed",
    "Result",
    "Trouble",
    "all_exercises",
    "check",
]

_HOME = {
    **dict.fromkeys(("Check", "Exercise", "Finding", "Mistake"), "exercise"),
    **dict.fromkeys(("Case", "Observed", "Trouble"), "seen"),
    **dict.fromkeys(("CheckResult", "NoPoints", "Result"), "result"),
    "all_exercises": "checks",
    "check": "notebook",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is asked for: `import dtlib.grading` alone costs next to nothing."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
