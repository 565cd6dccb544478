"""How the constants were found, and how far they carry: the fit, and the fit with one table left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtlib.theory.timing import FITTED, Constants
from dtlib.theory.units import TFLOP, ms, us

from .run import Run, mean_error

TIME_CONSTANTS = (
    "matmul_share", "operand_passes", "attention_share", "kept_passes", "inside_share", "across_share", "overlap_share",
    "contention_share",
)  # fmt: skip
"""The constants that `fitted` moves; the others are fitted on the sweep of small models."""

HABITS: Mapping[str, tuple[Constants, tuple[str, ...]]] = MappingProxyType(
    {
        "nanotron": (
            replace(FITTED, kept_passes=2.5, logit_passes=1, layer_host_seconds=4 * ms,
                    rank_host_seconds=0.5 * ms, staged_rank_host_seconds=2 * ms, far_rank_host_seconds=3 * ms,
                    data_hiding=0.1, sharded_messages=6, accumulated_bytes=10, head_balance=1, stall_seconds=0.28,
                    stall_hop_seconds=50 * us, stall_cards=512, stall_ranks=32),
            ("matmul_share", "kept_passes", "logit_passes", "layer_host_seconds",
             "rank_host_seconds", "staged_rank_host_seconds", "far_rank_host_seconds", "stall_hop_seconds"),
        ),
        "fsdp": (
            replace(FITTED, attention_flop_per_s=150 * TFLOP, selective_products=0.5),
            ("matmul_share", "attention_flop_per_s", "kept_passes"),
        ),
        "deepspeed": (replace(FITTED, inside_share=0.5), ("matmul_share", "inside_share", "across_share")),
    }
)  # fmt: skip
"""Of each framework but Megatron: where its fit starts, from what its code does, and the constants that it moves."""

NEUTRAL = replace(
    FITTED, matmul_share=0.8, operand_passes=1.0, attention_share=0.35, kept_passes=1.8, inside_share=0.8,
    across_share=0.8, overlap_share=0.7, contention_share=0.2,
)  # fmt: skip
"""Where a fit starts, and what pulls at it: what one would guess without any table."""

USUAL_ERROR = 0.03
"""Below this an error counts by its square, above by its size: no outlier decides."""

PULL = 0.1
"""A constant that is a tenth away from its start costs as much as this tenth of an error in one table."""

_MOST = {name: 0.9 if name in ("inside_share", "across_share") else 1.0 for name in TIME_CONSTANTS if "share" in name}


def fitted(
    tables: Mapping[str, Sequence[Run]], start: Constants = NEUTRAL, *, names: Sequence[str] = TIME_CONSTANTS,
    rounds: int = 12,
) -> Constants:  # fmt: skip
    """The constants with the smallest errors over `tables`, found from `start` in at most so many `rounds`.

    Those called `names` are moved, by least squares (Levenberg and Marquardt) on the logarithms of the constants and of
    the errors. Every table counts the same, whatever its rows, and no row has a constant of its own. What no table
    decides stays near its start (`PULL`). A share stays at most 1, that of a link at most 0.9.
    """
    origin = np.log([getattr(start, name) for name in names])
    most = np.log([_MOST.get(name, np.inf) for name in names])

    def constants(point: NDArray[Any]) -> Constants:
        return replace(start, **dict(zip(names, np.exp(point).tolist(), strict=True)))

    def residuals(point: NDArray[Any]) -> NDArray[Any]:
        k = constants(point)
        by_table = [_softened([run.log_error(k) for run in runs]) / np.sqrt(len(runs)) for runs in tables.values()]
        return np.concatenate([*by_table, PULL * (point - origin)])

    point, damping, step = origin, 1e-2, 1e-4
    here = residuals(point)
    for _ in range(rounds):
        slopes = np.stack([(residuals(point + step * each) - here) / step for each in np.eye(len(point))], axis=1)
        curvature, downhill = slopes.T @ slopes, -slopes.T @ here
        for _ in range(6):
            move = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), downhill)
            tried = np.minimum(point + np.clip(move, -0.3, 0.3), most)
            found = residuals(tried)
            if found @ found < here @ here:
                point, here, damping = tried, found, damping / 3
                break
            damping *= 4
    return constants(point)


def left_out_errors(tables: Mapping[str, Sequence[Run]], start: Constants = NEUTRAL) -> dict[str, float]:
    """The mean error over each table with constants that were fitted on the others alone."""
    return {
        name: mean_error(runs, fitted({k: v for k, v in tables.items() if k != name}, start))
        for name, runs in tables.items()
    }


def _softened(errors: Sequence[float]) -> NDArray[Any]:
    """Errors whose squares grow like the errors themselves where these are large (pseudo-Huber)."""
    e = np.asarray(errors) / USUAL_ERROR
    return np.asarray(USUAL_ERROR * np.sign(e) * np.sqrt(2 * (np.sqrt(1 + e * e) - 1)))
