"""memory.6: each weight updated, and its gradient freed, while backward goes on; memory is weighed between layers."""

from functools import partial
from typing import Any

import numpy as np

from dtlib.grading.exercises import inputs, oracle
from dtlib.grading.exercises.exercise import Exercise
from dtlib.grading.exercises.kinds import ROOM, keeps, own_work, showed, values
from dtlib.grading.exercises.seen import Case, Seen
from dtlib.grading.exercises.signs import NOTHING_ELSE, Theory, Wrong, only_if

from ._shared import GRADIENTS_KEPT, at_rest, is_held, names, per

FUNCTION = "update_in_backward"
WIDTH = 1024  # of a layer that is weighed
ATOL = 2e-4  # a step moves a weight by about 1e-2; float32 rounds gradients, and eps multiplies that
FEW = 4 * 4 * WIDTH**2  # what gradients may take: four of the largest


def draw(rng: inputs.Rng) -> inputs.Cases:
    """Layers in order, in another, one used twice; some frozen, the first among them; so many that they weigh."""

    def case(words: str, num_layers: int, steps: int = 3, **more: Any) -> dict[str, Any]:
        width, rate = int(rng.integers(6, 12)), round(float(rng.uniform(0.01, 0.02)), 4)
        decay = round(float(rng.uniform(0.05, 0.1)), 2)
        return {
            "samples": int(rng.integers(2, 5)),
            "widths": [*[width] * num_layers, 1],
            "optimizer": "adamw",
            "settings": {"lr": rate, "betas": [0.9, 0.99], "eps": 1e-3, "weight_decay": decay},
            "steps": steps,
            "gated": False,
            "frozen": [],
            "seed": int(rng.integers(0, 2**31)),
            "weights_seed": int(rng.integers(0, 2**31)),
            "words": f"{words}, {steps} steps, learning rate {rate:g}",
            "is": {"none frozen": "frozen" not in more, "each used once": len(more.get("use", ())) <= num_layers},
            **more,
        }

    return [
        case("3 layers", 3),
        case("a layer used twice", 3, use=[0, 1, 1, 2]),
        case("layers used in another order, one of them twice", 4, use=[2, 0, 1, 0, 3]),
        case("the middle layer and a bias frozen", 3, frozen=[2, 3, 5]),
        case("the first layer and a weight frozen", 4, frozen=[0, 1, 4]),
        case("12 layers", 12, 2, widths=[*[WIDTH] * 12, 1], gated=True, weighed=True),
    ]


def handed_out(case: Case, rank: int) -> inputs.Pieces:
    """The model, its batches and the optimizer; on each way back the keys, and then which weights to tell."""
    more = {name: case[name] for name in ("optimizer", "settings", "gated")}
    pieces: inputs.Pieces = [("start", {**inputs.model(case, rank, case["steps"]), **more})]
    for step in range(case["steps"]):
        pieces += inputs.gates(case, rank, step) if case["gated"] else []
        pieces.append(("between steps", positions(case)))
    return pieces


def positions(case: Case) -> Any:
    total = sum(oracle.sizes(case))
    few = np.random.default_rng(case["seed"]).integers(0, total, 5000)
    return np.unique(few) if case["gated"] else np.arange(total)


def told(case: Case, path: list[oracle.Tensors]) -> Any:
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
    before = [oracle.start(case)]

    def gradients(at: oracle.Tensors, number: int) -> oracle.Tensors:
        before.append(at)
        return oracle.loss_and_gradients(case, before[-2], 0, number)[1]

    return told(case, [oracle.start(case), *oracle.trajectory(case, case["steps"] - 1, gradients)])


@oracle.remembered
def last_as_it_was(case: Case) -> Any:
    last = len(oracle.sizes(case)) - 2
    return after_steps()({**case, "frozen": [*case["frozen"], last, last + 1]})


WEIGHTS: Wrong = {
    "nothing happened": lambda case: told(case, [oracle.start(case)] * case["steps"]),
    "a layer of a class of its own": last_as_it_was,
    "gradients add up": after_steps(summed=True),
    "optimizer made anew": after_steps(fresh=True),
    "a step late": late,
    "a frozen parameter": only_if("none frozen"),
    "a layer that is used twice": only_if("each used once"),
}
HELD = {
    "gradients kept": GRADIENTS_KEPT,
    "no moments": is_held(lambda rest, peak: rest < 11),
    "something else kept": is_held(lambda rest, peak: rest > 12.5),
    "held from step to step": is_held(lambda rest, peak: rest > 12.5),
    "all gradients at once": is_held(lambda rest, peak: peak > 15.5),
    "many gradients at once": NOTHING_ELSE,
}
ORDINARY = "the weights after all steps are those of an ordinary AdamW"
held = partial(keeps, least=per(11), wrong=HELD, early=showed("between steps"))

EXERCISE = Exercise(
    id="memory.6", function=FUNCTION, title="Gradients that never meet", harness="memory.update_in_backward",
    draw=draw, handed_out=handed_out,
    checks=(
        own_work(FUNCTION),
        values(4, "weights", ORDINARY, after_steps(), of="weights", rtol=1e-5, atol=ATOL, names=names, wrong=WEIGHTS),
        held(2, "at rest", "what is held between steps", at_rest, per(12, ROOM), "held between steps"),
        held(3, "peak", "the most that is held during backward", Seen.peak, per(12, FEW + ROOM), "at the peak"),
    ),
)  # fmt: skip
