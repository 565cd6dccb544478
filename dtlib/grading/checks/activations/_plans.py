"""Plans of activations.3: how one is handed in, what it costs, the best one, and other ways to come to one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from dtlib.grading.compare import show
from dtlib.grading.exercise import FormError
from dtlib.grading.seen import Case, Observed


def answer(observed: Observed) -> tuple[list[int], Any]:
    """The plan that was returned, and the peak beside it."""
    value = observed.said[0]["answer"]
    if not isinstance(value, list) or len(value) != 2:
        raise FormError(show(value), "a tuple (starts, peak)")
    starts = value[0].tolist() if isinstance(value[0], np.ndarray) else value[0]
    layers = len(observed.case["arguments"][0])
    whole = isinstance(starts, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in starts)
    if not whole or not starts or starts[0] != 0 or sorted(set(starts)) != starts or starts[-1] >= layers:
        wanted = f"layers from 0 to {layers - 1} in increasing order, the first of them 0"
        raise FormError(f"the starts {show(starts)}", wanted)
    return starts, value[1]


def parts(starts: Sequence[int], case: Case) -> tuple[list[int], list[int]]:
    """The bytes of each checkpoint of a plan, and what each of its segments keeps while it is alive."""
    kept, inputs = case["arguments"]
    own = [sum(kept[start:end]) for start, end in pairwise([*starts, len(kept)])]
    return [inputs[start] for start in starts], own


def peak_of(starts: Sequence[int], case: Case, *, twice: bool = False) -> int:
    """The most that is alive at one time in backward, with segments that begin at `starts`; with own inputs `twice`."""
    checkpoints, own = parts(starts, case)
    waiting = accumulate(checkpoints) if twice else accumulate(checkpoints, initial=0)
    return max(before + size for before, size in zip(waiting, own, strict=False))


def never_freed(starts: Sequence[int], case: Case) -> int:
    """The same if every checkpoint stayed to the end."""
    checkpoints, own = parts(starts, case)
    return sum(checkpoints) + max(size - first for first, size in zip(checkpoints, own, strict=True))


def best(case: Case) -> tuple[float, list[int]]:
    """The smallest peak, and a plan that has it: what lies before a segment adds the same to all that lies behind."""
    kept, inputs = case["arguments"]
    found: dict[int, tuple[float, list[int]]] = {len(kept): (-math.inf, [])}
    for start in reversed(range(len(kept))):
        found[start] = min(
            (max(sum(kept[start:end]), inputs[start] + found[end][0]), [start, *found[end][1]])
            for end in range(start + 1, len(kept) + 1)
        )
    return found[0]


def cut_every(k: Callable[[int], int]) -> Callable[[Case], list[int]]:
    """Segments of ``k(number of layers)`` layers."""
    return lambda case: list(range(0, len(case["arguments"][0]), k(len(case["arguments"][0]))))


def even(case: Case) -> list[int]:
    """The best of the plans with segments of equal length."""
    plans = [cut_every(lambda _, k=k: k)(case) for k in range(1, len(case["arguments"][0]) + 1)]  # type: ignore[misc]
    return min(plans, key=lambda plan: peak_of(plan, case))


def filled(case: Case, bound: float) -> list[int]:
    """Each segment as long as it may be within a bound."""
    kept, inputs = case["arguments"]
    starts, waiting, own = [0], 0, 0
    for layer, size in enumerate(kept):
        if own and waiting + own + size > bound:
            waiting, own = waiting + inputs[starts[-1]], 0
            starts.append(layer)
        own += size
    return starts


def best_filled(case: Case) -> list[int]:
    """The best of these plans."""
    bounds = range(max(case["arguments"][0]), sum(case["arguments"][0]))
    return min((filled(case, bound) for bound in bounds), key=lambda plan: peak_of(plan, case))


def forwards(case: Case) -> list[int]:
    """Of the first layers the plan with the smallest peak is continued, whatever it leaves waiting."""
    kept, inputs = case["arguments"]
    best: list[tuple[int, int, list[int]]] = [(0, 0, [])]
    for end in range(1, len(kept) + 1):
        plans = []
        for start, (peak, waiting, cuts) in enumerate(best):
            plans.append((max(peak, waiting + sum(kept[start:end])), waiting + inputs[start], [*cuts, start]))
        best.append(min(plans))
    return best[-1][2]


PLANS: dict[str, Callable[[Case], list[int]]] = {
    "√l": cut_every(lambda layers: max(1, round(math.sqrt(layers)))),
    "one segment": cut_every(lambda layers: layers),
    "a segment for each layer": cut_every(lambda layers: 1),
    "segments of equal length": even,
    "as long as they may be": best_filled,
    "one plan for each beginning": forwards,
}


OTHER_PEAKS: dict[str, Callable[[Sequence[int], Case], float]] = {
    "checkpoints never freed": never_freed,
    "live segment forgotten": lambda starts, case: sum(parts(starts, case)[0]),
    "checkpoints forgotten": lambda starts, case: max(parts(starts, case)[1]),
    "own input twice": lambda starts, case: peak_of(starts, case, twice=True),
    "everything kept": lambda starts, case: sum(case["arguments"][0]),
}
