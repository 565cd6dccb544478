"""What the laws take: one number, or a row of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtlib.theory.valid import amount


def number(name: str, value: Any, *, positive: bool = False) -> float:
    """`value`, or ``ValueError`` unless it is one finite number that is not negative."""
    checked = amount(name, value, positive=positive)
    if np.ndim(checked):
        raise ValueError(f"{name} must be one number, not {value!r}")
    return float(checked)


def row(name: str, values: Any, *, positive: bool = True) -> NDArray[np.float64]:
    """`values` as an array of at least one finite number, above 0 or not below it; else ``ValueError``."""
    found = np.asarray(amount(name, values, positive=positive), dtype=np.float64)
    if found.ndim != 1 or not found.size:
        raise ValueError(f"{name} must be a row of one number or more, not {values!r}")
    return found
