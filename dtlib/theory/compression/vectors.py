"""What the laws take beside numbers: finite vectors and matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

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


def unit(array: Array) -> tuple[Array, float]:
    """`array` with a largest magnitude of 1, and that magnitude: squares then neither overflow nor vanish."""
    largest = float(np.abs(array).max(initial=0.0))
    if not largest:
        return array, 0.0
    return array / largest, largest
