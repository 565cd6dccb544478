"""threed.5: the gradients of a step on a mesh of dp, pp and tp, on real ranks."""

from functools import partial
from typing import Any

import numpy as np

from dtlib.grading.exercises import inputs, oracle
from dtlib.grading.exercises.exercise import Exercise
from dtlib.grading.exercises.kinds import own_work, sends, values
from dtlib.grading.exercises.seen import Case
from dtlib.grading.exercises.signs import GATHERED, Theory, Wrong

from .groups import place

RTOL, ATOL = 2e-4, 1e-3  # float32, sums of some hundred numbers around 1
ROWS, HIDDEN, WIDTH = 96, 48, 96  # of a copy; wide enough that connections weigh nothing beside it

#: dp, pp and tp.
MESHES = ((2, 1, 1), (1, 1, 2), (1, 2, 1), (1, 2, 2), (2, 1, 2), (2, 2, 1), (2, 2, 2))


def draw(rng: inputs.Rng) -> inputs.Cases:
    """Meshes on which axes have one rank, and the cube."""
    cases = []
    for dp, pp, tp in MESHES:
        axes, n = {"dp": dp, "pp": pp, "tp": tp}, dp * pp * tp
        told = {"one copy": dp == 1, "one stage": pp == 1, "whole matrices": tp == 1}
        drawn = {"world_size": n, "axes": axes, "words": f"dp {dp}, pp {pp}, tp {tp}", "is": told}
        cases.append(drawn | {name: int(rng.integers(2**31)) for name in ("seed", "weights_seed")})
    return cases


def handed_out(case: Case, rank: int) -> inputs.Pieces:
    at, axes = place(case["axes"], rank), case["axes"]
    start = {
        "axes": axes, "slices": slices(case, at["pp"], at["tp"]),
        "x": unknown(case, f"x {at['dp']}", (ROWS, HIDDEN)) if at["pp"] == 0 else None,
        "target": unknown(case, f"target {at['dp']}", (ROWS, HIDDEN)) if at["pp"] == axes["pp"] - 1 else None,
    }  # fmt: skip
    return [("start", start)]


def unknown(case: Case, name: str, shape: tuple[int, ...], largest: float = 1.0) -> Any:
    """A tensor that only the rank that is told it knows."""
    return inputs.noise({**case, "weights_seed": case["seed"]}, name, shape, largest)


def slices(case: Case, stage: int, t: int) -> list[Any]:
    """A rank's columns of A and rows of C."""
    A, C = (unknown(case, f"{name} {stage}", (HIDDEN, WIDTH), 0.3) for name in "AC")
    columns = np.split(np.arange(WIDTH), case["axes"]["tp"])[t]
    return [np.ascontiguousarray(A[:, columns]), np.ascontiguousarray(C[:, columns].T)]


@oracle.remembered
def alone(case: Case) -> dict[tuple[bool, ...], dict[tuple[int, ...], list[Any]]]:
    """By whether tp sums forward and backward, () without tanh's slope: by place (dp, pp, tp) the gradients of the
    copy's own rows."""
    told = {(one, two): found(case, one, two) for one, two in ((True, True), (False, True), (True, False))}
    return told | {(): found(case, slope=False)}


def found(
    case: Case, forward: bool = True, backward: bool = True, *, slope: bool = True
) -> dict[tuple[int, ...], list[Any]]:
    dp, pp, tp = (case["axes"][name] for name in ("dp", "pp", "tp"))
    gradients: dict[tuple[int, ...], list[Any]] = {}

    def summed(parts: list[Any], really: bool) -> list[Any]:
        return [sum(parts)] * tp if really else parts

    for d in range(dp):
        xs, kept = [unknown(case, f"x {d}", (ROWS, HIDDEN)).astype(float)] * tp, []
        for p in range(pp):
            pairs = [[each.astype(float) for each in slices(case, p, t)] for t in range(tp)]
            middles = [np.tanh(x @ A) for x, (A, _) in zip(xs, pairs, strict=True)]
            kept.append((xs, pairs, middles))
            xs = summed([middle @ C for middle, (_, C) in zip(middles, pairs, strict=True)], forward)
        back = [y - unknown(case, f"target {d}", (ROWS, HIDDEN)) for y in xs]
        for p in reversed(range(pp)):
            xs, pairs, middles = kept[p]
            inner = [g @ C.T * (1 - slope * middle**2) for g, (_, C), middle in zip(back, pairs, middles, strict=True)]
            for t in range(tp):
                gradients[d, p, t] = [xs[t].T @ inner[t], middles[t].T @ back[t]]
            back = summed([one @ A.T for one, (A, _) in zip(inner, pairs, strict=True)], backward)
    return gradients


def theory(
    *along: str, over: str = "", times: float = 1, forward: bool = True, backward: bool = True, slope: bool = True
) -> Theory:
    """The gradients of each rank, added up along these axes, divided by the ranks of the axis `over`, so many times."""

    def of(case: Case) -> list[Any]:
        own, axes, told = alone(case)[(forward, backward) if slope else ()], case["axes"], []
        for rank in range(case["world_size"]):
            at = place(axes, rank)
            fixed = [(k, at[name]) for k, name in enumerate(axes) if name not in along]
            same = [own[each] for each in own if all(each[k] == here for k, here in fixed)]
            told.append([times * sum(pair[k] for pair in same) / axes.get(over, 1) for k in range(2)])
        return told

    return of


def wire(first: int = 0) -> Theory:
    """What all ranks send, with so many sums of activations besides those that are needed."""

    def of(case: Case) -> float:
        n, p, t = (case["axes"][name] for name in ("dp", "pp", "tp"))
        activation, weights = oracle.FLOAT_BYTES * ROWS * HIDDEN, 2 * oracle.FLOAT_BYTES * HIDDEN * WIDTH
        sums = n * (2 * p - 1 + first) * 2 * (t - 1) * activation
        return float(sums + n * 2 * (p - 1) * t * activation + p * 2 * (n - 1) * weights)

    return of


WRONG: Wrong = {
    "not summed over dp": theory(), "mean over dp": theory("dp", over="dp"),
    "summed over tp": (theory("dp", "tp"), theory("dp", "pp", "tp")),
    "no sum forward": theory("dp", forward=False), "no sum backward": theory("dp", backward=False),
    "g summed over tp": lambda case: theory("dp", times=case["axes"]["tp"])(case),
    "a mean over rows": (theory("dp", times=1 / ROWS), theory("dp", times=1 / (ROWS * HIDDEN))),
    "turned round": theory("dp", times=-1), "no half": theory("dp", times=2), "no slope": theory("dp", slope=False),
}  # fmt: skip
TRAFFIC: Wrong = {"a sum over tp too many": wire(first=1), "weights gathered": GATHERED}


def axes_in_use(case: Case) -> int:
    return sum(size > 1 for size in case["axes"].values())


right = partial(
    values, of="gradients", right=theory("dp"), wrong=WRONG, rtol=RTOL, atol=ATOL, kind="gradient",
    names=lambda case: ("A", "C"), least_sent=lambda case: wire()(case) / 2,
)  # fmt: skip

EXERCISE = Exercise(
    id="threed.5", function="gradients_on_mesh", title="A step on eight ranks", harness="threed.step", draw=draw,
    handed_out=handed_out,
    checks=(
        own_work("gradients_on_mesh"),
        right(3, "axes", "the gradients where one axis has several ranks", where=lambda case: axes_in_use(case) == 1),
        right(4, "together", "the gradients where axes meet", where=lambda case: axes_in_use(case) > 1),
        sends(2, "traffic", "what the sums and messages need, and no more", wire(), wrong=TRAFFIC),
    ),
)  # fmt: skip
