"""The weights of a training whose gradients are given (see `inputs.given_gradient`), from the case alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dtlib.grading import inputs, oracle
from dtlib.grading.kinds import Sign, every
from dtlib.grading.seen import Case, Observed

from ._bits import Array, rounded


def start_at(case: Case, where: Array) -> Array:
    """The weights at the start, as they came, at the elements `where` of all end to end."""
    return np.concatenate([each.reshape(-1) for each in inputs.parameters(case)])[where].astype(np.float64)


def masters(
    case: Case,
    where: Array,
    *,
    begin: Callable[[Array], Array] = np.asarray,
    summed: bool = False,
    fresh: bool = False,
    rebuilt: bool = False,
) -> list[Array]:
    """The master copy after each step of AdamW, at the elements `where`.

    `begin` changes the weights at the start; `summed` adds the gradients of all steps so far, `fresh` makes each step
    the optimizer's first, `rebuilt` forgets at each step what bf16 cannot hold.
    """
    update, state, path = oracle.adamw(case["settings"]), dict[str, Any](), [begin(start_at(case, where))]
    so_far = np.zeros(len(where))
    for step, told in enumerate(case["gradients"], 1):
        parts = [inputs.given_gradient(told, index, (size,)) for index, size in enumerate(oracle.sizes(case))]
        gradient = np.concatenate(parts)[where] / 64
        so_far = rounded(so_far + gradient) if summed else gradient
        after = update(1 if fresh else step, path[-1], so_far, {} if fresh else state)
        path.append(rounded(after) if rebuilt else after)
    return path[1:]


@oracle.remembered
def course(case: Case) -> tuple[Array, list[Array]]:
    """Which elements of the weights to tell, and their master copies after each step.

    All, or a few of many; not those below ``"least"``, nor where float32's own rounding decides to which side bf16
    rounds.
    """
    count = sum(oracle.sizes(case))
    rng = np.random.default_rng(case["weights_seed"])
    where = np.unique(rng.integers(0, count, 6000)) if case["weighed"] else np.arange(count)
    path = masters(case, where)
    clear = np.abs(start_at(case, where)) >= case["least"]
    for each in path:
        size = np.abs(each)
        apart = np.ldexp(1.0, np.frexp(size)[1] - 8)  # two neighbours, which have 8 significant bits
        clear &= np.abs(size / apart % 1 - 0.5) * apart > 4e-6 * size + 1e-4 * case["settings"]["lr"]
    return where[clear], [each[clear] for each in path]


def follows(**how: Any) -> Sign:
    """The weights are, but for few, those of another course (see `masters`)."""

    def does(each: Observed) -> bool:
        path = masters(each.case, course(each.case)[0], **how)
        equal = [one == rounded(two) for one, two in zip(each.said[0]["weights"], path, strict=True)]
        return bool(np.mean(equal) > 0.98)

    return every(does)


def stand_still(each: Observed) -> bool:
    """Whether the weights are those of the start after every step."""
    begin = rounded(start_at(each.case, course(each.case)[0]))
    return all(np.array_equal(one, begin) for one in each.said[0]["weights"])
