"""pp.5: a backward pass in two parts: first the gradient of the input, later those of the weights."""

from collections.abc import Callable
from typing import Any

import numpy as np

from dtlib.grading.exercises.exercise import Exercise, Finding
from dtlib.grading.exercises.inputs import Case, Cases, Pieces, Rng, noise
from dtlib.grading.exercises.kinds import order, own_work, values
from dtlib.grading.exercises.seen import Observed
from dtlib.grading.exercises.signs import Sign, Wrong, only_if, some_rank

RTOL, ATOL = 1e-4, 1e-5  # float32


def draw(rng: Rng) -> Cases:
    """One layer and several, one micro-batch under way and several."""
    cases = []
    for layers, under_way in ((1, 1), (2, 1), (3, 1), (1, 3), (2, 2), (4, 3)):
        rows, width = int(rng.integers(3, 9)), int(rng.integers(4, 12))
        words = f"{layers} layer{'s' * (layers > 1)} of width {width}, {under_way} micro-batch"
        words += f"{'es' * (under_way > 1)} of {rows} rows under way"
        sizes = {"layers": layers, "under_way": under_way, "rows": rows, "width": width}
        seeds = {name: int(rng.integers(2**31)) for name in ("seed", "weights_seed")}
        cases.append({**sizes, **seeds, "words": words, "is": {"one under way": under_way == 1}})
    return cases


def weights(case: Case) -> list[Any]:
    shape = (case["width"], case["width"])
    return [noise(case, f"weight {k}", shape, (3 / shape[0]) ** 0.5) for k in range(case["layers"])]


def batch(case: Case, name: str, i: int) -> Any:
    return noise({"weights_seed": case["seed"]}, f"{name} {i}", (case["rows"], case["width"]), 1.5)


def handed_out(case: Case, rank: int) -> Pieces:
    """Weights and inputs; the gradients of the outputs when all forward passes are done."""
    batches = range(case["under_way"])
    return [
        ("start", {"weights": weights(case), "inputs": [batch(case, "x", i) for i in batches]}),
        ("gradients", [batch(case, "g", i) for i in batches]),
    ]


def outputs(case: Case) -> list[Any]:
    """What each micro-batch comes to: the input of each layer, and the output."""
    found = []
    for i in range(case["under_way"]):
        passed = [batch(case, "x", i)]
        for weight in weights(case):
            passed.append(np.tanh(passed[-1] @ weight.T))
        found.append(passed)
    return found


def gradients(
    case: Case, *, derived: bool = True, turned: bool = True, before: bool = True
) -> tuple[list[Any], list[Any]]:
    """By micro-batch the gradients of the inputs, and those of the weights: of products, so `before` the tanh."""
    to_x, to_weights = [], []
    for i, passed in enumerate(outputs(case)):
        gradient = batch(case, "g", i)
        own: list[Any] = []
        for weight, x, y in reversed(list(zip(weights(case), passed[:-1], passed[1:], strict=True))):
            of_product = gradient * (1 - y**2) if derived else gradient
            own.insert(0, (of_product if before else gradient).T @ x)
            gradient = of_product @ (weight if turned else weight.T)
        to_x.append(gradient)
        to_weights.append(own)
    return to_x, to_weights


def of_inputs(**how: bool) -> Any:
    return lambda case: [gradients(case, **how)[0]]


def of_weights(**how: bool) -> Any:
    return lambda case: [gradients(case, **how)[1]]


def products(said: Any, case: Case) -> dict[str, float]:
    """Of each part the operations of its products, over what it must make."""
    wanted = 2 * case["rows"] * case["width"] ** 2 * case["layers"] * case["under_way"]
    return {part: said["operations"][part] / wanted for part in ("forward", "first half", "second half")}


def find_products(observed: Observed) -> Finding | None:
    """That a half makes more products of matrices than it must."""
    for part, times in products(observed.said[0], observed.case).items():
        if times > 1:
            return Finding(f"{times:.2f} times the products in the {part}", "once", observed.words)
    return None


def where(holds: Callable[[dict[str, float]], bool]) -> Sign:
    return some_rank(lambda said, case: holds(products(said, case)))


WRONG: Wrong = {
    "all at once": where(lambda times: times["first half"] > 1 and not times["second half"]),
    "the chain again": where(lambda times: times["first half"] <= 1 < times["second half"]),
    "forward again": where(lambda times: times["first half"] > 1 and times["second half"] > 0),
}

EXERCISE = Exercise(
    id="pp.5", function="split_backward", title="A backward pass in two halves", harness="pp.split", draw=draw,
    handed_out=handed_out,
    checks=(
        own_work("split_backward", built_in=True),
        order(0, "products", "each half makes its own products, and none twice", find_products, wrong=WRONG, gate=True,
              is_told=True),
        values(2, "outputs", "the outputs", lambda case: [[each[-1] for each in outputs(case)]], of="outputs",
               rtol=RTOL, atol=ATOL),
        values(3, "inputs", "the gradients of the inputs", of_inputs(), of="inputs", rtol=RTOL, atol=ATOL,
               wrong={"tanh not differentiated": of_inputs(derived=False), "weights turned": of_inputs(turned=False),
                      "the last one alone": only_if("one under way")}),
        values(3, "weights", "the gradients of the weights", of_weights(), of="weights", rtol=RTOL, atol=ATOL,
               wrong={"tanh not differentiated": (of_weights(derived=False), of_weights(before=False)),
                      "the last layer first": lambda case: [[each[::-1] for each in gradients(case)[1]]],
                      "the last one alone": only_if("one under way")}),
    ),
)  # fmt: skip
