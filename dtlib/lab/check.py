"""`lab.check`: where theory and measurement meet."""

from __future__ import annotations

import difflib
import math
import numbers
from datetime import UTC, datetime
from typing import Any

import numpy as np

from dtlib.theory.formula import formulas

from . import here, ledger
from .launch import context
from .row import Number, Row, format_pair, format_ratio


class CheckError(AssertionError):
    """A measured number disagrees with the formula by more than was allowed."""


def check(formula: str, *, theory: Any, measured: Any, by: str, rtol: float | None = 0.0, case: str = "") -> Row:
    """Hold a number against a formula: raise if they disagree, show a row, write the ledger.

    `formula` is a name in ``theory.formulas()``. `theory` and `measured` are numbers in base units, or arrays
    of one shape (a single predicted number may face an array); of arrays the element that agrees worst is
    reported. They agree where abs(measured − theory) ≤ rtol · abs(theory); nothing agrees with a number
    that is not finite. `by` says how the number was obtained. ``wire``, ``count``, ``memory``, ``values`` (of a
    program that ran) and ``clock`` are for what was measured by something that does not know the formula, and
    ``published`` for what others measured. ``simulation``, ``derivation`` (also a published number that its
    author computed) and ``definition`` measure nothing and say so. ``rtol=None``, for the clock alone, shows and
    records without asserting. `case` says which of several comparisons this is where a page holds one formula to more
    than one: ``case="4 ranks"``.

    Returns the `Row`. Raises `CheckError` (an ``AssertionError``) with both numbers where they disagree, and
    ``ValueError`` for arguments that make no comparison. Inside a rank of ``lab.run`` it raises
    ``RuntimeError``: return the number and check it once, outside.
    """
    _refuse_inside_a_rank()
    known = formulas()
    if not isinstance(formula, str) or formula not in known:
        near = difflib.get_close_matches(str(formula), known, n=3, cutoff=0.4)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise ValueError(f"formula {formula!r} is not in theory.formulas(){hint}")
    if not isinstance(by, str) or by not in ledger.METHODS:
        raise ValueError(f"by must be one of {', '.join(ledger.METHODS)}, not {by!r}")
    _validate_rtol(rtol, by)
    if not isinstance(case, str):
        raise ValueError(f"case must be a text, not {case!r}")
    worst_theory, worst_measured, element, agrees = _worst(theory, measured, rtol)
    ratio = _ratio(worst_theory, worst_measured)
    title = known[formula].title.replace("`", "") + (f" · {case}" if case else "")
    line = ledger.Line(
        formula=formula,
        theory=worst_theory,
        measured=worst_measured,
        ratio=ratio,
        by=by,
        rtol=None if rtol is None else float(rtol),
        passed=agrees,
        where=here.where(),
        machine=here.machine(),
        time=datetime.now(UTC).isoformat(timespec="milliseconds"),
        run=here.RUN_ID,
        versions=here.versions(),
    )
    recorded = ledger.append(line) if here.is_first_process() else False
    shell = here.shell()
    row = Row(
        formula, title, worst_theory, worst_measured, ratio, by, line.rtol, agrees, element, recorded,
        shown_in=None if shell is None else shell.execution_count,
    )  # fmt: skip
    if not agrees:
        raise CheckError(_disagreement(row))
    if here.is_first_process():
        row.show()
    return row


def _validate_rtol(rtol: float | None, by: str) -> None:
    if rtol is None:
        if by != "clock":
            raise ValueError(
                f"rtol may be None only for by='clock', where time is shown and not asserted; by is {by!r}"
            )
        return
    if isinstance(rtol, bool) or not isinstance(rtol, numbers.Real) or not math.isfinite(rtol) or rtol < 0:
        raise ValueError(f"rtol must be a finite number, at least 0, not {rtol!r}")


def _refuse_inside_a_rank() -> None:
    if context.inside_rank():
        raise RuntimeError(
            "lab.check was called inside a rank: every rank would write its own line. "
            "Return the number from the rank and check it outside, on the list that lab.run returns"
        )


def _as_array(name: str, value: Any) -> np.ndarray[Any, Any]:
    """`value` as an array of float64, or of Python's exact integers; ``ValueError`` for anything else."""
    if hasattr(value, "detach"):  # a torch tensor, whose bfloat16 numpy does not know
        value = value.detach().cpu()
        value = value.double().numpy() if value.is_floating_point() else value.numpy()
    try:
        array = np.asarray(value)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name} must be a number or an array of numbers, not {value!r}") from error
    if array.size == 0:
        raise ValueError(f"{name} is empty: there is nothing to compare")
    if array.dtype.kind == "f":
        return array.astype(np.float64)
    exact = array.dtype.kind in "iu" or (
        array.dtype.kind == "O" and all(isinstance(each, int) and not isinstance(each, bool) for each in array.flat)
    )
    if not exact:
        raise ValueError(f"{name} must be a number or an array of numbers, not {value!r}")
    return array.astype(object)


def _worst(theory: Any, measured: Any, rtol: float | None) -> tuple[Number, Number, tuple[int, ...] | None, bool]:
    """The pair that agrees worst, its index (None for plain numbers), and whether all pairs agree."""
    expected, seen = _as_array("theory", theory), _as_array("measured", measured)
    if expected.shape != seen.shape and expected.ndim:
        raise ValueError(f"theory and measured must have one shape, not {expected.shape} and {seen.shape}")
    shape = seen.shape
    expected, seen = np.broadcast_to(expected, shape).reshape(-1), seen.reshape(-1)
    if expected.dtype != seen.dtype:
        expected, seen = expected.astype(np.float64), seen.astype(np.float64)
    size = np.abs(expected.astype(np.float64))
    finite = np.isfinite(size) & np.isfinite(seen.astype(np.float64))
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        error = np.abs(seen - expected)  # of integers exactly: they are Python's own
        allowed = rtol * np.abs(expected) if rtol else np.zeros_like(error)
        agrees = finite if rtol is None else finite & (error <= allowed).astype(bool)
        relative = np.where(error == 0, 0.0, error.astype(np.float64) / size)
    candidates = np.full(seen.shape, True) if np.all(agrees) else ~agrees
    off = np.where(candidates, np.where(finite, relative, np.inf), -1.0)
    worst = int(np.argmax(np.where(off == off.max(), size, -1.0)))  # of several the largest: 0 tells least
    element = tuple(int(i) for i in np.unravel_index(worst, shape)) if shape else None
    return _plain(expected[worst]), _plain(seen[worst]), element, bool(np.all(agrees))


def _plain(value: Any) -> Number:
    return int(value) if isinstance(value, int | np.integer) else float(value)


def _ratio(theory: Number, measured: Number) -> float:
    if not (math.isfinite(theory) and math.isfinite(measured)):
        return math.nan
    if theory == measured:
        return 1.0
    return float(measured / theory) if theory else math.copysign(math.inf, measured)


def _disagreement(row: Row) -> str:
    predicted, measured = format_pair(row.formula, row.theory, row.measured)
    if not (math.isfinite(row.theory) and math.isfinite(row.measured)):
        reason = "a number that is not finite agrees with nothing"
    else:
        off = abs(row.measured - row.theory)
        share = f", {off / abs(row.theory):.3g} of theory" if row.theory else ""
        reason = f"they differ by {off:.6g}{share}; {row.allowed_words}"
    return (
        f"{row.formula}{row.element_words}: theory predicts {predicted} ({row.theory!r}), "
        f"{row.seen} {measured} ({row.measured!r}) by {row.by}; ratio {format_ratio(row.ratio)}: {reason}"
    )
