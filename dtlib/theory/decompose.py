"""What a result is made of: a sum of known contributions, and with which coefficients.

The grader and `lab.parity` ask the same question: a rank holds something that is not what it should hold; how often is
each contribution in it? A contribution that is missing has the coefficient 0, one counted twice 2, and a sum in the
place of the mean of N has N times each that is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def decompose(seen: NDArray[Any], parts: Sequence[NDArray[Any]], rtol: float = 1e-3) -> NDArray[np.float64] | None:
    """The coefficients with which `seen` is a sum of `parts`, by least squares; None where it is no such sum.

    It is none where shapes differ, where `seen` has fewer elements than there are parts or one that is not finite,
    where all parts are zero, and where an element of the sum is further off than `rtol` times the largest of a part.
    """
    if not parts or any(seen.shape != part.shape for part in parts) or seen.size < len(parts):
        return None
    columns = np.stack([part.astype(np.float64).ravel() for part in parts], 1)
    flat = seen.astype(np.float64).ravel()
    scale = np.linalg.norm(columns, axis=0).max()
    if not np.all(np.isfinite(flat)) or scale == 0:
        return None
    found = np.asarray(np.linalg.lstsq(columns, flat, rcond=None)[0], np.float64)
    return found if np.abs(columns @ found - flat).max() <= rtol * np.abs(columns).max() else None
