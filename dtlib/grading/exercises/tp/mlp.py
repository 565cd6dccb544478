"""tp.5: an MLP of which each rank has slices of what goes in and of what comes out, forward and backward."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from dtlib.grading.exercises import inputs, oracle
from dtlib.grading.exercises.compare import close, show_bytes
from dtlib.grading.exercises.exercise import Exercise, Finding
from dtlib.grading.exercises.kinds import near, order, own_work, values
from dtlib.grading.exercises.seen import Case, Observed
from dtlib.grading.exercises.signs import Sign, Theory, Wrong, every, only_if, some_rank

NAMES = ("up", "up_bias", "down", "down_bias")
RTOL, ATOL = 1e-4, 1e-4  # float32, sums of some dozen numbers around 1


def draw(rng: inputs.Rng) -> inputs.Cases:
    """Widths that are equal and not, of two ranks and more; and a rank that has none."""
    cases: inputs.Cases = []
    for n, is_equal in ((2, True), (3, False), (2, False), (4, True), (3, True), (4, False)):
        own = int(rng.integers(20, 36))
        cases.append(case(rng, [own] * n if is_equal else [int(each) for each in own + rng.permutation(n) * 3]))
    uneven = case(rng, [int(each) for each in rng.permutation([1, 0, 2, 1])])
    wide = case(rng, [300, 301, 299], shape=[1, 4, 20])  # slices are far more than what is in the middle
    return [*cases, uneven, wide]


def case(rng: inputs.Rng, widths: list[int], shape: list[int] | None = None) -> dict[str, Any]:
    """`shape` is that of the middle."""
    n = len(widths)
    shape = shape or [int(rng.integers(2, 5)), int(rng.integers(30, 50)), int(rng.integers(20, 30))]
    words = f"{n} ranks of widths {', '.join(map(str, widths))}, {shape[-1]} in the middle"
    told = {"two ranks": n == 2, "equal widths": len(set(widths)) == 1}
    drawn = {"world_size": n, "widths": widths, "shape": shape, "words": words, "is": told}
    return drawn | {"seed": int(rng.integers(2**31))}


def handed_out(case: Case, rank: int) -> inputs.Pieces:
    return [
        ("start", {"x": columns(case, "x", 1.5)[rank], "slices": slices(case)[rank]}),
        ("between", columns(case, "upstream", 1.5)[rank]),
    ]


def unknown(case: Case, name: str, shape: Any, largest: float) -> Any:
    """A tensor that no rank can make of what it is told."""
    return inputs.noise({**case, "weights_seed": case["seed"]}, name, shape, largest)


def parts(case: Case, whole: Any) -> list[Any]:
    """Of each rank its part of the last dimension, contiguous."""
    places = pairwise([0, *accumulate(case["widths"])])
    return [np.ascontiguousarray(whole[..., slice(*span)]) for span in places]


def columns(case: Case, name: str, largest: float) -> list[Any]:
    """Of each rank its columns of a tensor of b·s rows."""
    return parts(case, unknown(case, name, (*case["shape"][:-1], sum(case["widths"])), largest))


def slices(case: Case) -> list[list[Any]]:
    """Of each rank its part of the matrices and biases; the first bias is everybody's."""
    hidden, middle = sum(case["widths"]), case["shape"][-1]
    up, down = unknown(case, "up", (middle, hidden), 3 / hidden**0.5), unknown(case, "down", (middle, hidden), 0.5)
    first, second = unknown(case, "up_bias", (middle,), 1.0), unknown(case, "down_bias", (hidden,), 1.5)
    rows = [np.ascontiguousarray(each.T) for each in parts(case, down)]
    return [[*each] for each in zip(parts(case, up), [first] * len(rows), rows, parts(case, second), strict=True)]


def forward(case: Case, middle: Callable[[list[Any], Any, int], list[Any]], *, biased: bool = True) -> list[Any]:
    """What each rank has in the end if ``middle(addends, bias, t)`` is what each has there."""
    x, own = columns(case, "x", 1.5), slices(case)
    found = middle([a.astype(float) @ each[0].T for a, each in zip(x, own, strict=True)], own[0][1], len(x))
    ends = zip(found, own, strict=True)
    return [one @ each[2].T + (each[3] if biased else 0) for one, each in ends]


def output(middle: Callable[[list[Any], Any, int], list[Any]], *, biased: bool = True) -> Theory:
    return lambda case: forward(case, middle, biased=biased)


def right_middle(z: list[Any], bias: Any, t: int) -> list[Any]:
    return [np.tanh(sum(z) + bias)] * t


def bent(z: list[Any], bias: Any, t: int) -> list[Any]:
    return [sum(np.tanh(each + bias) for each in z)] * t


def summed_behind(case: Case) -> list[Any] | None:
    """What comes of the chapter's pair: the ranks' outputs are summed, if they have one shape."""
    ends = forward(case, lambda z, bias, t: [np.tanh(each + bias) for each in z], biased=False)
    own = slices(case)
    return [sum(ends) + each[3] for each in own] if case["is"]["equal widths"] else None


class Found(NamedTuple):
    """The gradients of x and of the slices of a rank."""

    to_x: Any
    slices: list[Any]


@oracle.remembered
def gradients(case: Case) -> tuple[list[Found], list[Found]]:
    """Of each rank the right ones, and those of a rank that hears of its own features alone on the way back."""
    x, back, own = columns(case, "x", 1.5), columns(case, "upstream", 1.5), slices(case)
    middle = np.tanh(sum(a.astype(float) @ each[0].T for a, each in zip(x, own, strict=True)) + own[0][1])
    addends = [(dy.astype(float) @ each[2]) * (1 - middle**2) for dy, each in zip(back, own, strict=True)]

    def of(rank: int, to_middle: Any) -> Found:
        behind = np.einsum("bsh,bsf->hf", back[rank], middle), back[rank].sum((0, 1))
        front = np.einsum("bsf,bsh->fh", to_middle, x[rank]), to_middle.sum((0, 1))
        return Found(to_middle @ own[rank][0], [*front, *behind])

    ranks = range(len(x))
    return [of(rank, sum(addends)) for rank in ranks], [of(rank, addends[rank]) for rank in ranks]


def to_x(factor: Callable[[int], float], *, alone: bool = False) -> Theory:
    """So many times the gradient of x, or of what a rank finds of it."""
    return lambda case: [factor(case["world_size"]) * each.to_x for each in gradients(case)[alone]]


def of_slices(factor: Callable[[int], float], names: Sequence[str] = NAMES[:2], *, alone: Sequence[str] = ()) -> Theory:
    """The gradients of the slices, so many times those of these names, and what a rank finds of some `alone`."""

    def theory(case: Case) -> list[Any]:
        factors = [factor(case["world_size"]) if name in names else 1.0 for name in NAMES]
        both = zip(*gradients(case), strict=True)
        told = [[each[name in alone].slices[k] for k, name in enumerate(NAMES)] for each in both]
        return [[f * each for f, each in zip(factors, own, strict=True)] for own in told]

    return theory


def buffer_bytes(case: Case) -> float:
    """What all ranks send for one all-reduce."""
    return 2.0 * (case["world_size"] - 1) * oracle.FLOAT_BYTES * float(np.prod(case["shape"]))


def ways(each: Observed) -> tuple[float, float]:
    """What all ranks sent until they asked for the gradient that comes back, and after that."""
    asks = [each.seen.asked(rank, "between")[0] for rank in range(len(each.said))]
    first = float(sum(map(each.seen.sent_by, asks)))
    return first, each.seen.total_bytes - first


def find_ways(each: Observed) -> Finding | None:
    """That there was one all-reduce of the middle's size either way."""
    for way, seen in zip(("forward", "backward"), ways(each), strict=True):
        if not near(seen, buffer_bytes(each.case)):
            return Finding(f"{show_bytes(seen)} sent {way}", show_bytes(buffer_bytes(each.case)), each.words)
    return None


def is_wide(case: Case) -> bool:
    """Whether the slices are so large that nothing else explains bytes like theirs."""
    return sum(case["widths"]) > 10 * int(np.prod(case["shape"][:-1]))


def find_slices(each: Observed) -> Finding | None:
    """That slices travelled: half of what it takes to tell all ranks all of them, which nothing else comes near."""
    seen, wanted, case = each.seen.total_bytes, 2 * buffer_bytes(each.case), each.case
    half = (case["world_size"] - 1) * oracle.FLOAT_BYTES * case["shape"][-1] * sum(case["widths"])
    return Finding(f"{show_bytes(seen)} sent in all", show_bytes(wanted), each.words) if seen > half else None


def sent(there: Callable[[int], float], back: float) -> Any:
    """That so many times the bytes of an all-reduce were sent either way."""

    def holds(each: Observed) -> bool:
        times = there(each.case["world_size"]), back
        return all(near(seen, by * buffer_bytes(each.case)) for seen, by in zip(ways(each), times, strict=True))

    return every(holds)


def more_than(part: float) -> Any:
    """That more was sent forward than one all-reduce and such a part of x."""

    def holds(each: Observed) -> bool:
        case = each.case
        x_bytes = oracle.FLOAT_BYTES * (case["world_size"] - 1) * np.prod(case["shape"][:-1]) * sum(case["widths"])
        return bool(ways(each)[0] > buffer_bytes(case) + part * x_bytes)

    return every(holds)


def no_way_to_x(each: Observed) -> bool:
    """Whether nothing came back to x."""
    return all(said["gradient"] is None or close(said["gradient"], 0 * said["gradient"]) for said in each.said)


OUTPUT: Wrong = {
    "not summed": output(lambda z, bias, t: [np.tanh(each + bias) for each in z]),
    "the chapter's pair": summed_behind,
    "summed behind the bend": output(bent),
    "bias in each part": output(lambda z, bias, t: [np.tanh(sum(z) + t * bias)] * t),
    "bias forgotten": (output(lambda z, bias, t: [np.tanh(sum(z))] * t), output(right_middle, biased=False)),
    "mean for a sum": (
        output(lambda z, bias, t: [np.tanh(sum(z) / t + bias)] * t),
        output(lambda z, bias, t: [np.tanh((sum(z) + bias) / t)] * t),
    ),
    "right for equal widths only": only_if("equal widths"),
}
INPUT: Wrong = {
    "no sum in backward": to_x(lambda t: 1, alone=True),
    "divided by the ranks": to_x(lambda t: 1 / t),
    "summed once too often": to_x(lambda t: t),
    "no gradient": every(no_way_to_x),
}
SLICES: Wrong = {
    "no sum in backward": of_slices(lambda t: 1, alone=NAMES[:2]),
    "divided by the ranks": (of_slices(lambda t: 1 / t), of_slices(lambda t: 1 / t, NAMES[:1])),
    "summed once too often": (of_slices(lambda t: t), of_slices(lambda t: t, NAMES[:1])),
    "gradient of the bias summed": of_slices(lambda t: t, ["up_bias"]),
    "gradient of the bias not summed": of_slices(lambda t: 1, alone=["up_bias"]),
    "no gradient": some_rank(lambda said, case: any(each is None for each in said["slices"])),
}
TRAFFIC: Wrong = {
    "parts gathered, then added": sent(lambda t: t / 2, 1),
    "weights gathered": Sign(
        lambda failing, passing: any(is_wide(each.case) and find_slices(each) for each in failing)
    ),
    "nothing sent": (sent(lambda t: 0, 1), sent(lambda t: 1, 0), sent(lambda t: 0, 0)),
    "sent where nothing has to be": sent(lambda t: 1, 2),
    "input sent": more_than(0.9),
}
right = partial(values, 2, rtol=RTOL, atol=ATOL, least_sent=lambda case: buffer_bytes(case) / 40)

EXERCISE = Exercise(
    id="tp.5", function="split_mlp", title="An MLP that nobody has whole", harness="tp.mlp", draw=draw,
    handed_out=handed_out,
    checks=(
        own_work("split_mlp", built_in=True),
        order(0, "split", "no slice leaves its rank", find_slices, gate=True, kind="traffic", where=is_wide,
              wrong={"weights gathered": every(lambda each: True)}),
        right("output", "each rank's features of what the whole MLP gives", output(right_middle), of="output",
              wrong=OUTPUT),
        right("input", "the gradient of `x`", to_x(lambda t: 1), of="gradient", wrong=INPUT, kind="gradient"),
        right("slices", "the gradients of the slices", of_slices(lambda t: 1), of="slices", wrong=SLICES,
              kind="gradient", names=lambda case: NAMES),
        order(2, "traffic", "one all-reduce of b·s·f elements forward, one backward", find_ways, wrong=TRAFFIC,
              kind="traffic"),
    ),
)  # fmt: skip
