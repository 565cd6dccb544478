"""activations.5: a checkpoint of one's own, of layers that ask the desk for a key when they run and on the way back."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from dtlib.grading import inputs
from dtlib.grading.exercise import Exercise
from dtlib.grading.kinds import keeps, order, own_work, values
from dtlib.grading.seen import Case

from . import _layers as layers
from ._checkpointed import AGAIN, CALLS, DICE, GRADIENTS, TOLERANCE, find_again, find_calls, told

FUNCTION = "checkpoint"


def draw(rng: np.random.Generator) -> list[dict[str, Any]]:
    """A leaf and the result of another operation, used by others too or not; dropout; and layers so large that what is
    kept of them can be weighed. Where a single layer drops units, there are so few that the result tells which."""

    def case(num_layers: int, dropout: float, words: str, **more: Any) -> dict[str, Any]:
        drawn = {
            "layers": num_layers,
            "dropout": dropout,
            "tokens": int(rng.integers(5, 12)),
            "width": int(rng.integers(24, 40)),
            "hidden": int(rng.integers(12, 20) if num_layers == 1 else rng.integers(50, 90)),
            "seed": int(rng.integers(0, 2**31)),
            "dice": int(rng.integers(0, 2**31)),
        }
        told = f"{num_layers} layer{'s' * (num_layers > 1)}, {words}" + (f", dropout {dropout}" if dropout else "")
        where = {"dropout": bool(dropout), "one layer": num_layers == 1}
        return {"leaf": False, "residual": False, "weighed": False, **drawn, **more, "words": told, "is": where}

    return [
        case(1, 0.0, "x a leaf", leaf=True),
        case(3, 0.0, "x the result of an operation"),
        case(2, 0.0, "x used by others too", residual=True),
        case(1, 0.3, "x a leaf that others use too", leaf=True, residual=True),
        case(3, 0.5, "x the result of an operation"),
        case(2, 0.0, "large", weighed=True, tokens=10240, width=256, hidden=512),
    ]


def handed_out(case: Case, rank: int) -> inputs.Pieces:
    """What to make the step of, and which entries of its result and of the input's gradient are asked for."""
    start = {name: value for name, value in case.items() if name not in ("words", "is")}
    return [("start", start), ("between", layers.places(case)), ("after", None)]


ONCE = "each layer runs once forward and once in backward, and is gone back through once"
compared = partial(
    values,
    right=layers.results,
    of=told,
    names=layers.names,
    kind="gradient",
    rtol=TOLERANCE,
    atol=TOLERANCE,
)
between = keeps(
    2,
    "kept",
    "between forward and backward nothing is alive but the layers' inputs, and nothing outlives the step",
    lambda seen, rank: seen.held(rank, "between"),
    layers.alive(),
    "held between forward and backward, what the step itself has among them",
    least=layers.alive(room=-layers.ROOM),
    wrong={
        "copies of the inputs": (layers.alive(), layers.alive(inputs=2)),
        "everything kept": (layers.alive(inside=1, room=0), None),
    },
)
after = keeps(
    2,
    "kept",
    "",
    lambda seen, rank: seen.held(rank, "after"),
    layers.left,
    "held after the step, the weights and all gradients among them",
    wrong={"never let go": (layers.left, None)},
)

EXERCISE = Exercise(
    id="activations.5",
    function=FUNCTION,
    title="Keep the input, compute the rest again",
    harness="activations.checkpoint",
    draw=draw,
    handed_out=handed_out,
    named=lambda case, rank: inputs.layer_keys(case),
    checks=(
        own_work(FUNCTION, built_in=True),
        order(0, "again", "layers run a second time", find_again, wrong=AGAIN, gate=True),
        compared(
            3, "gradient", "the result and all gradients are those of `fn(x)`", wrong=GRADIENTS, where="not dropout"
        ),
        replace(
            between,
            inspect=lambda each: between.inspect(each) or after.inspect(each),
            mistakes=(*between.mistakes, *after.mistakes),
        ),
        order(2, "recompute", ONCE, find_calls, wrong=CALLS, where="not dropout"),
        compared(
            2,
            "dice",
            "with dropout too, and the random numbers after the step are those of a step without checkpoints",
            wrong=DICE,
            where="dropout",
        ),
    ),
)
