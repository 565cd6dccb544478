"""activations.5: a checkpoint of one's own, of layers that ask the desk for a key when they run and on the way back."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from dtlib.grading.exercises import inputs, oracle
from dtlib.grading.exercises.compare import close
from dtlib.grading.exercises.exercise import Exercise, Finding
from dtlib.grading.exercises.kinds import ROOM, held_at, keeps, order, own_work, showed, values
from dtlib.grading.exercises.seen import Case, Observed
from dtlib.grading.exercises.signs import Sign, Wrong, every, only_if, raised

FUNCTION = "checkpoint"
THROWN = 4  # dice, by others after either half
TOLERANCE = 1e-4  # of float32, on numbers around 1; a known mistake is off by far more


def draw(rng: inputs.Rng) -> inputs.Cases:
    """A leaf and a result, used by others too or not, weights with gradients and without, layers in a row and side by
    side, a layer that is used twice; dropout, of units so few that a result tells which; large."""

    def case(num_layers: int, dropout: float, words: str, **more: Any) -> dict[str, Any]:
        ranges = {"tokens": (5, 12), "width": (24, 40), "hidden": (12, 20) if num_layers == 1 else (50, 90)}
        ranges |= dict.fromkeys(("seed", "weights_seed", "dice"), (0, 2**31))
        drawn: dict[str, Any] = {name: int(rng.integers(*bounds)) for name, bounds in ranges.items()}
        drawn |= dict.fromkeys(("leaf", "residual", "apart", "earlier", "weighed"), False)
        drawn |= {"layers": num_layers, "own": num_layers, "dropout": dropout} | more
        told = f"{num_layers} layer{'s' * (num_layers > 1)}, {words}" + (f", dropout {dropout}" if dropout else "")
        uses = num_layers // drawn["own"]
        where = {"dropout": bool(dropout), "one layer": num_layers == 1, "in a row": not drawn["apart"]}
        where |= {"no gradients yet": uses == 1 and not drawn["earlier"]}
        return drawn | {"uses": uses, "words": told, "is": where}

    return [
        case(1, 0.0, "x a leaf", leaf=True),
        case(3, 0.0, "x the result of an operation"),
        case(2, 0.0, "x used by others too", residual=True),
        case(3, 0.0, "weights that have gradients already", earlier=True),
        case(2, 0.0, "both of x, the first goes back first", leaf=True, apart=True),
        case(3, 0.0, "one and the same, x the result of an operation", own=1),
        case(2, 0.0, "one and the same, of x and of -x, the first goes back first", own=1, leaf=True, apart=True),
        case(1, 0.3, "x a leaf that others use too", leaf=True, residual=True),
        case(3, 0.5, "x the result of an operation"),
        # A layer's result is nobody's input here, as it is added to x: who keeps it keeps a tensor more.
        case(2, 0.0, "large, x used by others too", weighed=True, residual=True, tokens=10240, width=256, hidden=512),
    ]


def handed_out(case: Case, rank: int) -> inputs.Pieces:
    """What to make the step of, and which entries of its result and of the input's gradient are asked for."""
    start = {name: value for name, value in case.items() if name not in ("words", "is", "seed")}
    return [("start", start), ("between", places(case)), ("after", None)]


def places(case: Case) -> Any:
    """The entries of the result and of the input's gradient that are asked for: all, or of many a few."""
    size = case["tokens"] * case["width"]
    return np.random.default_rng(case["seed"]).integers(0, size, 500) if case["weighed"] else np.arange(size)


def start_and_upstream(case: Case) -> list[Any]:
    """The input, and what arrives at the result in backward."""
    return [inputs.noise(case, name, (case["tokens"], case["width"])) for name in ("x", "upstream")]


def weights(case: Case, number: int) -> list[Any]:
    return [each.astype(np.float64) for each in inputs.layer(case, number)]


@oracle.remembered
def dice(case: Case) -> tuple[Any, Any]:
    """What torch's generator makes each layer keep of [tokens, hidden], and what others throw after either half."""
    generator = np.random.MT19937()
    generator._legacy_seeding(case["dice"])  # type: ignore[attr-defined]  # it seeds as torch does
    shape = (case["layers"], case["tokens"], case["hidden"]) if case["dropout"] else (0,)
    drawn = (generator.random_raw(int(np.prod(shape)) + 2 * THROWN) % 2**24 / 2**24).astype(np.float32)
    kept = (drawn[: -2 * THROWN].reshape(shape) >= case["dropout"]) / (1 - case["dropout"])
    return kept if case["dropout"] else [1.0] * case["layers"], list(drawn[-2 * THROWN :].reshape(2, THROWN))


def step(case: Case, *, arrives: bool = True) -> list[Any]:
    """The result, the gradients of the input and of all weights; where what `arrives` is ignored, with ones for it."""
    at, width, keys = places(case), case["width"], inputs.layer_keys(case)
    rows, row = np.unique(at // width, return_inverse=True)  # a layer treats each token by itself
    x, back = (each[rows].astype(np.float64) for each in start_and_upstream(case))
    y = x if case["leaf"] else np.tanh(x)
    result, to_x, passed, of_weights = y, np.zeros(()), list[Any](), list[Any]()
    for number, kept in enumerate(dice(case)[0]):
        first, bias, second, other = own = weights(case, which := number % case["own"])
        sign = -1 if case["apart"] and number > which else 1
        inside = np.tanh(sign * y @ first.T + bias)
        passed.append((number, which, sign, kept, own, sign * y, inside))
        out = (inside * kept @ second.T + other) * keys[f"layer {which}"]
        result = out + (result if case["residual"] or (case["apart"] and number) else 0)
        y = y if case["apart"] else result
    for number, which, sign, kept, own, before, inside in reversed(passed):
        first, _, second, _ = own
        arrived = back * (number + 1 if case["apart"] else 1) if arrives else np.ones_like(back)
        to_out = arrived * keys[f"back {which}"]
        to_inside = to_out @ second * kept * (1 - inside**2)
        matrices = [to_inside.T @ before, to_inside.sum(0), to_out.T @ (inside * kept), to_out.sum(0)]
        of_weights = [*(one + case["earlier"] * own[part] for part, one in enumerate(matrices)), *of_weights]
        to_x = sign * to_inside @ first + (back if case["residual"] else to_x if case["apart"] else 0)
        back = back if case["apart"] else to_x
    back = to_x if case["leaf"] else to_x * (1 - np.tanh(x) ** 2)
    of_weights = [sum(of_weights[part :: 4 * case["own"]]) for part in range(4 * case["own"])]
    return [result[row, at % width], back[row, at % width], *([] if case["weighed"] else of_weights)]


right = oracle.remembered(step)


def results(case: Case, *, arrives: bool = True) -> Any:
    """The result, the gradients of the input and of all weights, and with dropout the dice that others throw."""
    return [[*(right(case) if arrives else step(case, arrives=False)), *(dice(case)[1] if case["dropout"] else ())]]


def names(case: Case) -> list[str]:
    parts = ("first matrix", "first bias", "second matrix", "second bias")
    of = [] if case["weighed"] else [f"the {part} of layer {n + 1}" for n in range(case["own"]) for part in parts]
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


def told(each: Observed) -> Any:
    """The result, the gradients, and with dropout the dice that others throw."""
    return [[*said["results"], *(said["dice"] if each.case["dropout"] else ())] for said in each.said]


def same(each: Observed, part: slice) -> bool:
    return bool(close(each.said[0]["results"][part], right(each.case)[part], TOLERANCE, TOLERANCE))


def input_alone_is_off(each: Observed) -> bool:
    """Whether all is right but the gradient of the input, and it has one."""
    return same(each, slice(1)) and same(each, slice(2, None)) and each.said[0]["results"][1] is not None


def input_alone_is_served(each: Observed) -> bool:
    """Whether no weight has a gradient, and the input has; where they had some before, this says nothing."""
    _, of_input, *of_weights = each.said[0]["results"]
    return each.case["earlier"] or (of_input is not None and all(one is None for one in of_weights))


def dropped_others(*, in_forward: bool) -> Sign:
    """A single layer dropped other units than the generator says: so few that its result or gradient tells which."""

    def does(each: Observed) -> bool:
        case = each.case
        if not each.has_come or not case["is"]["one layer"] or same(each, slice(1)) == in_forward:
            return False
        (first, bias, second, other), keys = weights(case, 0), inputs.layer_keys(case)
        (x, upstream), results = start_and_upstream(case), each.said[0]["results"]
        if in_forward:
            out = (results[0].reshape(x.shape) - x) / keys["layer 0"] - other
            found = np.linalg.lstsq(second, out.T, rcond=None)[0].T
        else:
            found = np.linalg.lstsq((upstream * keys["back 0"]).T, results[4], rcond=None)[0]
        found = found / np.tanh(x @ first.T + bias) * (1 - case["dropout"])
        kept = np.round(found)
        is_dropout = bool(np.isin(kept, (0, 1)).all() and np.abs(found - kept).max() < 0.05)
        return is_dropout and not np.array_equal(kept, dice(case)[0][0] > 0)

    return Sign(lambda failing, passing: any(map(does, failing)))


def calls(each: Observed) -> list[list[int]]:
    """How often each layer ran in forward and in backward, and how often a gradient came back to it."""
    labels, numbers = [ask.label for ask in each.seen.asks], range(each.case["own"])
    half = labels.index("between")
    runs = [[part.count(f"layer {number}") for number in numbers] for part in (labels[:half], labels[half:])]
    return [*runs, [labels.count(f"back {number}") for number in numbers]]


def find_again(each: Observed) -> Finding | None:
    return None if any(calls(each)[1]) else Finding("no call of a layer during backward", "one of each", each.words)


def find_calls(each: Observed) -> Finding | None:
    """That each layer ran once a use in either half, and was gone back through once, to the right result."""
    ways = ("calls of layer {} during forward", "calls of layer {} during backward", "ways back through layer {}")
    for way, counts in zip(ways, calls(each), strict=True):
        for number, count in enumerate(counts, 1):
            if count != each.case["uses"]:
                return Finding(f"{count} {way.format(number)}", str(each.case["uses"]), each.words)
    return None if same(each, slice(1)) else Finding("another result", "that of the calls of the layers", each.words)


GRADIENTS: Wrong = {
    "recomputed without a graph": raised("does not require grad"),
    "walks on beyond the layer": (raised("second time"), every(input_alone_is_off)),
    "weights without a gradient": every(input_alone_is_served),
    "what arrives is ignored": (raised("implicitly created only for scalar"), partial(results, arrives=False)),
    "one memory for all layers": (only_if("one layer"), only_if("in a row")),
    "one memory for a function": Sign(lambda failing, _: all(each.case["uses"] > 1 for each in failing)),
    "earlier gradients are gone": only_if("no gradients yet"),
}
DICE = {
    "loaded dice": dropped_others(in_forward=True),
    "other dice the second time": dropped_others(in_forward=False),
    "dice not put back": every(lambda each: same(each, slice(None))),
}
AGAIN = {"not computed again": every(lambda each: not any(calls(each)[1]))}
CALLS = {
    "twice forward": every(lambda each: max(calls(each)[0]) > each.case["uses"]),
    "computed again more than once": every(lambda each: max(calls(each)[1]) > each.case["uses"]),
    "two backward passes": every(lambda each: max(calls(each)[2]) > each.case["uses"]),
}

KEPT = "between forward and backward nothing is alive but the layers' inputs, and nothing outlives the step"
ALL = "the result and all gradients are those of `fn(x)`"
ONCE = "each layer runs once forward and once in backward, and is gone back through once"
DICE_TOO = "with dropout too, and the random numbers after the step are those of a step without checkpoints"

compared = partial(values, right=results, of=told, names=names, rtol=TOLERANCE, atol=TOLERANCE)
kept = partial(keeps, 2, "kept", KEPT)
between = kept(
    held_at("between"),
    alive(),
    "held between forward and backward, what the step itself has among them",
    least=alive(room=-ROOM),
    wrong={
        "one tensor a layer too many": (alive(), alive(inputs=2)),
        "everything kept": (alive(inside=1, room=0), None),
    },
    early=showed("between"),
)
LEFT = "held after the step, the weights and all gradients among them"
after = kept(held_at("after"), left, LEFT, wrong={"never let go": (left, None)})

EXERCISE = Exercise(
    id="activations.5", function=FUNCTION, title="Keep the input, compute the rest again",
    harness="activations.checkpoint", draw=draw, handed_out=handed_out,
    named=lambda case, rank: inputs.layer_keys(case),
    checks=(
        own_work(FUNCTION, built_in=True),
        order(0, "again", "layers run a second time", find_again, wrong=AGAIN, gate=True),
        compared(3, "gradient", ALL, wrong=GRADIENTS, where="not dropout", kind="gradient"),
        replace(between, inspect=lambda each: between.inspect(each) or after.inspect(each),
                mistakes=(*between.mistakes, *after.mistakes)),
        order(2, "recompute", ONCE, find_calls, wrong=CALLS, where="not dropout"),
        compared(2, "dice", DICE_TOO, wrong=DICE, where="dropout", kind="gradient"),
    ),
)  # fmt: skip
