"""The theory of activations.5: a step through layers with dropout, in numpy, and what it holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dtlib.grading import inputs, oracle
from dtlib.grading.seen import Case

ROOM = 6 * 2**20  # what libraries keep
_THROWN = 4  # that others throw after either half


def places(case: Case) -> Any:
    """The entries of the result and of the input's gradient that are asked for: all, or of many a few."""
    size = case["tokens"] * case["width"]
    return np.random.default_rng(case["seed"]).integers(0, size, 500) if case["weighed"] else np.arange(size)


def start_and_upstream(case: Case) -> list[Any]:
    """The input, and what arrives at the result in backward."""
    return [inputs.noise(case, name, (case["tokens"], case["width"])) for name in ("x", "upstream")]


def weights(case: Case, number: int) -> list[Any]:
    """Those of a layer, in double precision."""
    return [each.astype(np.float64) for each in inputs.layer(case, number)]


@oracle.remembered
def dice(case: Case) -> tuple[Any, Any]:
    """What torch's generator makes each layer keep of [tokens, hidden], and what others throw after either half."""
    generator = np.random.MT19937()
    generator._legacy_seeding(case["dice"])  # type: ignore[attr-defined]  # it seeds as torch does
    shape = (case["layers"], case["tokens"], case["hidden"]) if case["dropout"] else (0,)
    drawn = (generator.random_raw(int(np.prod(shape)) + 2 * _THROWN) % 2**24 / 2**24).astype(np.float32)
    kept = (drawn[: -2 * _THROWN].reshape(shape) >= case["dropout"]) / (1 - case["dropout"])
    return kept if case["dropout"] else [1.0] * case["layers"], list(drawn[-2 * _THROWN :].reshape(2, _THROWN))


def step(case: Case, *, arrives: bool = True) -> list[Any]:
    """The result, the gradients of the input and of all weights; where what `arrives` is ignored, with ones for it."""
    at, width, keys = places(case), case["width"], inputs.layer_keys(case)
    rows, row = np.unique(at // width, return_inverse=True)  # a layer treats each token by itself
    x, back = (each[rows].astype(np.float64) for each in start_and_upstream(case))
    y = x if case["leaf"] else np.tanh(x)
    passed, of_weights = list[Any](), list[Any]()
    for number, kept in enumerate(dice(case)[0]):
        first, bias, second, other = own = weights(case, number)
        inside = np.tanh(y @ first.T + bias)
        passed.append((number, kept, own, y, inside))
        out = (inside * kept @ second.T + other) * keys[f"layer {number}"]
        y = out + y if case["residual"] else out
    for number, kept, (first, _, second, _), before, inside in reversed(passed):
        to_out = (back if arrives else 1.0) * np.ones_like(back) * keys[f"back {number}"]
        to_inside = to_out @ second * kept * (1 - inside**2)
        matrices = [to_inside.T @ before, to_inside.sum(0), to_out.T @ (inside * kept), to_out.sum(0)]
        of_weights = [*matrices, *of_weights]
        back = to_inside @ first + (back if case["residual"] else 0)
    back = back if case["leaf"] else back * (1 - np.tanh(x) ** 2)
    return [y[row, at % width], back[row, at % width], *([] if case["weighed"] else of_weights)]


right = oracle.remembered(step)


def results(case: Case, *, arrives: bool = True) -> Any:
    """The result, the gradients of the input and of all weights, and with dropout the dice that others throw."""
    return [[*(right(case) if arrives else step(case, arrives=False)), *(dice(case)[1] if case["dropout"] else ())]]


def names(case: Case) -> list[str]:
    """What they are called."""
    parts = ("first matrix", "first bias", "second matrix", "second bias")
    of = [] if case["weighed"] else [f"the {part} of layer {n + 1}" for n in range(case["layers"]) for part in parts]
    dice = ["dice thrown after forward", "dice thrown after backward"] if case["dropout"] else []
    return ["result", *(f"gradient of {each}" for each in ("the input", *of)), *dice]


def alive(*, inputs: int = 1, inside: int = 0, room: float = ROOM) -> Callable[[Case, int], float]:
    """Between forward and backward: weights, the input, the result, and so often each layer's input and its inside."""

    def most(case: Case, rank: int) -> float:
        one, layers = case["tokens"] * case["width"], case["layers"]
        tensors = one * (2 + layers * inputs) + layers * inside * case["tokens"] * case["hidden"]
        return oracle.FLOAT_BYTES * (tensors + _num_weights(case)) + room

    return most


def left(case: Case, rank: int) -> float:
    """After the step: the input, the weights, their gradients, and some room."""
    return 2 * oracle.FLOAT_BYTES * (case["tokens"] * case["width"] + _num_weights(case)) + ROOM


def _num_weights(case: Case) -> int:
    width, hidden = case["width"], case["hidden"]
    return int(case["layers"] * (2 * width * hidden + width + hidden))
