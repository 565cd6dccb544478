"""What formulas accept, and the words they refuse the rest with.

Each function returns what it was given in the types that arithmetic is safe with: Python's own numbers, which neither
overflow nor repeat, and arrays of doubles.
"""

from __future__ import annotations

import operator
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Size = TypeVar("Size", float, NDArray[np.float64])
"""A number of bytes, or an array of them."""


def whole(name: str, value: Any, minimum: int) -> int:
    """`value` as an int, or ``ValueError`` unless it is a whole number of at least `minimum`."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be a whole number of at least {minimum}, not {value!r}") from None
    if number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, not {number}")
    return number


def at_most(name: str, number: int, most: int) -> int:
    """`number`, or ``ValueError`` where it is above `most`: beyond, an answer would take too long."""
    if number > most:
        raise ValueError(f"{name} must be at most {most:,} here, where each is looked at, not {number}")
    return number


def flag(name: str, value: Any) -> bool:
    """`value`, or ``ValueError`` unless it is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, not {value!r}")
    return value


def ranks(n: Any) -> int:
    """The number of ranks as an int of at least 1."""
    return whole("n", n, 1)


_SAFE = 2**1000  # every int up to here is a finite double


def amount(name: str, value: Any, *, positive: bool = False) -> Any:
    """`value`, a number or an array or list of them; ``ValueError`` unless it is finite and not negative."""
    if type(value) in (int, float) and (0 < value < _SAFE or (value == 0 and not positive)):
        return value  # most are, and a search asks a million times
    rule = "positive" if positive else "zero or more"
    try:
        if isinstance(value, (bool, np.bool_, str, bytes)):
            raise TypeError
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be a finite number, {rule}, not {value!r}") from None
    below = array <= 0 if positive else array < 0
    if not np.isfinite(array).all() or below.any():
        raise ValueError(f"{name} must be finite and {rule}, not {value!r}")
    if array.ndim:
        return array
    return operator.index(value) if hasattr(value, "__index__") and not isinstance(value, np.ndarray) else float(array)


def number(name: str, value: Any, *, positive: bool = False) -> float:
    """`value`, or ``ValueError`` unless it is one finite number that is not negative."""
    checked = amount(name, value, positive=positive)
    if np.ndim(checked):
        raise ValueError(f"{name} must be one number, not {value!r}")
    return float(checked)


def at_least(name: str, value: Any, least: float) -> float:
    """`value` as one finite number of at least `least`, which is not negative; else ``ValueError``."""
    if type(value) in (int, float) and least <= value < _SAFE:
        return value
    rule = f"{least:g} or more"
    try:
        found = number(name, value)
    except ValueError:
        below = isinstance(value, (int, float)) and -np.inf < value < 0
        raise ValueError(f"{name} must be {'' if below else 'finite and '}{rule}, not {value!r}") from None
    if found < least:
        raise ValueError(f"{name} must be {rule}, not {value!r}")
    return found


def row(name: str, values: Any, *, positive: bool = False) -> NDArray[np.float64]:
    """`values` as an array of at least one finite number, above 0 or not below it; else ``ValueError``."""
    found = np.asarray(amount(name, values, positive=positive), dtype=np.float64)
    if found.ndim != 1 or not found.size:
        raise ValueError(f"{name} must be a row of one number or more, not {values!r}")
    return found


def sized(full_bytes: Any, n: Any, name: str = "full_bytes") -> tuple[Any, int]:
    """The size of a buffer and a number of ranks."""
    return amount(name, full_bytes), ranks(n)


def timed(full_bytes: Any, n: Any, alpha_seconds: Any, link_bytes_per_s: Any) -> tuple[Any, int, Any, Any]:
    """A size, a number of ranks and a link."""
    alpha_seconds = amount("alpha_seconds", alpha_seconds)
    link_bytes_per_s = amount("link_bytes_per_s", link_bytes_per_s, positive=True)
    return *sized(full_bytes, n), alpha_seconds, link_bytes_per_s


def node_size(n: int, ranks_per_node: Any) -> int:
    """`ranks_per_node` as an int that divides `n`."""
    size = whole("ranks_per_node", ranks_per_node, 1)
    if n % size:
        raise ValueError(f"ranks_per_node must divide the number of ranks, {n}; {size} does not")
    return size


def rank_of(name: str, rank: Any, n: int) -> int:
    """`rank` as an int from 0 to n−1."""
    number = whole(name, rank, 0)
    if number >= n:
        raise ValueError(f"{name} must be below the number of ranks, {n}, not {number}")
    return number
