"""`grading.check`: what a learner calls below an exercise. It finds the function, runs it, and always answers."""

from __future__ import annotations

import secrets
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from .checks import all_exercises
from .exercise import Exercise
from .harness.cells import is_blank
from .result import NoPoints, Result, under_nbgrader

_MISSING = object()


def check(
    exercise: str,
    *,
    seed: int | None = None,
    namespace: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
) -> Result:
    """Judge the learner's answer to `exercise`, for example ``"collectives.2"``, and return a `Result`.

    The function is looked up by its name in `namespace`, by default where `check` is called and then in the notebook.
    It runs on fresh cases, in processes of its own that are ended after `timeout_s` seconds a case (by default what the
    exercise allows); `seed` repeats the cases of an earlier call. The result says ``pass``, ``fail`` with the
    reason, or ``not attempted``.

    Never raises: an unknown id, an exception in the learner's function or in the checks themselves become a result.
    (Under ``nbgrader autograde`` an answer that earns nothing raises `NoPoints`: that is how nbgrader reads zero.)
    """
    places = [namespace] if namespace is not None else _places(sys._getframe(1))
    try:
        result = _check(exercise, seed, places, timeout_s)
    except Exception as error:  # a fault of the checks, not of the learner
        result = Result(
            str(exercise),
            "",
            "not attempted",
            f"The check itself failed, which is not your fault: {type(error).__name__}: {error}",
        )
    if under_nbgrader() and result.points == 0:
        raise NoPoints(str(result))
    return result


def judge(
    function: Callable[..., Any], exercise: Exercise, *, seed: int | None = None, timeout_s: float | None = None
) -> Result:
    """Run `function` on fresh cases of `exercise` and judge what comes back, checks that are not visible left out."""
    from .runner import run_cases

    seed = secrets.randbelow(2**31) if seed is None else seed
    runs, printed = run_cases(function, exercise, exercise.cases(seed), timeout_s)
    result = exercise.judge(runs, hidden=False)
    again = f"The same cases again: `grading.check({exercise.id!r}, seed={seed})`." if result.status == "fail" else ""
    return replace(result, printed=printed, again=again)


def _check(name: str, seed: int | None, places: list[Mapping[str, Any]], timeout_s: float | None) -> Result:
    known = all_exercises()
    if name not in known:
        return Result(
            str(name), "", "not attempted", f"There is no exercise {name!r}. The exercises: {', '.join(known)}."
        )
    exercise = known[name]
    found = next((place[exercise.function] for place in places if exercise.function in place), _MISSING)
    if found is _MISSING:
        return exercise.not_attempted(f"There is no function `{exercise.function}` yet: run the cell that defines it.")
    if not callable(found):
        return exercise.not_attempted(f"`{exercise.function}` is a {type(found).__name__}, and should be a function.")
    if is_blank(found):
        return exercise.not_attempted(f"`{exercise.function}` has no body yet.")
    return judge(found, exercise, seed=seed, timeout_s=timeout_s)


def _places(frame: types.FrameType) -> list[Mapping[str, Any]]:
    """Where to look for the learner's function: the caller, the notebook, the main module."""
    places: list[Mapping[str, Any]] = [frame.f_locals, frame.f_globals]
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None:
        places.append(shell.user_ns)
    return [*places, vars(sys.modules["__main__"])]
