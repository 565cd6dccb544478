"""`grading.check`: what a learner calls below an exercise. It finds the function, runs it, and always answers."""

from __future__ import annotations

import linecache
import os
import pickle
import secrets
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

from dtlib.grading.exercises.catalogue import all_exercises
from dtlib.grading.exercises.exercise import Exercise
from dtlib.grading.exercises.result import NoPoints, Result, under_nbgrader
from dtlib.grading.sandbox.harness.cells import is_blank
from dtlib.grading.sandbox.runner import Answer, Cell, Sandbox
from dtlib.grading.sandbox.walls import WALLS
from dtlib.grading.sandbox.walls.limits import Limits
from dtlib.lab.here import in_notebook
from dtlib.lab.launch.ship import pack


def check(
    exercise: str,
    *,
    seed: int | None = None,
    namespace: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
) -> Result:
    """Judge the learner's answer to `exercise`, for example ``"collectives.2"``, and return a `Result`.

    The function is looked up by its name in `namespace`, by default where `check` is called and then in the notebook.
    It runs on fresh cases, in processes of its own. `timeout_s` is what a rank may compute in a case (processor
    seconds; by default what the exercise needs and more); `seed` repeats the cases of an earlier call. The result says
    ``pass``, ``partly right`` or ``fail`` with the reason, ``not attempted``, or ``not known`` where the machine could
    not bring it to an end.

    Never raises: an unknown id, an exception in the learner's function or in the checks themselves become a result.
    (Under ``nbgrader autograde`` an answer that earns nothing raises `NoPoints`: that is how nbgrader reads zero.)
    """
    places = [namespace] if namespace is not None else _places(sys._getframe(1))
    try:
        result = _check(exercise, seed, places, timeout_s)
    except Exception as error:  # a fault of the checks, not of the learner
        text = f"The check itself failed, which is not your fault: {type(error).__name__}: {error}"
        result = Result(str(exercise), "", "not attempted", text)
    if under_nbgrader() and result.points == 0:
        raise NoPoints(str(result))
    return result


def judge(
    function: Callable[..., Any], exercise: Exercise, *, seed: int | None = None, timeout_s: float | None = None
) -> Result:
    """Run `function` on fresh cases of `exercise` and judge what comes back, checks that are not visible left out."""
    seed = secrets.randbelow(2**31) if seed is None else seed
    cases = exercise.cases(seed)
    try:
        answer = _sent(function)
    except ValueError as error:  # it holds something that cannot travel
        return Result(exercise.id, exercise.title, "fail", str(error).replace("fn ", f"`{exercise.function}` ", 1))
    with _progress(exercise, len(cases)) as tell:
        outcome = _sandbox(timeout_s).run(exercise, answer, cases, tell)
    result = exercise.judge(outcome.observed, hidden=False)
    again = "" if result.status in ("pass", "not attempted") else (
        f"The same cases again: `grading.check({exercise.id!r}, seed={seed})`."
    )  # fmt: skip
    return replace(result, printed=outcome.printed, again=again)


def _check(name: str, seed: int | None, places: list[Mapping[str, Any]], timeout_s: float | None) -> Result:
    known = all_exercises()
    if name not in known:
        text = f"There is no exercise {name!r}. The exercises: {', '.join(known)}."
        return Result(str(name), "", "not attempted", text)
    exercise = known[name]
    function = exercise.function
    if (place := next((each for each in places if function in each), None)) is None:
        return exercise.not_attempted(f"There is no function `{function}` yet: run the cell that defines it.")
    found = place[function]
    if not callable(found):
        return exercise.not_attempted(f"`{function}` is a {type(found).__name__}, and should be a function.")
    if is_blank(found):
        return exercise.not_attempted(f"`{function}` has no body yet.")
    return judge(found, exercise, seed=seed, timeout_s=timeout_s)


@cache
def _sandbox(timeout_s: float | None) -> Sandbox:
    """Where a learner's own function runs: with a network of its own, and no walls that only strangers need."""
    limits = Limits() if timeout_s is None else Limits(cpu_seconds=timeout_s)
    return Sandbox(limits, without=set(WALLS) - {"network"})


def _sent(function: Callable[..., Any]) -> Answer:
    """`function` by value, and what its process needs to call it and to show its lines."""
    sources = {name: entry for name, entry in linecache.cache.items() if not os.path.exists(name)}
    file = getattr(getattr(function, "__code__", None), "co_filename", "")
    own = [Cell(file, "".join(linecache.getlines(file)))]
    return Answer(own, pickle.dumps({"call": pack(function, ()), "path": list(sys.path), "sources": sources}))


@contextmanager
def _progress(exercise: Exercise, num_cases: int) -> Iterator[Callable[[int, str], None]]:
    """Says below the cell what the check is doing; in the end nothing of it is left."""
    shown: list[Any] = []

    def show(text: str) -> None:
        data = {"text/plain": text, "text/html": f'<span style="opacity:.7">{text}</span>'}
        if shown:
            shown[0].update(data, raw=True)
        else:
            from IPython.display import display

            shown.append(display(data, raw=True, display_id=True))

    def tell(done: int, words: str) -> None:
        if in_notebook():
            show(f"checking {exercise.id} with {words}: {done} of {num_cases} cases are done …")

    try:
        yield tell
    finally:
        if shown:
            show("")


def _places(frame: types.FrameType) -> list[Mapping[str, Any]]:
    """Where to look for the learner's function: the caller, the notebook, the main module."""
    places: list[Mapping[str, Any]] = [frame.f_locals, frame.f_globals]
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None:
        places.append(shell.user_ns)
    return [*places, vars(sys.modules["__main__"])]
