"""What came back in activations.5, and what the desk saw of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from dtlib.grading import inputs
from dtlib.grading.compare import close
from dtlib.grading.exercise import Finding
from dtlib.grading.kinds import Sign, every, only_if, raised
from dtlib.grading.seen import Observed

from . import _layers as layers

TOLERANCE = 1e-4  # of float32, on numbers around 1; a known mistake is off by far more


def told(each: Observed) -> Any:
    """The result, the gradients, and with dropout the dice that others throw."""
    return [[*said["results"], *(said["dice"] if each.case["dropout"] else ())] for said in each.said]


def same(each: Observed, part: slice) -> bool:
    """Whether a part of the results is right."""
    return bool(close(each.said[0]["results"][part], layers.right(each.case)[part], TOLERANCE, TOLERANCE))


def input_alone_is_off(each: Observed) -> bool:
    """Whether all is right but the gradient of the input, and it has one."""
    return same(each, slice(1)) and same(each, slice(2, None)) and each.said[0]["results"][1] is not None


def input_alone_is_served(each: Observed) -> bool:
    """Whether no weight has a gradient, and the input has."""
    _, of_input, *of_weights = each.said[0]["results"]
    return of_input is not None and all(one is None for one in of_weights)


def dropped_others(*, in_forward: bool) -> Sign:
    """Other units were dropped than the generator says, in forward or in backward alone.

    What a single layer dropped is told by its result, or by the gradient of its second matrix: few units, and each
    equation has one solution.
    """

    def does(each: Observed) -> bool:
        case = each.case
        if not each.has_come or not case["is"]["one layer"] or same(each, slice(1)) == in_forward:
            return False
        (first, bias, second, other), keys = layers.weights(case, 0), inputs.layer_keys(case)
        (x, upstream), results = layers.start_and_upstream(case), each.said[0]["results"]
        if in_forward:
            found = np.linalg.lstsq(
                second, ((results[0].reshape(x.shape) - x) / keys["layer 0"] - other).T, rcond=None
            )[0].T
        else:
            found = np.linalg.lstsq((upstream * keys["back 0"]).T, results[4], rcond=None)[0]
        found = found / np.tanh(x @ first.T + bias) * (1 - case["dropout"])
        kept = np.round(found)
        is_dropout = bool(np.isin(kept, (0, 1)).all() and np.abs(found - kept).max() < 0.05)
        return is_dropout and not np.array_equal(kept, layers.dice(case)[0][0] > 0)

    return Sign(lambda failing, passing: any(map(does, failing)))


def calls(each: Observed) -> list[list[int]]:
    """How often each layer ran in forward and in backward, and how often a gradient came back to it."""
    labels, numbers = [ask.label for ask in each.seen.asks], range(each.case["layers"])
    half = labels.index("between")
    runs = [[part.count(f"layer {number}") for number in numbers] for part in (labels[:half], labels[half:])]
    return [*runs, [labels.count(f"back {number}") for number in numbers]]


def find_again(each: Observed) -> Finding | None:
    """That a layer ran again."""
    return None if any(calls(each)[1]) else Finding("no call of a layer during backward", "one of each", each.words)


def find_calls(each: Observed) -> Finding | None:
    """That each layer ran once in either half, and was gone back through once, to the right result."""
    ways = ("calls of layer {} during forward", "calls of layer {} during backward", "ways back through layer {}")
    for way, counts in zip(ways, calls(each), strict=True):
        for number, count in enumerate(counts, 1):
            if count != 1:
                return Finding(f"{count} {way.format(number)}", "1", each.words)
    return None if same(each, slice(1)) else Finding("another result", "that of the calls of the layers", each.words)


GRADIENTS: dict[str, Any] = {
    "recomputed without a graph": raised("does not require grad"),
    "walks on beyond the layer": (raised("second time"), every(input_alone_is_off)),
    "weights without a gradient": every(input_alone_is_served),
    "what arrives is ignored": (raised("implicitly created only for scalar"), partial(layers.results, arrives=False)),
    "one memory for all layers": only_if("one layer"),
}
DICE = {
    "loaded dice": dropped_others(in_forward=True),
    "other dice the second time": dropped_others(in_forward=False),
    "dice not put back": every(lambda each: same(each, slice(None))),
}
AGAIN = {"not computed again": every(lambda each: not any(calls(each)[1]))}
CALLS = {
    "twice forward": every(lambda each: max(calls(each)[0]) > 1),
    "computed again more than once": every(lambda each: max(calls(each)[1]) > 1),
    "two backward passes": every(lambda each: max(calls(each)[2]) > 1),
}
