"""Comparing plain data with theory, in words a learner can use. Everything here works in the process that judges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from dtlib.theory import units
from dtlib.theory.decompose import decompose

from . import plain
from .exercise import Finding

_SHOWN_ELEMENTS = 4


def close(seen: Any, expected: Any, rtol: float = 1e-6, atol: float = 0.0) -> bool:
    """Whether `seen` has the form of `expected`, each number within ``atol + rtol·|expected|``; NaN nowhere.

    A row or a table of numbers may come as a list or as an array.
    """
    seen = _in_form(seen, expected)
    if isinstance(expected, np.ndarray):
        return plain.is_array(seen) and seen.shape == expected.shape and not _off(seen, expected, rtol, atol).any()
    if isinstance(expected, list | tuple):
        return (
            isinstance(seen, list | tuple)
            and len(seen) == len(expected)
            and all(close(one, two, rtol, atol) for one, two in zip(seen, expected, strict=True))
        )
    if isinstance(expected, dict):
        is_alike = isinstance(seen, dict) and seen.keys() == expected.keys()
        return is_alike and all(close(seen[key], expected[key], rtol, atol) for key in expected)
    if isinstance(expected, int | float) and not isinstance(expected, bool):
        return plain.is_number(seen) and abs(seen - expected) <= atol + rtol * abs(expected)
    return type(seen) is type(expected) and bool(seen == expected)


def compare(
    seen: Any, expected: Any, where: str, rtol: float = 1e-6, atol: float = 0.0, *, whole: bool = True
) -> Finding | None:
    """None where `seen` agrees with `expected` (see `close`), else what differs, with the first number that does.

    `whole` says that `seen` is the answer, and not a part of it.
    """
    if close(seen, expected, rtol, atol):
        return None
    seen = _in_form(seen, expected)
    if isinstance(expected, np.ndarray):
        if not plain.is_array(seen):
            return Finding(_kind(seen, whole), f"a tensor of {expected.size} elements", where)
        if seen.shape != expected.shape:
            return Finding(f"a tensor of shape {seen.shape}", f"shape {expected.shape}", where)
        off = _off(seen, expected, rtol, atol)
        start = int(np.argmax(off.ravel()))
        share = f"{int(off.sum())} of {off.size} elements differ, the first at position {start}"
        if off.size > _SHOWN_ELEMENTS:
            where = f"{where}; {share}" if where else share
        return Finding(show_array(seen, start), show_array(expected, start), where)
    if isinstance(expected, list | tuple) and isinstance(seen, list | tuple) and len(seen) == len(expected):
        for number, (one, two) in enumerate(zip(seen, expected, strict=True)):
            if not close(one, two, rtol, atol):
                place = f"{where}; part {number}" if len(expected) > 1 else where
                return compare(one, two, place, rtol, atol, whole=False)
    elif isinstance(expected, list | tuple) and any(map(plain.is_array, expected)):
        told = f"a list of {len(seen)}" if isinstance(seen, list | tuple) else _kind(seen, whole)
        return Finding(told, f"a list of {len(expected)} tensors", where)
    if isinstance(expected, int | float) and not isinstance(expected, bool) and not plain.is_number(seen):
        return Finding(_kind(seen, whole), "a finite number", where)
    if show(seen) == show(expected) and plain.is_number(seen) and plain.is_number(expected):
        return Finding(f"{seen:.15g}", f"{expected:.15g}", where)
    if show(seen) == show(expected) and isinstance(seen, list | tuple) and isinstance(expected, list | tuple):
        return Finding(f"{len(seen)} entries, {show(seen)}", f"{len(expected)} entries", where)  # that begin alike
    return Finding(show(seen), show(expected), where)


def _in_form(seen: Any, expected: Any) -> Any:
    """`seen` as a list where it is an array and `expected` a list; where that is an array as one, of rows too."""
    if isinstance(expected, list | tuple) and plain.is_array(seen) and seen.ndim:
        return seen.tolist()
    if isinstance(expected, np.ndarray) and isinstance(seen, list | tuple):
        kinds = (bool,) if expected.dtype == bool else (int, float)
        with suppress(ValueError):  # rows of different lengths
            return np.array(seen, np.float64) if _are_numbers(seen, kinds) else seen
    return seen


def _are_numbers(table: Any, kinds: tuple[type, ...]) -> bool:
    return all(
        _are_numbers(each, kinds) if isinstance(each, list | tuple) else plain.is_array(each) or type(each) in kinds
        for each in table
    )


def _off(seen: Any, expected: Any, rtol: float, atol: float) -> Any:
    """Which elements of an array differ; NaN always does, and an infinity from everything but itself."""
    told, wanted = seen.astype(np.float64), expected.astype(np.float64)
    with np.errstate(invalid="ignore"):
        near = np.abs(told - wanted) <= atol + rtol * np.abs(wanted)
    return ~np.where(np.isfinite(wanted), near, told == wanted)


def show(value: Any) -> str:
    """A number, array or anything else in few words."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return repr(value)[:80]
    if isinstance(value, int):
        return f"{value:,}" if abs(value) < 10**18 else f"{value:.6g}"
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        return f"{value:,.0f}" if value == round(value) and 1000 <= abs(value) < 1e15 else f"{value:.6g}"
    if isinstance(value, np.ndarray):
        return show_array(value)
    if isinstance(value, dict) and "not_plain" in value:
        name = str(value["not_plain"])
        article = "an" if name[:1].lower() in "aeiou" else "a"
        text = str(value.get("text", ""))[:60]
        return f"{article} {name}: {text}" if text else f"{article} {name}"
    if isinstance(value, list | tuple):
        inside = ", ".join(show(each) for each in value[:8]) + (", …" if len(value) > 8 else "")
        return f"[{inside}]"
    return repr(value)[:80]


def show_array(array: np.ndarray[Any, Any], start: int = 0) -> str:
    """Up to four numbers of `array` from position `start` on."""
    flat = array.ravel()
    few = ", ".join(f"{each:.5g}" for each in flat[start : start + _SHOWN_ELEMENTS])
    return f"[{'…, ' if start else ''}{few}{', …' if flat.size > start + _SHOWN_ELEMENTS else ''}]"


def show_bytes(num_bytes: float) -> str:
    """A number of bytes in words."""
    return f"{num_bytes:,.0f} B ({units.format_bytes(num_bytes)})" if num_bytes >= units.KiB else f"{num_bytes:,.0f} B"


def mixture(seen: Any, parts: Sequence[np.ndarray[Any, Any]], rtol: float = 1e-3) -> np.ndarray[Any, Any] | None:
    """As `dtlib.theory.decompose`, of whatever a submission said; None where that is no array."""
    return decompose(seen, parts, rtol) if plain.is_array(seen) else None


def _kind(value: Any, whole: bool) -> str:
    if value is None and whole:
        return "None (does the function return its answer?)"
    return show(value)
