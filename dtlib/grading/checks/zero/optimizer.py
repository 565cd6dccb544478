"""zero.4: each rank keeps the optimizer's states of its share, stage 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dtlib.grading import inputs, oracle
from dtlib.grading.exercise import Exercise
from dtlib.grading.kinds import Theory, every, heard, keeps, only_if, own_work, sends, values
from dtlib.grading.seen import Case, Observed

from ._shared import ROOM, positions

FUNCTION = "sharded_optimizer"
STATES = {"adamw": 2, "sgd": 1}  # numbers that torch's optimizer keeps for each element
STEPS = 3
ATOL = 2e-4  # a step moves a weight by about 1e-2; float32 rounds gradients, and eps multiplies that


def draw(rng: np.random.Generator) -> list[dict[str, Any]]:
    """Both optimizers on 2 to 4 ranks, and so many weights that their memory can be weighed."""
    cases: list[dict[str, Any]] = []
    for n, kind in ((3, "adamw"), (2, "sgd"), (4, "adamw"), (4, "sgd"), (4, "adamw")):
        weighed = len(cases) == 4
        widths = [64, 2048, 2800, 1] if weighed else [48, int(rng.integers(90, 120)), int(rng.integers(80, 100)), 1]
        decay = float(rng.choice([0.05, 0.1]))
        settings: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": decay}
        if kind == "adamw":
            settings = {"lr": 0.01, "betas": [0.9, 0.99], "eps": 1e-4, "weight_decay": decay}
        case = {
            "world_size": n,
            "samples": int(rng.integers(3, 6)),
            "widths": widths,
            "optimizer": kind,
            "settings": settings,
            "steps": 2 if weighed else STEPS,
            "weighed": weighed,
            "seed": int(rng.integers(0, 2**31)),
            "weights_seed": int(rng.integers(0, 2**31)),
            "words": f"{n} ranks, {kind}, layers of {', '.join(map(str, widths))}",
        }
        total = sum(oracle.sizes(case))
        cases.append(case | {"is": {"two ranks": n == 2, "divisible": total % n == 0, "adamw": kind == "adamw"}})
    return cases


def asked_for(case: Case) -> Any:
    """Which elements of the weights are asked for."""
    return positions(case, sum(oracle.sizes(case)))


def handed_out(case: Case, rank: int) -> inputs.Pieces:
    """The network, its batches and the optimizer; after each step, what is asked for."""
    start = {**inputs.network(case, rank, case["steps"]), "optimizer": case["optimizer"], "settings": case["settings"]}
    return [("start", start), *[("between steps", asked_for(case))] * case["steps"]]


def after_steps(factor: Callable[[int], float], *, fresh: bool = False) -> Theory:
    """What every rank tells where a step takes ``factor(n)`` times the mean gradient."""

    def theory(case: Case) -> Any:
        def scaled(at: Any, number: int) -> Any:
            return oracle.combined([oracle.mean_gradients(case, [number], at)], factor(case["world_size"]))

        path = oracle.trajectory(case, case["steps"], scaled, fresh=fresh)
        return [[oracle.flat(each)[asked_for(case)] for each in path]] * case["world_size"]

    return oracle.remembered(theory)


right = after_steps(lambda n: 1.0)


def at_start(case: Case) -> Any:
    """What every rank tells where nothing happens."""
    return [[oracle.flat(oracle.start(case))[asked_for(case)]] * case["steps"]] * case["world_size"]


def is_right(observed: Observed) -> Any:
    """For each rank, which of the elements are right after the first step."""
    wanted = right(observed.case)
    return [np.abs(said["weights"][0] - two[0]) <= ATOL for said, two in zip(observed.said, wanted, strict=True)]


def own_share_only(observed: Observed) -> bool:
    """Whether the ranks hold different weights, each right in a share of them."""
    found = is_right(observed)
    return all(0 < each.sum() < each.size for each in found) and bool(np.all(np.any(found, axis=0)))


def some_rest(observed: Observed) -> bool:
    """Whether after the first step most elements are right on every rank, and the others as at the start."""
    first = at_start(observed.case)[0][0]
    for good, said in zip(is_right(observed), observed.said, strict=True):
        rest = np.abs(said["weights"][0] - first) <= 1e-7
        if good.sum() < good.size / 2 or not np.all(rest[~good]):
            return False
    return True


def share_bytes(case: Case, rank: int) -> int:
    """The bytes of a rank's share of the weights."""
    total = sum(oracle.sizes(case))
    return oracle.FLOAT_BYTES * len(np.array_split(np.empty(total), case["world_size"])[rank])


def most(case: Case, rank: int) -> float:
    """The weights; of the share the states, a copy and the gradient."""
    return oracle.num_bytes(case) + (STATES[case["optimizer"]] + 2) * share_bytes(case, rank) + ROOM


def uneven(observed: Observed) -> bool:
    """Whether some ranks hold too much, and others do not."""
    ranks = range(len(observed.said))
    much = [observed.seen.held(rank, "between steps") > most(observed.case, rank) for rank in ranks]
    return any(much) and not all(much)


def wholes(number: float) -> Callable[[Case, int], float]:
    """The weights, and beside them so many tensors as long as all states (a negative number: as all weights)."""
    return lambda case, rank: oracle.num_bytes(case) * (1 + STATES[case["optimizer"]] + number) - ROOM


def needed(case: Case) -> float:
    """What all ranks send for a reduce-scatter and an all-gather each step."""
    return 2.0 * case["steps"] * (case["world_size"] - 1) * oracle.num_bytes(case)


EXERCISE = Exercise(
    id="zero.4",
    function=FUNCTION,
    title="States for a share of the weights",
    harness="zero.optimizer",
    draw=draw,
    handed_out=handed_out,
    checks=(
        own_work(FUNCTION, built_in=True),
        heard(FUNCTION, lambda case: needed(case) / 2),
        values(
            3,
            "weights",
            "after every step each rank has the weights of a single process",
            right,
            of="weights",
            atol=ATOL,
            names=lambda case: [f"weights after step {step + 1}" for step in range(case["steps"])],
            wrong={
                "sum for mean": after_steps(lambda n: n),
                "divided twice": after_steps(lambda n: 1 / n),
                "nothing happened": at_start,
                "a fresh optimizer each step": after_steps(lambda n: 1.0, fresh=True),
                "only the own share is new": every(own_share_only),
                "some weights never move": every(some_rest),
                "right for one optimizer only": only_if("adamw"),
                "right for another optimizer only": only_if(lambda case: not case["is"]["adamw"]),
            },
        ),
        keeps(
            4,
            "memory",
            "between steps a rank keeps no more than the states, a copy and the gradient of its own share",
            lambda seen, rank: seen.held(rank, "between steps"),
            most,
            "held between steps, the weights among them",
            wrong={
                "whole parameters on a rank": every(uneven),
                "replicated states": (wholes(0), wholes(0.9)),
                "states and more of full length": (wholes(0.9), None),
                "a buffer of full length": (lambda case, rank: most(case, rank), None),
            },
        ),
        sends(
            3,
            "traffic",
            "a step sends one reduce-scatter of gradients and one all-gather of weights",
            needed,
            where="not weighed",  # gloo's own reduce sends long tensors in more pieces than it must
            wrong={
                "all-reduce, then all-gather": lambda case: 1.5 * needed(case),
                "two all-reduces": lambda case: 2 * needed(case),
                "the gradients do not travel": lambda case: needed(case) / 2,
                "everything gathered": lambda case: needed(case) / 2 * (case["world_size"] + 1),
            },
        ),
    ),
)
