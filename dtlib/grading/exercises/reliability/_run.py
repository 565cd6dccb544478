"""A run in numpy, dice and all: what the weights of reliability.2 are after each step."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from dtlib.grading.exercises import inputs, oracle
from dtlib.grading.exercises.seen import Case

BETAS = (0.9, 0.999)
State = dict[str, Any]


@oracle.remembered
def data(case: Case) -> inputs.Array:
    rng = np.random.default_rng(case["seed"])
    return rng.standard_normal((case["samples"], case["widths"][0])).astype(np.float32)


def size(case: Case) -> int:
    wide, hidden = case["widths"]
    return int(2 * wide * hidden + wide + hidden)


def every_so_many(case: Case) -> int:
    """Of the weights, in order, one of so many is looked at."""
    return max(1, size(case) // 500)


def begun(case: Case, half: int) -> State:
    """What a half of the ranks has when it has just been made."""
    wide, hidden = case["widths"]
    seeds = case["own_seeds"][half * case["ranks"] :][: case["ranks"]]
    weights = [np.float64(each) for each in inputs.parameters({**case, "widths": [wide, hidden, wide]})]
    return {
        "weights": weights, "first": [0 * each for each in weights], "second": [0 * each for each in weights],
        "adam": 0, "rate": case["lr"] * factor(case, 0), "scheduler": 0, "epoch": 0, "position": 0,
        "python": [random.Random(seed) for seed in seeds],
        "torch": [np.random.RandomState(seed) for seed in seeds],  # torch's generator is this one
    }  # fmt: skip


def factor(case: Case, t: int) -> float:
    return min(1.0, (t + 1) / case["warm"]) / (1 + t / 20)


def went(case: Case, state: State, steps: int) -> list[inputs.Array]:
    """So many steps on, in place; the weights that are looked at, after each."""
    n, seen = case["ranks"], []
    for _ in range(steps):
        order = list(range(case["samples"]))
        random.Random(1000 * case["order"] + state["epoch"]).shuffle(order)
        taken = order[state["position"] : state["position"] + case["batch"]]
        state["position"] += case["batch"]
        if state["position"] >= case["samples"]:
            state["epoch"], state["position"] = state["epoch"] + 1, 0
        found = [gradients(case, state, rank, taken[rank::n]) for rank in range(n)]
        state["adam"] += 1
        for i, each in enumerate(zip(*found, strict=True)):
            gradient = sum(each) / n
            state["first"][i] = BETAS[0] * state["first"][i] + (1 - BETAS[0]) * gradient
            state["second"][i] = BETAS[1] * state["second"][i] + (1 - BETAS[1]) * gradient**2
            root = np.sqrt(state["second"][i] / (1 - BETAS[1] ** state["adam"])) + case["eps"]
            mean = state["first"][i] / (1 - BETAS[0] ** state["adam"])
            state["weights"][i] = state["weights"][i] - state["rate"] * mean / root
        state["scheduler"] += 1
        state["rate"] = case["lr"] * factor(case, state["scheduler"])
        seen.append(oracle.flat(state["weights"])[:: every_so_many(case)])
    return seen


def gradients(case: Case, state: State, rank: int, mine: list[int]) -> list[Any]:
    """Of one rank, on its samples, each turned round or not, with what dropout leaves."""
    targets = data(case)[mine].astype(np.float64)
    rows = np.stack([row[::-1] if state["python"][rank].random() < 0.5 else row for row in targets])
    one, b1, two, b2 = state["weights"]
    drawn = state["torch"][rank].randint(0, 2**32, (len(mine), case["widths"][1]), np.uint32)
    left = ((drawn & (2**24 - 1)) >= 2**22) / 0.75
    hidden = np.tanh(rows @ one.T + b1)
    back = 2 * ((hidden * left) @ two.T + b2 - targets) / targets.size
    inside = (back @ two) * left * (1 - hidden**2)
    return [inside.T @ rows, inside.sum(0), back.T @ (hidden * left), back.sum(0)]
