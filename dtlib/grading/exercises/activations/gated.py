"""activations.4: a gated activation that keeps its two inputs and nothing else."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from dtlib.grading.exercises import inputs, oracle, signs
from dtlib.grading.exercises.exercise import Exercise
from dtlib.grading.exercises.kinds import ROOM, Ranges, held_at, keeps, own_work, showed, values
from dtlib.grading.exercises.seen import Case
from dtlib.grading.exercises.signs import Sign, Wrong, instead, raised, some_rank

FUNCTION = "swiglu"
RTOL, ATOL = 1e-4, 1e-5  # a few roundings of fp32 on numbers around 1; bf16 rounds by 4e-3
SHAPES = ((13, 18), (7,), (), (3, 5, 8), (2, 1, 3, 2, 4))
HALVES = ((9, 24), (4, 3, 10))
LARGE = (1024, 4096)


def draw(rng: inputs.Rng) -> inputs.Cases:
    """Tensors of several shapes, and halves of one; with others that use the gate or go back first, too; both once
    more so large that what is kept can be weighed."""
    small = [(False, shape, "") for shape in SHAPES] + [(True, shape, "") for shape in HALVES]
    used = [(False, SHAPES[0], words) for words in (", the gate used by others too", ", and exchanged")]
    cases = []
    for fused, shape, more in [*small, *used, (False, LARGE, ""), (True, LARGE, "")]:
        words = f"two tensors of {'×'.join(map(str, shape)) or 'one entry'}" + (", halves of one" if fused else "")
        own = {"shape": list(shape), "fused": fused, "weighed": shape == LARGE, "words": words + more}
        own |= {"residual": "others" in more, "twice": "exchanged" in more}
        own["is"] = {"one call": not own["twice"], "nobody else": not own["residual"]}
        cases.append(own | {name: int(rng.integers(0, 2**31)) for name in ("seed", "weights_seed")})
    return cases


def handed_out(case: Case, rank: int) -> inputs.Pieces:
    """What to make the tensors of, and which of their entries are asked for."""
    start = {name: case[name] for name in ("shape", "fused", "residual", "twice", "weights_seed")}
    return [("start", start), ("between", places(case)), ("after", None)]


def places(case: Case) -> Any:
    """All entries; of many a few, those among them at which the gate is 0 or far from it."""
    size = int(np.prod(case["shape"]))
    drawn = np.random.default_rng(case["seed"]).integers(0, size, 1000)
    return np.concatenate([drawn, inputs.special_places(case)]) if case["weighed"] else np.arange(size)


@oracle.remembered
def tensors(case: Case) -> tuple[Any, Any, Any]:
    """Gate, up and what arrives from above, where they are asked for."""
    all_of_them = (*inputs.gate_and_up(case), inputs.noise(case, "upstream", case["shape"]))
    gate, up, upstream = (each.reshape(-1)[places(case)].astype(np.float64) for each in all_of_them)
    return gate, up, upstream


def sigma(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def swiglu(gate: Any, up: Any) -> Any:
    return gate * sigma(gate) * up


def output(formula: Callable[[Any, Any], Any]) -> Callable[[Case], Any]:
    """The result, with what others make of the gate, or of gate and up exchanged."""

    def theory(case: Case) -> Any:
        gate, up, _ = tensors(case)
        return [formula(gate, up) + case["residual"] * gate + case["twice"] * formula(up, gate)]

    return theory


def gradients(slope: Callable[[Any], Any], *, arrives: bool = True, order: int = 1) -> Callable[[Case], Any]:
    """The gradients of gate and up, with that slope of the gate."""

    def theory(case: Case) -> Any:
        gate, up, upstream = tensors(case)

        def formula(gate: Any, up: Any) -> list[Any]:
            back = upstream if arrives else 1.0
            return [back * up * slope(gate), back * gate * sigma(gate)][::order]

        more = zip(formula(up, gate)[::-1], (upstream, 0.0), strict=True)
        beside = [case["twice"] * other + case["residual"] * own for other, own in more]
        return [[one + two for one, two in zip(formula(gate, up), beside, strict=True)]]

    return theory


def silu_slope(gate: Any) -> Any:
    """The derivative of g·σ(g)."""
    return sigma(gate) * (1 + gate * (1 - sigma(gate)))


right = gradients(silu_slope)


def without_gradient(said: Any, case: Case) -> bool:
    """Whether an input has none, or zeros; where another call gives it one, this says nothing."""
    return bool(case["twice"]) or not all(map(np.any, said["gradients"]))


def no_number(of: str, where: Callable[[Any], Any]) -> Sign:
    """Whether something is not a number at such gates."""

    def holds(said: Any, case: Case) -> bool:
        told = said[of] if of == "gradients" else [said[of]]
        gate = tensors(case)[0].reshape(-1)
        return any(one is not None and not np.isfinite(one.reshape(-1)[where(gate)]).all() for one in told)

    return some_rank(holds)


def names(case: Case) -> list[str]:
    return ["gate", "up"]


def tensors_of(number: float) -> Callable[[Case, int], float]:
    return lambda case, rank: oracle.FLOAT_BYTES * number * int(np.prod(case["shape"])) + ROOM


MINE = 3  # between forward and backward the harness has two inputs and the result; afterwards two gradients as well
ALL_CALLS = {"one memory for all calls": signs.only_if("one call")}
OUTPUTS: Wrong = ALL_CALLS | {
    "sigmoid for silu": output(lambda gate, up: sigma(gate) * up),
    "gate and up exchanged": output(lambda gate, up: swiglu(up, gate)),
    "too large for a number": no_number("output", lambda gate: np.abs(gate) > 50),
}
GRADIENTS: Wrong = ALL_CALLS | {
    "what arrives is changed": signs.only_if("nobody else"),
    "divided to get it back": no_number("gradients", lambda gate: gate == 0),
    "too large for a number": no_number("gradients", lambda gate: np.abs(gate) > 50),
    "derivative of the sigmoid alone": gradients(lambda gate: sigma(gate) * (1 - sigma(gate))),
    "the sigmoid for its slope": gradients(sigma),
    "gradients exchanged": gradients(silu_slope, order=-1),
    "what arrives is ignored": gradients(silu_slope, arrives=False),
    "rounded to save bytes": instead("gradients", right, 0.03, 0.1),
    "no gradient": (raised("does not require grad"), some_rank(without_gradient)),
}
KEPT: Ranges = {
    "as autograd keeps it": (tensors_of(MINE + 2.5), tensors_of(MINE + 3)),
    "every intermediate result": (tensors_of(MINE + 3), None),
}
LEFT: Ranges = {"never let go": (tensors_of(MINE + 1), None)}
BOTH = "both gradients in full precision, where the gate is 0 or far from it as well"
TWO, NOTHING = "two tensors kept between forward and backward", "nothing but the gradients outlives the step"
BETWEEN = "held between forward and backward, the inputs and the result among them"
AFTER = "held after the step, the inputs and their gradients among them"

compared = partial(values, rtol=RTOL, atol=ATOL)
kept = keeps(2, "kept", TWO, held_at("between"), tensors_of(MINE + 2), BETWEEN, wrong=KEPT,
             early=showed("between"))  # fmt: skip

EXERCISE = Exercise(
    id="activations.4", function=FUNCTION, title="A gate that keeps less", harness="activations.gated",
    draw=draw, handed_out=handed_out,
    checks=(
        own_work(FUNCTION, built_in=True),
        compared(1, "value", "`gate·σ(gate)·up`", output(swiglu), of="output", wrong=OUTPUTS),
        compared(2, "gradient", BOTH, right, of="gradients", kind="gradient", wrong=GRADIENTS, names=names),
        replace(kept, gate=True),
        keeps(1, "let go", NOTHING, held_at("after"), tensors_of(MINE + 1), AFTER, wrong=LEFT),
    ),
)  # fmt: skip
