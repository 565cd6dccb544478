"""activations.4: a gated activation that keeps its two inputs and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from dtlib.grading import inputs, oracle
from dtlib.grading.compare import close
from dtlib.grading.exercise import Exercise
from dtlib.grading.kinds import every, keeps, own_work, raised, values
from dtlib.grading.seen import Case, Observed

from ._gate import WRONG_GRADIENTS, WRONG_OUTPUTS, output, places, right

FUNCTION = "swiglu"
ROOM = 6 * 2**20  # what libraries keep
RTOL, ATOL = 1e-4, 1e-5  # a few roundings of fp32 on numbers around 1; bf16 rounds by 4e-3
SHAPES = ((13, 18), (7,), (), (3, 5, 8), (2, 1, 3, 2, 4))
HALVES = ((9, 24), (4, 3, 10))
LARGE = (1024, 4096)


def draw(rng: np.random.Generator) -> list[dict[str, Any]]:
    """Tensors of several shapes, and halves of one; both once more so large that what is kept can be weighed."""
    small = [(False, shape) for shape in SHAPES] + [(True, shape) for shape in HALVES]
    cases = []
    for fused, shape in [*small, (False, LARGE), (True, LARGE)]:
        words = f"two tensors of {'×'.join(map(str, shape)) or 'one entry'}" + (", halves of one" if fused else "")
        seed = int(rng.integers(0, 2**31))
        cases.append({"shape": list(shape), "fused": fused, "weighed": shape == LARGE, "seed": seed, "words": words})
    return cases


def handed_out(case: Case, rank: int) -> inputs.Pieces:
    """What to make the tensors of, and which of their entries are asked for."""
    start = {name: case[name] for name in ("shape", "fused", "seed")}
    return [("start", start), ("between", places(case)), ("after", None)]


def is_rounded(each: Observed) -> bool:
    """Off by no more than bf16 or fp16 rounds, and by more than fp32 does."""
    return close(each.said[0]["gradients"], right(each.case)[0], 0.03, 0.1)


def is_not_finite(each: Observed) -> bool:
    """Whether a gradient has entries that are no numbers."""
    return any(one is not None and not np.isfinite(one).all() for one in each.said[0]["gradients"])


def lacks_one(each: Observed) -> bool:
    """Whether an input has no gradient, or as a half of a larger tensor one of zeros."""
    return any(one is None or not np.any(one) for one in each.said[0]["gradients"])


def tensors_of(number: float) -> Callable[[Case, int], float]:
    """So many bytes as that number of tensors has, and some room."""
    return lambda case, rank: oracle.FLOAT_BYTES * number * int(np.prod(case["shape"])) + ROOM


MINE = 3  # between forward and backward the harness has two inputs and the result; afterwards two gradients as well

EXERCISE = Exercise(
    id="activations.4",
    function=FUNCTION,
    title="A gate that keeps less",
    harness="activations.gated",
    draw=draw,
    handed_out=handed_out,
    checks=(
        own_work(FUNCTION, built_in=True),
        values(1, "value", "`gate·σ(gate)·up`", output, of="output", wrong=WRONG_OUTPUTS, rtol=RTOL, atol=ATOL),
        values(
            2,
            "gradient",
            "both gradients in full precision, where the gate is 0 or far from it as well",
            right,
            of="gradients",
            kind="gradient",
            rtol=RTOL,
            atol=ATOL,
            names=lambda case: ["gate", "up"],
            wrong={
                "divided to get it back": every(is_not_finite),
                **WRONG_GRADIENTS,
                "rounded to save bytes": every(is_rounded),
                "no gradient": (raised("does not require grad"), every(lacks_one)),
            },
        ),
        replace(
            keeps(
                2,
                "kept",
                "two tensors kept between forward and backward",
                lambda seen, rank: seen.held(rank, "between"),
                tensors_of(MINE + 2),
                "held between forward and backward, the inputs and the result among them",
                wrong={
                    "as autograd keeps it": (tensors_of(MINE + 2.5), tensors_of(MINE + 3)),
                    "every intermediate result": (tensors_of(MINE + 3), None),
                },
            ),
            gate=True,
        ),
        keeps(
            1,
            "let go",
            "nothing but the gradients outlives the step",
            lambda seen, rank: seen.held(rank, "after"),
            tensors_of(MINE + 1),
            "held after the step, the inputs and their gradients among them",
            wrong={"never let go": (tensors_of(MINE + 1), None)},
        ),
    ),
)
