"""What the laws take beside amounts: whole numbers, one or an array of them, and pairs of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtlib.theory.valid import amount, row


def counted(name: str, value: Any, minimum: int = 1) -> Any:
    """`value`, a whole number or an array of them, or ``ValueError`` unless each is at least `minimum`."""
    checked = amount(name, value)
    if np.any(np.asarray(checked) % 1) or np.any(np.asarray(checked) < minimum):
        raise ValueError(f"{name} must be whole and at least {minimum}, not {value!r}")
    return checked


def paired(names: tuple[str, str], first: Any, second: Any) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Two vectors of one length, the first of positive numbers, or ``ValueError``."""
    left, right = row(names[0], first, positive=True), row(names[1], second)
    if left.shape != right.shape:
        raise ValueError(f"{names[1]} must be as many as {names[0]}, {left.size}, not {right.size}")
    return left, right


def share(name: str, value: Any, least: float, most: float) -> float:
    """`value` as a float, or ``ValueError`` unless it is one number from `least` to `most`."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if isinstance(value, (bool, str, bytes)) or not least <= number <= most:
        raise ValueError(f"{name} must be a number from {least:g} to {most:g}, not {value!r}")
    return number
