"""memory.5: bf16 weights with an fp32 master copy. The desk gives each parameter its gradient at each step."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from dtlib.grading.exercises import inputs, oracle
from dtlib.grading.exercises.exercise import Exercise
from dtlib.grading.exercises.kinds import ROOM, keeps, own_work, showed, values
from dtlib.grading.exercises.seen import Case, Observed, Seen
from dtlib.grading.exercises.signs import Sign, every

from ._shared import GRADIENTS_KEPT, Array, at_rest, is_held, names, per, rounded

FUNCTION = "with_master_copy"
WIDTH = 1024  # of a layer that is weighed
TEMPORARY = 2 * 4 * WIDTH**2  # of Adam, for one parameter after the other


def draw(rng: inputs.Rng) -> inputs.Cases:
    """Steps that every weight sees; small updates that all point the same way; so many weights that they weigh."""
    widths = [int(rng.integers(4, 9)), int(rng.integers(12, 20)), 7, 1]
    decay, rate = round(float(rng.uniform(0.02, 0.1)), 2), round(float(rng.uniform(0.02, 0.05)), 3)
    small = round(float(rng.uniform(3e-4, 6e-4)), 6)  # below half of what is between two numbers of bf16 above 0.5
    return [
        case(rng, widths, 5, rate, decay),
        case(rng, [1, 250, 1], 24, small, 0.0, least=0.5),
        case(rng, [WIDTH] * 17, 2, 0.01, decay, weighed=True),
    ]


def case(rng: inputs.Rng, widths: list[int], steps: int, rate: float, decay: float, **more: Any) -> dict[str, Any]:
    """One training; only what is told of weights from `least` on, and gradients are then positive."""
    least = more.get("least", 0.0)
    drawn = {
        "widths": widths,
        "optimizer": "adamw",
        "settings": {"lr": rate, "betas": [0.9, 0.99], "eps": 1e-3, "weight_decay": decay},
        "steps": steps,
        "gradients": [[seed, 1 if least else -127] for seed in rng.integers(0, 2**31, steps).tolist()],
        "weights_seed": int(rng.integers(0, 2**31)),
        "least": least,
        "weighed": more.get("weighed", False),
        "is": {"small": bool(least)},
    }
    return drawn | {"words": f"{steps} steps, {sum(oracle.sizes(drawn)):,} parameters, learning rate {rate:g}"}


def handed_out(case: Case, rank: int) -> inputs.Pieces:
    """The model and the optimizer; for each step what makes the gradients, and then which weights to tell."""
    start = {name: case[name] for name in ("weights_seed", "widths", "optimizer", "settings", "steps")}
    pieces: inputs.Pieces = [("start", start)]
    for told in case["gradients"]:
        pieces += [("gradients", told), ("between steps", course(case)[0])]
    return pieces


def start_at(case: Case, where: Array) -> Array:
    """The weights at the start, as they came, at the elements `where` of all end to end."""
    return np.concatenate([each.reshape(-1) for each in inputs.parameters(case)])[where].astype(np.float64)


def masters(
    case: Case, where: Array, *, summed: bool = False, fresh: bool = False, coarse: Sequence[int] = ()
) -> list[Array]:
    """The master copy after each step of AdamW, at the elements `where`.

    `summed` adds the gradients of all steps so far, `fresh` makes each step the optimizer's first; after the steps in
    `coarse`, 0 for the start, it has what bf16 can hold.
    """
    update, state, now, path = oracle.adamw(case["settings"]), dict[str, Any](), start_at(case, where), []
    so_far = np.zeros(len(where))
    for step, told in enumerate(case["gradients"], 1):
        parts = [inputs.given_gradient(told, index, (size,)) for index, size in enumerate(oracle.sizes(case))]
        gradient = np.concatenate(parts)[where] / 64
        so_far = rounded(so_far + gradient) if summed else gradient
        before = rounded(now) if step - 1 in coarse else now
        now = update(1 if fresh else step, before, so_far, {} if fresh else state)
        path.append(now)
    return path


@oracle.remembered
def course(case: Case) -> tuple[Array, list[Array]]:
    """Which weights to tell, none for which float32's own rounding decides that of bf16, and their copies by step."""
    count = sum(oracle.sizes(case))
    rng = np.random.default_rng(case["weights_seed"])
    where = np.unique(rng.integers(0, count, 6000)) if case["weighed"] else np.arange(count)
    path = masters(case, where)
    clear = np.abs(start_at(case, where)) >= case["least"]
    for each in path:
        size = np.abs(each)
        apart = np.ldexp(1.0, np.frexp(size)[1] - 8)  # two neighbours, which have 8 significant bits
        clear &= np.abs(size / apart % 1 - 0.5) * apart > 4e-6 * size + 1e-4 * case["settings"]["lr"]
    return where[clear], [each[clear] for each in path]


def follows(**how: Any) -> Sign:
    """The weights are, but for few, those of another course (see `masters`)."""

    def does(each: Observed) -> bool:
        path = masters(each.case, course(each.case)[0], **how)
        equal = [one == rounded(two) for one, two in zip(each.said[0]["weights"], path, strict=True)]
        return bool(np.mean(equal) > 0.98)

    return every(does)


def stand_still(each: Observed) -> bool:
    """Whether the weights are those of the start after every step."""
    begin = rounded(start_at(each.case, course(each.case)[0]))
    return all(np.array_equal(one, begin) for one in each.said[0]["weights"])


def right(case: Case) -> Any:
    """The format of the weights, and the weights after each step."""
    return [[["bfloat16"], *(rounded(each) for each in course(case)[1])]]


def where_weighed(sign: Sign) -> Sign:
    """The sign, looked for in the case that is weighed, whatever the check said to it."""
    return Sign(lambda failing, passing: sign.fits([one for one in (*failing, *passing) if one.case["weighed"]], ()))


IN_FP32 = every(lambda each: bool(each.said[0]["formats"] != ["bfloat16"]))
NO_COPY = is_held(lambda rest, peak: rest < 11 and peak < 12)
COURSES: dict[str, Any] = {
    "weights in fp32": IN_FP32,
    "never copied back": every(stand_still),
    "small updates lost": every(stand_still),
    "optimizer made anew": follows(fresh=True),
    "gradients add up": follows(summed=True),
    "copy of rounded weights": follows(coarse=[0]),
    "no master copy": (follows(coarse=range(99)), where_weighed(NO_COPY)),
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


def told(each: Observed) -> Any:
    return [[said["formats"], *said["weights"]] for said in each.said]


weights = partial(values, right=right, of=told, names=lambda case: ["formats", *names(case)], wrong=COURSES, rtol=0.0)
held = partial(keeps, least=per(13), wrong=HELD, early=showed("between steps"))

EXERCISE = Exercise(
    id="memory.5", function=FUNCTION, title="A step with a master copy", harness="memory.master_copy",
    draw=draw, handed_out=handed_out, named=lambda case, rank: {"optimizer step": None},
    checks=(
        own_work(FUNCTION),
        weights(2, "weights", "the bf16 weights after each step", where="not small"),
        weights(2, "small updates", "updates too small for bf16", where="small"),
        held(3, "at rest", "what is held between steps", at_rest, per(14, ROOM), "held between steps"),
        held(2, "peak", "the most that is held during a step", Seen.peak, per(18, TEMPORARY + ROOM), "at the peak"),
    ),
)  # fmt: skip
