"""Layers that cost differently, cut into stages: the best cut, exactly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dtlib.theory.valid import amount, at_most, whole


def best_partition(
    costs: Sequence[float],
    stages: int,
    *,
    layer_bytes: Sequence[float] | None = None,
    most_bytes: float | Sequence[float] | None = None,
) -> list[int]:
    """How many consecutive layers each of p stages gets, so that the most expensive stage is as cheap as possible.

    `costs` has a number for each layer (embedding and head count as layers of their own, or within the first and last).
    Each stage has a layer at least. With `layer_bytes`, one number for each layer too, no stage has more than
    `most_bytes`, one number or one for each stage: under 1F1B a stage near the front holds more micro-batches, so fewer
    layers fit. Among the best cuts the most even one, by the sum of the squares of the stages' costs. ``ValueError``
    for more stages than layers, or if nothing fits.

    The best cut of the first j layers into k stages is the best cut of some first i < j into k − 1, and a last stage
    of those from i to j: all i are tried for all j, first for the largest stage, then for the squares.
    """
    layers, p = len(costs), whole("stages", stages, 1)
    at_most("the number of layers", layers, 2000)
    if p > layers:
        raise ValueError(f"stages must be at most the number of layers, {layers}, not {p}")
    cost = _of_stages(amount("costs", list(costs)))
    held, limits = _memory(layer_bytes, most_bytes, layers, p)
    fits = [held <= limit * (1 + 1e-12) for limit in limits]
    largest, _ = _cut([np.where(fit, cost, np.inf) for fit in fits], np.maximum)
    if largest == np.inf:
        raise ValueError(f"most_bytes must leave room for {layers} layers on {p} stages, and does not")
    allowed = cost <= largest * (1 + 1e-12)
    return _cut([np.where(fit & allowed, cost**2, np.inf) for fit in fits], np.add)[1]


def _of_stages(each: NDArray[np.float64]) -> NDArray[np.float64]:
    """``[i, j]``: the sum of the layers from i to before j; infinite where there is none."""
    sums = np.concatenate([[0.0], np.cumsum(each)])
    return np.where(np.tri(len(sums), dtype=bool), np.inf, sums[None, :] - sums[:, None])


def _cut(stage_costs: list[NDArray[np.float64]], joined: np.ufunc) -> tuple[float, list[int]]:
    """The least cost of all layers, and how many each stage has; `stage_costs[k][i, j]` are joined over the stages."""
    best, choices = stage_costs[0][0], []
    for cost in stage_costs[1:]:
        tried = joined(best[:, None], cost)
        choices.append(tried.argmin(axis=0))
        best = tried.min(axis=0)
    ends = [len(best) - 1]
    for choice in reversed(choices):
        ends.append(int(choice[ends[-1]]))
    return float(best[-1]), [int(each) for each in np.diff([0, *reversed(ends)])]


def _memory(
    layer_bytes: Sequence[float] | None, most_bytes: float | Sequence[float] | None, layers: int, stages: int
) -> tuple[NDArray[np.float64], list[float]]:
    if (layer_bytes is None) != (most_bytes is None):
        raise ValueError("layer_bytes and most_bytes must be given together")
    if layer_bytes is None or most_bytes is None:
        return _of_stages(np.zeros(layers)), [0.0] * stages
    each = np.atleast_1d(amount("layer_bytes", list(layer_bytes)))
    limits = np.atleast_1d(amount("most_bytes", most_bytes))
    if len(each) != layers:
        raise ValueError(f"layer_bytes must have a number for each of {layers} layers, not {len(each)}")
    if len(limits) not in (1, stages):
        raise ValueError(f"most_bytes must be one number, or one for each of {stages} stages, not {len(limits)}")
    return _of_stages(each), [float(one) for one in np.broadcast_to(limits, stages)]
