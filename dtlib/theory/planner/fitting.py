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

NEUTRAL = replace(
    FITTED,
    matmul_share=0.8,
    operand_passes=1.0,
    attention_share=0.5,
    kept_passes=1.0,
    inside_share=0.7,
    across_share=0.7,
    overlap_share=0.7,
)
"""Where a fit starts: what one would guess without any table."""

_MOST = {name: 0.9 if name in ("inside_share", "across_share") else 1.0 for name in TIME_CONSTANTS if "share" in name}


def fitted(
    tables: Mapping[str, Sequence[Run]], start: Constants = NEUTRAL, *, rounds: int = 16, first_step: float = 0.1
) -> Constants:
    """The constants with the smallest mean over `tables` of the mean error of each, found from `start`.

    Each of `TIME_CONSTANTS` in turn is moved up and down by a factor; where none helps, the factor is halved. Every
    table counts the same, whatever its rows, and no row has a constant of its own. A share stays at most 1, that
    of a link at most 0.9.
    """

    def loss(constants: Constants) -> float:
        return float(np.mean([mean_error(runs, constants) for runs in tables.values()]))

    best, lowest, step = start, loss(start), first_step
    for _ in range(rounds):
        moved = False
        for name in TIME_CONSTANTS:
            for factor in (1 + step, 1 / (1 + step)):
                value = getattr(best, name) * factor
                if value > _MOST.get(name, float("inf")):
                    continue
                tried = replace(best, **{name: value})
                found = loss(tried)
                if found < lowest - 1e-6:
                    best, lowest, moved = tried, found, True
                    break
        step = step if moved else step / 2
    return best


def left_out_errors(
    tables: Mapping[str, Sequence[Run]], start: Constants = NEUTRAL, *, rounds: int = 16
) -> dict[str, float]:
    """The mean error over each table with constants that were fitted on the others alone."""
    return {
        name: mean_error(runs, fitted({k: v for k, v in tables.items() if k != name}, start, rounds=rounds))
        for name, runs in tables.items()
    }
