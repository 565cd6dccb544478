"""The weights of a training in one process, by ordinary steps and by others."""

from __future__ import annotations

from typing import Any

import numpy as np

from dtlib.grading import oracle
from dtlib.grading.kinds import Theory
from dtlib.grading.seen import Case


def positions(case: Case) -> Any:
    """Which elements of the weights are asked for: all, or of many a few."""
    total = sum(oracle.sizes(case))
    few = np.random.default_rng(case["seed"]).integers(0, total, 5000)
    return np.unique(few) if case["gated"] else np.arange(total)


def told(case: Case, path: list[oracle.Tensors]) -> Any:
    """The elements asked for, after each step."""
    return [[oracle.flat(each)[positions(case)] for each in path]]


def after_steps(*, fresh: bool = False, summed: bool = False) -> Theory:
    """The weights after each step; where it takes all gradients so far with `summed`, for `fresh` see the oracle."""

    def theory(case: Case) -> Any:
        so_far: list[oracle.Tensors] = []

        def gradients(at: oracle.Tensors, number: int) -> oracle.Tensors:
            so_far.append(oracle.loss_and_gradients(case, at, 0, number)[1])
            return oracle.combined(so_far) if summed else so_far[-1]

        return told(case, oracle.trajectory(case, case["steps"], gradients, fresh=fresh))

    return oracle.remembered(theory)


def late(case: Case) -> Any:
    """Each step takes the gradients of the one before."""
    before = [oracle.start(case)]

    def gradients(at: oracle.Tensors, number: int) -> oracle.Tensors:
        before.append(at)
        return oracle.loss_and_gradients(case, before[-2], 0, number)[1]

    return told(case, [oracle.start(case), *oracle.trajectory(case, case["steps"] - 1, gradients)])


def plain(case: Case) -> Any:
    """Gradient descent."""
    settings = {"lr": case["settings"]["lr"], "momentum": 0.0, "weight_decay": 0.0}
    return after_steps()({**case, "optimizer": "sgd", "settings": settings})
