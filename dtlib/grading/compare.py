"""Comparing plain data with theory, in words a learner can use, and recognising what a known mistake would give.

Everything here works on plain data (see `plain`) in the process that judges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import plain
from .exercise import Case, Finding, Run, describe_case

_SHOWN_ELEMENTS = 4
Expected = Callable[[Case], Any]


def close(seen: Any, expected: Any, rtol: float = 1e-6, atol: float = 0.0) -> bool:
    """Whether `seen` has the form of `expected`, each number within ``atol + rtol·|expected|``; NaN nowhere."""
    if isinstance(expected, np.ndarray):
        if not plain.is_array(seen) or seen.shape != expected.shape:
            return False
        wanted = expected.astype(np.float64)
        return bool(np.all(np.abs(seen.astype(np.float64) - wanted) <= atol + rtol * np.abs(wanted)))
    if isinstance(expected, list | tuple):
        return (
            isinstance(seen, list | tuple)
            and len(seen) == len(expected)
            and all(close(one, two, rtol, atol) for one, two in zip(seen, expected, strict=True))
        )
    if isinstance(expected, int | float) and not isinstance(expected, bool):
        return plain.is_number(seen) and abs(seen - expected) <= atol + rtol * abs(expected)
    return type(seen) is type(expected) and bool(seen == expected)


def show(value: Any) -> str:
    """A number, array or anything else in few words."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return repr(value)[:80]
    if isinstance(value, int):
        return f"{value:,}" if abs(value) < 10**18 else f"{value:.6g}"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, float):
        return f"{value:,.0f}" if value == round(value) and 1000 <= abs(value) < 1e15 else f"{value:.6g}"
    if isinstance(value, np.ndarray):
        return show_array(value)
    if isinstance(value, dict) and "not_plain" in value:
        name = value["not_plain"]
        article = "an" if name[:1].lower() in "aeiou" else "a"
        return f"{article} {name}: {value['text'][:60]}" if value["text"] else f"{article} {name}"
    if isinstance(value, list | tuple):
        inside = ", ".join(show(each) for each in value[:8]) + (", …" if len(value) > 8 else "")
        return f"[{inside}]"
    return repr(value)[:80]


def show_array(array: np.ndarray[Any, Any], start: int = 0) -> str:
    """Up to four numbers of `array` from position `start` on."""
    flat = array.ravel()
    few = ", ".join(f"{each:.5g}" for each in flat[start : start + _SHOWN_ELEMENTS])
    return f"[{'…, ' if start else ''}{few}{', …' if flat.size > start + _SHOWN_ELEMENTS else ''}]"


def compare(seen: Any, expected: Any, where: str, rtol: float = 1e-6, atol: float = 0.0) -> Finding | None:
    """None where `seen` agrees with `expected` (see `close`), else what differs, with the first number that does."""
    if close(seen, expected, rtol, atol):
        return None
    if isinstance(expected, np.ndarray):
        if not plain.is_array(seen):
            return Finding(_kind(seen), f"a tensor of {expected.size} elements", where)
        if seen.shape != expected.shape:
            return Finding(f"a tensor of shape {seen.shape}", f"shape {expected.shape}", where)
        wanted = expected.astype(np.float64)
        off = ~(np.abs(seen.astype(np.float64) - wanted) <= atol + rtol * np.abs(wanted))
        start = int(np.argmax(off.ravel()))
        share = f"{int(off.sum())} of {off.size} elements differ, the first at position {start}"
        if off.size > _SHOWN_ELEMENTS:
            where = f"{where}; {share}" if where else share
        return Finding(show_array(seen, start), show_array(expected, start), where)
    if isinstance(expected, int | float) and not isinstance(expected, bool) and not plain.is_number(seen):
        return Finding(_kind(seen), "a finite number", where)
    return Finding(show(seen), show(expected), where)


def compare_ranks(run: Run, key: str, expected: Sequence[Any], rtol: float = 1e-6, atol: float = 0.0) -> Finding | None:
    """`compare` ``run.ranks[r][key]`` with ``expected[r]`` for every rank: the first rank that differs, if any."""
    if len(run.ranks) != len(expected):
        return Finding(f"results of {len(run.ranks)} ranks", f"{len(expected)}", describe_case(run.case))
    for rank, (data, wanted) in enumerate(zip(run.ranks, expected, strict=True)):
        where = f"on rank {rank}; {describe_case(run.case)}" if len(expected) > 1 else describe_case(run.case)
        finding = compare(data[key], wanted, where, rtol, atol)
        if finding:
            return finding
    return None


# What a mistake looks like: functions of (failing runs, passing runs).


def gives(
    of: Callable[[Run], Any], wrong: Expected, rtol: float = 1e-6, atol: float = 0.0, *, always: bool = False
) -> Any:
    """Recognise a mistake by its result: every failing run that came back gave what `wrong` computes from its case.

    `of(run)` takes from the run what is compared. A case in which `wrong` gives None says nothing. With `always` the
    runs that passed must agree with `wrong` too: a mistake that is wrong in other cases is another one.
    """

    def fits(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
        def agree(runs: Sequence[Run]) -> list[bool]:
            told = [(run, wrong(run.case)) for run in runs if run.trouble is None]
            return [close(of(run), answer, rtol, atol) for run, answer in told if answer is not None]

        telling = agree(failing)
        return bool(telling) and all(telling) and (not always or all(agree(passing)))

    return fits


def right_only_if(condition: Callable[[Case], bool]) -> Any:
    """Recognise an answer that is right in just the cases that satisfy `condition`."""

    def fits(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
        good = any(condition(run.case) for run in passing) and all(condition(run.case) for run in passing)
        return good and bool(failing) and not any(condition(run.case) for run in failing)

    return fits


def answer(run: Run) -> Any:
    """What the learner's function returned, of an exercise on paper."""
    return run.ranks[0]["answer"]


def each_rank(key: str) -> Callable[[Run], list[Any]]:
    """Takes ``[data[key] for each rank]`` from a run."""
    return lambda run: [data[key] for data in run.ranks]


def some_rank(predicate: Callable[[Any, Case], bool]) -> Any:
    """Recognise a mistake by what some rank did: ``predicate(data, case)`` in every failing run that came back."""

    def fits(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
        back = [run for run in failing if run.trouble is None]
        return bool(back) and all(any(predicate(data, run.case) for data in run.ranks) for run in back)

    return fits


def every_run(predicate: Callable[[Run], bool]) -> Any:
    """Recognise a mistake by whole runs: ``predicate(run)`` in every failing run that came back, and one did."""

    def fits(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
        back = [run for run in failing if run.trouble is None]
        return bool(back) and all(predicate(run) for run in back)

    return fits


def any_of(*recognisers: Any) -> Any:
    """Recognise a mistake by any of several signs."""
    return lambda failing, passing: any(each(failing, passing) for each in recognisers)


def _kind(value: Any) -> str:
    if value is None:
        return "None (does the function return its answer?)"
    return show(value)
