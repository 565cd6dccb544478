"""What the laws take: numbers, and finite vectors and matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtlib.theory.valid import amount

Array = NDArray[np.float64]


def finite(name: str, value: Any, dims: int = 1) -> Array:
    """`value` as doubles with `dims` dimensions, or ``ValueError`` where it has others or is not finite."""
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be numbers in {dims} dimensions, not {value!r}") from None
    if array.ndim != dims:
        raise ValueError(f"{name} must have {dims} dimensions, not the shape {array.shape}")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} must be finite")
    return array


def number(name: str, value: Any, *, positive: bool = False) -> float:
    """`value`, or ``ValueError`` unless it is one finite number that is not negative."""
    checked = amount(name, value, positive=positive)
    if np.ndim(checked):
        raise ValueError(f"{name} must be one number, not {value!r}")
    return float(checked)


def unit(array: Array) -> tuple[Array, float]:
    """`array` with a largest magnitude of 1, and that magnitude: squares then neither overflow nor vanish."""
    largest = float(np.abs(array).max(initial=0.0))
    if not largest:
        return array, 0.0
    return array / largest, largest
