"""memory.5: bf16 weights with an fp32 master copy. The desk gives each parameter its gradient at each step."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from dtlib.grading import inputs, oracle
from dtlib.grading.exercise import Check, Exercise
from dtlib.grading.kinds import every, keeps, own_work, values
from dtlib.grading.seen import Case, Observed, Seen

from ._bits import rounded
from ._given import course, follows, stand_still
from ._weighed import GRADIENTS_KEPT, ROOM, at_rest, is_held, of_weighed, per

FUNCTION = "with_master_copy"
WIDTH = 1024  # of a layer that is weighed
TEMPORARY = 2 * 4 * WIDTH**2  # of Adam, for one parameter after the other


def draw(rng: np.random.Generator) -> list[dict[str, Any]]:
    """Steps that every weight sees; small updates that all point the same way; so many weights that they weigh."""
    widths = [int(rng.integers(4, 9)), int(rng.integers(12, 20)), 7, 1]
    decay, rate = round(float(rng.uniform(0.02, 0.1)), 2), round(float(rng.uniform(0.02, 0.05)), 3)
    small = round(float(rng.uniform(3e-4, 6e-4)), 6)  # below half of what is between two numbers of bf16 above 0.5
    return [
        case(rng, widths, 5, rate, decay),
        case(rng, [1, 250, 1], 24, small, 0.0, least=0.5),
        case(rng, [WIDTH] * 17, 2, 0.01, decay, weighed=True),
    ]


def case(
    rng: np.random.Generator, widths: list[int], steps: int, rate: float, decay: float, **more: Any
) -> dict[str, Any]:
    """One training; only what is told of weights from `least` on, and gradients are then positive."""
    least = more.get("least", 0.0)
    drawn = {
        "widths": widths,
        "optimizer": "adamw",
        "settings": {"lr": rate, "betas": [0.9, 0.99], "eps": 1e-3, "weight_decay": decay},
        "gradients": [[seed, 1 if least else -127] for seed in rng.integers(0, 2**31, steps).tolist()],
        "weights_seed": int(rng.integers(0, 2**31)),
        "least": least,
        "weighed": more.get("weighed", False),
        "is": {"small": bool(least)},
    }
    return drawn | {"words": f"{steps} steps, {sum(oracle.sizes(drawn)):,} parameters, learning rate {rate:g}"}


def handed_out(case: Case, rank: int) -> inputs.Pieces:
    """The network and the optimizer; for each step what makes the gradients, and then which weights to tell."""
    start = {name: case[name] for name in ("weights_seed", "widths", "optimizer", "settings")}
    pieces: inputs.Pieces = [("start", {**start, "steps": len(case["gradients"])})]
    for told in case["gradients"]:
        pieces += [("gradients", told), ("between steps", course(case)[0])]
    return pieces


def right(case: Case) -> Any:
    """The format of the weights, and the weights after each step."""
    return [[["bfloat16"], *(rounded(each) for each in course(case)[1])]]


IN_FP32 = every(lambda each: bool(each.said[0]["formats"] != ["bfloat16"]))
NO_COPY = is_held(lambda rest, peak: rest < 11 and peak < 12)
COURSES: dict[str, Any] = {
    "weights in fp32": IN_FP32,
    "never copied back": every(stand_still),
    "small updates lost": every(stand_still),
    "optimizer made anew": follows(fresh=True),
    "gradients add up": follows(summed=True),
    "copy of rounded weights": follows(begin=rounded),
    "no master copy": (follows(begin=rounded, rebuilt=True), of_weighed(NO_COPY)),
}
HELD = {
    "weights in fp32": IN_FP32,
    "no master copy": NO_COPY,
    "no moments": is_held(lambda rest, peak: rest < 11),
    "gradients kept": GRADIENTS_KEPT,
    "another copy in fp32": is_held(lambda rest, peak: 17.5 < rest < 18.5),
    "another copy in bf16": is_held(lambda rest, peak: 15.5 < rest < 16.5),
    "held from step to step": is_held(lambda rest, peak: rest > 15),
    "both copies of all gradients": is_held(lambda rest, peak: peak < 21.5),
}


def weights(name: str, description: str, where: str) -> Check:
    """The weights after each step."""

    def names(case: Case) -> list[str]:
        return ["formats", *(f"weights after step {step + 1}" for step in range(len(case["gradients"])))]

    def told(each: Observed) -> Any:
        return [[said["formats"], *said["weights"]] for said in each.said]

    return values(2, name, description, right, of=told, names=names, wrong=COURSES, where=where, rtol=0.0)


held = partial(keeps, least=per(13), wrong=HELD)

EXERCISE = Exercise(
    id="memory.5",
    function=FUNCTION,
    title="A step with a master copy",
    harness="memory.master_copy",
    draw=draw,
    handed_out=handed_out,
    named=lambda case, rank: {"optimizer step": None},
    checks=(
        own_work(FUNCTION),
        weights("weights", "the bf16 weights after each step", "not small"),
        weights("small updates", "updates too small for bf16", "small"),
        held(3, "at rest", "what is held between steps", at_rest, per(14, ROOM), "held between steps"),
        held(2, "peak", "the most that is held during a step", Seen.peak, per(18, TEMPORARY + ROOM), "at the peak"),
    ),
)
