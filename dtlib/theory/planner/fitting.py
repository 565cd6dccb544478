"""How the constants were found, and how far they carry: the fit, and the fit with one table left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from .constants import FITTED, Constants
from .published import Run, mean_error

TIME_CONSTANTS = (
    "matmul_share", "operand_passes", "attention_share", "kept_passes", "inside_share", "across_share", "overlap_share",
)  # fmt: skip
"""The constants that `fitted` moves; the others are fitted on the sweep of small models."""

_SHARES = {name for name in TIME_CONSTANTS if name.endswith("share")}


def fitted(
    tables: Mapping[str, Sequence[Run]], start: Constants = FITTED, *, rounds: int = 12, first_step: float = 0.1
) -> Constants:
    """The constants with the smallest mean over `tables` of the mean error of each, found from `start`.

    Each of `TIME_CONSTANTS` in turn is moved up and down by a factor; where none helps, the factor is halved. Every
    table counts the same, whatever its rows, and no row has a constant of its own. A share stays below 1.
    """

    def loss(constants: Constants) -> float:
        return float(np.mean([mean_error(runs, constants) for runs in tables.values()]))

    best, lowest, step = start, loss(start), first_step
    for _ in range(rounds):
        moved = False
        for name in TIME_CONSTANTS:
            for factor in (1 + step, 1 / (1 + step)):
                value = getattr(best, name) * factor
                if name in _SHARES and value > 1:
                    continue
                tried = replace(best, **{name: value})
                found = loss(tried)
                if found < lowest - 1e-6:
                    best, lowest, moved = tried, found, True
                    break
        step = step if moved else step / 2
    return best


def left_out_errors(
    tables: Mapping[str, Sequence[Run]], start: Constants = FITTED, *, rounds: int = 12
) -> dict[str, float]:
    """The mean error over each table with constants that were fitted on the others alone."""
    return {
        name: mean_error(runs, fitted({k: v for k, v in tables.items() if k != name}, start, rounds=rounds))
        for name, runs in tables.items()
    }
