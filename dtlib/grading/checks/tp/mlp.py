"""tp.5: an MLP of which each rank has slices, forward and backward."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from dtlib.grading import inputs, oracle
from dtlib.grading.compare import close, show_bytes
from dtlib.grading.exercise import Exercise, Finding
from dtlib.grading.kinds import near, order, own_work, values
from dtlib.grading.seen import Case, Observed
from dtlib.grading.signs import GATHERED, Theory, Wrong, every, only_if, some_rank

NAMES = ("up", "up_bias", "down", "down_bias")
RTOL, ATOL = 1e-4, 1e-4  # float32, sums of some dozen numbers around 1


def draw(rng: inputs.Rng) -> inputs.Cases:
    """Widths that are equal and not, of two ranks and more, with others that use x and without; and a rank that has
    none."""
    cases: inputs.Cases = []
    for n, is_equal, shared in (
        (2, True, False), (3, False, False), (2, False, True), (4, True, True), (3, True, True), (4, False, False),
    ):  # fmt: skip
        own = int(rng.integers(20, 36))
        widths = [own] * n if is_equal else [int(each) for each in own + rng.permutation(n) * 3]
        cases.append(case(rng, widths, shared))
    uneven = case(rng, [int(each) for each in rng.permutation([1, 0, 2, 1])], True)
    wide = case(rng, [300, 301, 299], False, shape=[1, 4, 20])  # slices are far more than what is put in
    return [*cases, uneven, wide]


def case(rng: inputs.Rng, widths: list[int], shared: bool, shape: list[int] | None = None) -> dict[str, Any]:
    n = len(widths)
    shape = shape or [int(rng.integers(2, 5)), int(rng.integers(30, 50)), int(rng.integers(20, 30))]
    words = f"{n} ranks of widths {', '.join(map(str, widths))}" + ", x used by others too" * shared
    told = {"two ranks": n == 2, "equal widths": len(set(widths)) == 1, "nobody else": not shared}
    drawn = {"world_size": n, "widths": widths, "shape": shape, "shared": shared, "words": words, "is": told}
    return drawn | {name: int(rng.integers(2**31)) for name in ("seed", "weights_seed")}


def handed_out(case: Case, rank: int) -> inputs.Pieces:
    start = {"x": inputs.noise(case, "x", case["shape"], 1.5), "slices": slices(case)[rank], "shared": case["shared"]}
    return [("start", start), ("between", unknown(case, "upstream", case["shape"]))]


def unknown(case: Case, name: str, shape: Any, largest: float = 1.5) -> Any:
    """A tensor that no rank can make of what it is told."""
    return inputs.noise({**case, "weights_seed": case["seed"]}, name, shape, largest)


def slices(case: Case) -> list[list[Any]]:
    """Of each rank its part of the matrices and biases, contiguous."""
    width, hidden, places = sum(case["widths"]), case["shape"][-1], [0, *accumulate(case["widths"])]
    up, down = (unknown(case, name, (width, hidden), 0.5) for name in ("up", "down"))
    first, second = unknown(case, "up_bias", (width,)), unknown(case, "down_bias", (hidden,))
    spans = [slice(*span) for span in pairwise(places)]
    return [[up[each], first[each], np.ascontiguousarray(down[each].T), second] for each in spans]


class Found(NamedTuple):
    """What a rank computes from its slices alone: its addend, and the gradients of x and of the slices."""

    part: Any
    to_x: Any
    slices: list[Any]


@oracle.remembered
def alone(case: Case) -> list[Found]:
    x, back = (each.astype(float) for each in (handed_out(case, 0)[0][1]["x"], handed_out(case, 0)[1][1]))
    found = []
    for up, first, down, _ in slices(case):
        middle = np.tanh(x @ up.T + first)
        to_middle = back @ down * (1 - middle**2)
        of_up, of_down = np.einsum("bsf,bsh->fh", to_middle, x), np.einsum("bsh,bsf->hf", back, middle)
        own = [of_up, to_middle.sum((0, 1)), of_down, back.sum((0, 1))]
        found.append(Found(middle @ down.T, to_middle @ up, own))
    return found


def output(formula: Callable[[Any, Any, int], Any], *, own: bool = False) -> Theory:
    """``formula(sum of addends, bias, t)`` on every rank, or of its `own` addend."""

    def theory(case: Case) -> list[Any]:
        parts, bias = [each.part for each in alone(case)], slices(case)[0][3]
        return [formula(part if own else sum(parts), bias, len(parts)) for part in parts]

    return theory


def to_x(factor: Callable[[int], float], *, own: bool = False) -> Theory:
    """So many times the gradient of x, or of what a rank finds of it; and what comes from others."""

    def theory(case: Case) -> list[Any]:
        parts, others = [each.to_x for each in alone(case)], case["shared"] * handed_out(case, 0)[1][1]
        return [factor(len(parts)) * (part if own else sum(parts)) + others for part in parts]

    return theory


def of_slices(factor: Callable[[int], float], names: Sequence[str] = NAMES[:3]) -> Theory:
    """The gradients of the slices, so many times those of these names: of what stands in front of the sum."""

    def theory(case: Case) -> list[Any]:
        factors = [factor(case["world_size"]) if name in names else 1.0 for name in NAMES]
        return [[f * each for f, each in zip(factors, own.slices, strict=True)] for own in alone(case)]

    return theory


def buffer_bytes(case: Case) -> float:
    """What all ranks send for one all-reduce."""
    return 2.0 * (case["world_size"] - 1) * oracle.FLOAT_BYTES * float(np.prod(case["shape"]))


def ways(each: Observed) -> tuple[float, float]:
    """What all ranks sent until they asked for the gradient that comes back, and after that."""
    asks = [each.seen.asked(rank, "between")[0] for rank in range(len(each.said))]
    forward = float(sum(map(each.seen.sent_by, asks)))
    return forward, each.seen.total_bytes - forward


def find_ways(each: Observed) -> Finding | None:
    """That there was one all-reduce of x's size either way."""
    for way, seen in zip(("forward", "backward"), ways(each), strict=True):
        if not near(seen, buffer_bytes(each.case)):
            return Finding(f"{show_bytes(seen)} sent {way}", show_bytes(buffer_bytes(each.case)), each.words)
    return None


def is_wide(case: Case) -> bool:
    """Whether the slices are so large that nothing else explains bytes like theirs."""
    return sum(case["widths"]) > 10 * int(np.prod(case["shape"][:-1]))


def find_slices(each: Observed) -> Finding | None:
    """That slices travelled."""
    seen, wanted = each.seen.total_bytes, 2 * buffer_bytes(each.case)
    return Finding(f"{show_bytes(seen)} sent in all", show_bytes(wanted), each.words) if seen > 5 * wanted else None


def sent(forward: Callable[[int], float], backward: float) -> Any:
    """That so many times the bytes of an all-reduce were sent either way."""

    def holds(each: Observed) -> bool:
        times = forward(each.case["world_size"]), backward
        return all(near(seen, by * buffer_bytes(each.case)) for seen, by in zip(ways(each), times, strict=True))

    return every(holds)


def no_way_to_x(each: Observed) -> bool:
    """Whether nothing came back to x, but what others bring."""
    others = to_x(lambda t: 0)(each.case)
    return all(
        said["gradient"] is None or close(said["gradient"], own) for said, own in zip(each.said, others, strict=True)
    )


OUTPUT: Wrong = {
    "not summed": output(lambda y, bias, t: y + bias, own=True),
    "bias in each part": output(lambda y, bias, t: y + t * bias),
    "bias forgotten": output(lambda y, bias, t: y),
    "mean for a sum": (output(lambda y, bias, t: y / t + bias), output(lambda y, bias, t: (y + bias) / t)),
    "right for equal widths only": only_if("equal widths"),
}
INPUT: Wrong = {
    "no sum in backward": to_x(lambda t: 1, own=True),
    "what comes from others summed too": only_if("nobody else"),
    "divided by the ranks": to_x(lambda t: 1 / t),
    "summed once too often": to_x(lambda t: t),
    "no gradient": every(no_way_to_x),
}
SLICES: Wrong = {
    "divided by the ranks": of_slices(lambda t: 1 / t),
    "summed once too often": of_slices(lambda t: t),
    "gradient of the bias summed": of_slices(lambda t: t, ["down_bias"]),
    "no gradient": some_rank(lambda said, case: any(each is None for each in said["slices"])),
}
TRAFFIC: Wrong = {
    "parts gathered, then added": sent(lambda t: t / 2, 1),
    "weights gathered": GATHERED,
    "nothing sent": (sent(lambda t: 0, 1), sent(lambda t: 1, 0), sent(lambda t: 0, 0)),
    "input sent": sent(lambda t: 2, 1),
    "sent where nothing has to be": sent(lambda t: 1, 2),
}
right = partial(values, 2, rtol=RTOL, atol=ATOL, least_sent=lambda case: buffer_bytes(case) / 40)

EXERCISE = Exercise(
    id="tp.5", function="split_mlp", title="An MLP that nobody has whole", harness="tp.mlp", draw=draw,
    handed_out=handed_out,
    checks=(
        own_work("split_mlp", built_in=True),
        order(0, "split", "no slice leaves its rank", find_slices, gate=True, kind="traffic", where=is_wide,
              wrong={"weights gathered": every(lambda each: True)}),
        right("output", "what the whole MLP gives, on every rank", output(lambda y, bias, t: y + bias), of="output",
              wrong=OUTPUT),
        right("input", "the gradient of `x`", to_x(lambda t: 1), of="gradient", wrong=INPUT, kind="gradient"),
        right("slices", "the gradients of the slices", of_slices(lambda t: 1), of="slices", wrong=SLICES,
              kind="gradient", names=lambda case: NAMES),
        order(2, "traffic", "one all-reduce of b·s·h elements forward, one backward", find_ways, wrong=TRAFFIC,
              kind="traffic"),
    ),
)  # fmt: skip
