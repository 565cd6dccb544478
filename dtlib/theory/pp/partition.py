"""Layers that cost differently, cut into stages: the best cut, exactly."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from dtlib.theory.valid import amount, whole


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
    layers fit. Among the best cuts, the one whose first stages are the fullest. ``ValueError`` for more stages than
    layers, or if nothing fits.

    A cost c is enough if stages that each take as many layers as fit into c come to the end; what is reached only grows
    with c, and the answer is a sum of consecutive costs. So those sums, sorted, are searched by halving.
    """
    numbers = [float(each) for each in np.atleast_1d(amount("costs", list(costs)))]
    layers, p = len(numbers), whole("stages", stages, 1)
    if p > layers:
        raise ValueError(f"stages must be at most the number of layers, {layers}, not {p}")
    sums = [0.0, *accumulate(numbers)]
    held, limits = _memory(layer_bytes, most_bytes, layers, p)
    candidates = sorted({sums[end] - sums[start] for start in range(layers) for end in range(start + 1, layers + 1)})

    def cut(most: float) -> list[int] | None:
        ends, start = [], 0
        for stage in range(p):
            end = bisect_right(sums, sums[start] + most * (1 + 1e-12)) - 1
            if held:
                end = min(end, bisect_right(held, held[start] + limits[stage] * (1 + 1e-12)) - 1)
            end = min(end, layers - (p - 1 - stage))  # a layer for each that comes
            if end <= start:
                return None
            ends.append(end - start)
            start = end
        return ends if start == layers else None

    low, high = 0, len(candidates) - 1
    if cut(candidates[high]) is None:
        raise ValueError(f"most_bytes must leave room for {layers} layers on {p} stages, and does not")
    while low < high:
        middle = (low + high) // 2
        if cut(candidates[middle]) is None:
            low = middle + 1
        else:
            high = middle
    found = cut(candidates[low])
    assert found is not None  # the largest candidate was enough
    return found


def _memory(
    layer_bytes: Sequence[float] | None, most_bytes: float | Sequence[float] | None, layers: int, stages: int
) -> tuple[list[float], list[float]]:
    if (layer_bytes is None) != (most_bytes is None):
        raise ValueError("layer_bytes and most_bytes must be given together")
    if layer_bytes is None or most_bytes is None:
        return [], []
    each = np.atleast_1d(amount("layer_bytes", list(layer_bytes)))
    limits = np.atleast_1d(amount("most_bytes", most_bytes))
    if len(each) != layers:
        raise ValueError(f"layer_bytes must have a number for each of {layers} layers, not {len(each)}")
    if len(limits) not in (1, stages):
        raise ValueError(f"most_bytes must be one number, or one for each of {stages} stages, not {len(limits)}")
    return [0.0, *accumulate(map(float, each))], [float(one) for one in np.broadcast_to(limits, stages)]
