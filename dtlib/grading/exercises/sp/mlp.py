"""sp.2: a norm and an MLP whose tokens lie split over the ranks, forward and backward."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from dtlib.grading.exercises import inputs, oracle, plain
from dtlib.grading.exercises.compare import close, show_bytes
from dtlib.grading.exercises.exercise import Exercise, Finding
from dtlib.grading.exercises.kinds import ROOM, Ranges, held_at, keeps, order, own_work, sends, shows, values
from dtlib.grading.exercises.seen import Case, Observed
from dtlib.grading.exercises.signs import Theory, Wrong, every, some_rank

NAMES = ("weight", "up", "down")
EPS, RTOL, ATOL = 1e-5, 1e-4, 2e-4  # float32, sums of up to some thousand numbers around 1
PHASES = 5  # two forward, three backward: one more than where the gathered input is kept


def draw(rng: inputs.Rng) -> inputs.Cases:
    """Twice 2, 3 and 4 ranks, and a case to be weighed."""
    cases = []
    for n in (2, 3, 2, 4, 3, 4):
        tokens = int(rng.integers(20, 30))
        # so wide that slices on the wire are told from anything else that a learner may add up
        cases.append(case(rng, n, tokens, int(rng.integers(40, 60)), 3 * tokens + int(rng.integers(20))))
    return [*cases, case(rng, 4, 1024, 2048, 16, weighed=True)]


def case(rng: inputs.Rng, n: int, tokens: int, hidden: int, width: int, *, weighed: bool = False) -> dict[str, Any]:
    words = f"{n} ranks with {tokens} tokens each, h={hidden}, {width} columns a rank"
    drawn = {name: int(rng.integers(2**31)) for name in ("seed", "weights_seed")} | {"is": {"two ranks": n == 2}}
    shape = {"world_size": n, "shape": [tokens, hidden], "width": width}
    return drawn | shape | {"weighed": weighed, "words": words}


def seeds(case: Case, rank: int) -> list[int]:
    """Of a rank's tokens and of what comes back to them."""
    return [int(each) for each in np.random.default_rng([case["seed"], rank]).integers(2**62, size=2)]


def handed_out(case: Case, rank: int) -> inputs.Pieces:
    own, back = seeds(case, rank)
    start = {"own_seed": own, "shape": case["shape"], "weights": weights(case, rank), "positions": places(case)}
    return [("start", start), ("between", back)]


def weights(case: Case, rank: int) -> list[Any]:
    """The norm's, which all ranks have, and the rank's slices."""
    (_, hidden), width, own = case["shape"], case["width"], {"weights_seed": case["seed"]}
    norm = inputs.noise(case, "norm", (hidden,)) + np.float32(1)
    up = inputs.noise(own, f"up {rank}", (width, hidden), (3 / hidden) ** 0.5)
    return [norm, up, inputs.noise(own, f"down {rank}", (hidden, width), (3 / hidden) ** 0.5)]


def places(case: Case) -> Any:
    """The elements that are asked for: all (None), or of many a few."""
    return np.random.default_rng(case["seed"]).integers(0, np.prod(case["shape"]), 500) if case["weighed"] else None


class Found(NamedTuple):
    """Of all tokens x over its root mean square, that root, the output, and the gradient of what the norm gives; of the
    two last, on each rank, what it finds for its own tokens from its slices alone; and the gradients of the slices, and
    of those from its own tokens alone."""

    unit: Any
    root: Any
    output: Any
    back: Any
    own_output: list[Any]
    own_back: list[Any]
    slices: list[list[Any]]
    own_slices: list[list[Any]]


@oracle.remembered
def known(case: Case) -> Found:
    ranks, (tokens, _) = range(case["world_size"]), case["shape"]
    told = [seeds(case, rank) for rank in ranks]
    x = np.concatenate([inputs.own_tokens(first, case["shape"]) for first, _ in told]).astype(float)
    upstream = np.concatenate([inputs.noise({"weights_seed": back}, "upstream", case["shape"]) for _, back in told])
    upstream = upstream.astype(float)
    root = np.sqrt((x * x).mean(1, keepdims=True) + EPS)
    unit, output, back = x / root, np.zeros_like(x), np.zeros_like(x)
    lists: tuple[list[Any], ...] = ([], [], [], [])
    for rank in ranks:
        norm, up, down = weights(case, rank)
        own, normed = slice(rank * tokens, (rank + 1) * tokens), unit * norm
        middle = np.tanh(normed @ up.T)
        to_middle = upstream @ down * (1 - middle**2)
        part, part_back = middle @ down.T, to_middle @ up
        output, back = output + part, back + part_back
        of_slices = [[to_middle[at].T @ normed[at], upstream[at].T @ middle[at]] for at in (slice(None), own)]
        for one, each in zip(lists, (part[own], part_back[own], *of_slices), strict=True):
            one.append(each)
    return Found(unit, root, output, back, *lists)


def told(case: Case, rows: Any) -> list[Any]:
    """Of each rank the elements of its tokens that are asked for."""
    at = places(case)
    return [each if at is None else each.reshape(-1)[at] for each in np.split(rows, case["world_size"])]


def output(factor: Callable[[int], float] = lambda t: 1, *, own: bool = False, backwards: bool = False) -> Theory:
    """So many times the sum of the ranks' parts, or of each its own; of the ranks' tokens in reverse order."""

    def theory(case: Case) -> list[Any]:
        rows = np.concatenate(known(case).own_output) if own else known(case).output
        return told(case, factor(case["world_size"]) * rows)[:: -1 if backwards else 1]

    return theory


def to_norm(case: Case, *, own: bool = False) -> tuple[Any, Any]:
    """What comes back to the norm, times its weight, and its addends to the weight's gradient."""
    back = np.concatenate(known(case).own_back) if own else known(case).back
    addends = np.split(back * known(case).unit, case["world_size"])
    return back * weights(case, 0)[0], np.stack([each.sum(0) for each in addends])


def to_x(factor: Callable[[int], float] = lambda t: 1, *, own: bool = False) -> Theory:
    """So many times the gradient of x, or of what each rank finds of it."""

    def theory(case: Case) -> list[Any]:
        back, unit = to_norm(case, own=own)[0], known(case).unit
        rows = (back - unit * (back * unit).mean(1, keepdims=True)) / known(case).root
        return told(case, factor(case["world_size"]) * rows)

    return theory


def of_weights(norm: Callable[[Any, int], Any], *, own: bool = False, summed: bool = False) -> Theory:
    """``norm(addends, rank)`` and the gradients of the slices: of the own tokens alone, summed over the ranks."""

    def theory(case: Case) -> list[Any]:
        addends = to_norm(case, own=own)[1]
        slices = known(case).own_slices if own else known(case).slices
        if summed:
            slices = [[sum(each) for each in zip(*slices, strict=True)]] * len(slices)
        return [[norm(addends, rank), *each] for rank, each in enumerate(slices)]

    return theory


def phases(case: Case, number: int = 1) -> float:
    """What all ranks send for so many of them."""
    return number * (case["world_size"] - 1) * oracle.FLOAT_BYTES * case["world_size"] * float(np.prod(case["shape"]))


def needed(case: Case, number: int = PHASES) -> float:
    """So many phases, and the sum of the norm's gradient."""
    return phases(case, number) + 2 * (case["world_size"] - 1) * oracle.FLOAT_BYTES * case["shape"][1]


def of_matrices(case: Case) -> float:
    """Both matrices gathered, and their gradients scattered."""
    n = case["world_size"]
    return 2 * n * (n - 1) * oracle.FLOAT_BYTES * 2.0 * case["width"] * case["shape"][1] + needed(case, 0)


def tensors(own: float, gathered: float = 0.0) -> Callable[[Case, int], float]:
    """So many tensors of a rank's tokens, and of all tokens, a middle, and room."""

    def most(case: Case, rank: int) -> float:
        (tokens, hidden), n = case["shape"], case["world_size"]
        elements = (own + n * gathered) * tokens * hidden + n * tokens * case["width"]
        return oracle.FLOAT_BYTES * elements + ROOM

    return most


def whole(addends: Any, rank: int) -> Any:
    return addends.sum(0)


def find_matrices(each: Observed) -> Finding | None:
    """That the matrices travelled: as many bytes as they have, and their gradients, which nothing else comes near."""
    seen = each.seen.total_bytes
    is_theirs = seen > 0.99 * of_matrices(each.case)
    return Finding(f"{show_bytes(seen)} sent in all", show_bytes(needed(each.case)), each.words) if is_theirs else None


def sent_again(each: Observed) -> bool:
    """Whether the way back gathered its input again."""
    return each.seen.total_bytes > 0.99 * needed(each.case)


def is_more(each: Observed) -> bool:
    """Whether some rank kept more than one tensor of all tokens."""
    ranks = range(len(each.said))
    return any(each.seen.held(rank, "between") > tensors(4, 1)(each.case, rank) for rank in ranks)


def epsilon_alone(said: Any, case: Case) -> bool:
    """Whether the output is off for small tokens alone, the first of each rank; a sample of it does not tell."""
    length, hidden = case["shape"]
    if plain.is_array(said["output"]) and said["output"].size < length * hidden:
        return True
    return any(
        plain.is_array(said["output"])
        and said["output"].shape == wanted.shape
        and close(said["output"][1:], wanted[1:], RTOL, ATOL)
        and not close(said["output"][:1], wanted[:1], RTOL, ATOL)
        for wanted in (each.reshape(-1, hidden) for each in output()(case))
    )


OUTPUT: Wrong = {
    "epsilon forgotten": some_rank(epsilon_alone),
    "not summed": output(own=True),
    "mean for a sum": output(lambda t: 1 / t),
    "tokens of another rank": output(backwards=True),
}
INPUT: Wrong = {
    "not summed": to_x(own=True),
    "divided by the ranks": to_x(lambda t: 1 / t),
    "no gradient": some_rank(lambda said, case: said["gradient"] is None),
}
WEIGHTS: Wrong = {
    "norm's gradient not summed": of_weights(lambda addends, rank: addends[rank]),
    "norm's gradient averaged": of_weights(lambda addends, rank: addends.mean(0)),
    "own tokens alone": of_weights(whole, own=True),
    "slices summed over the ranks": of_weights(whole, summed=True),
    "no gradient": some_rank(lambda said, case: any(each is None for each in said["weights"])),
}
TRAFFIC: Wrong = {
    "an all-reduce in each scatter": lambda case: needed(case, PHASES + 2),
    "one gather too few": lambda case: needed(case, PHASES - 1),
    "weights travel": every(lambda each: find_matrices(each) is not None),
    "nothing sent": every(lambda each: not each.seen.total_bytes),
}
KEPT: Ranges = {
    "a view of the whole sum": every(lambda each: sent_again(each) and not is_more(each)),
    "gathered input kept": (tensors(4), tensors(4, 1)),
    "norm of all tokens": (tensors(4, 1), None),
}
right = partial(values, 2, rtol=RTOL, atol=ATOL, least_sent=lambda case: phases(case, 2))

EXERCISE = Exercise(
    id="sp.2", function="norm_and_mlp", title="A norm whose tokens nobody has together", harness="sp.mlp", draw=draw,
    handed_out=handed_out,
    checks=(
        own_work("norm_and_mlp", built_in=True),
        order(0, "split", "no slice leaves its rank", find_matrices, gate=True, kind="traffic", where="not weighed",
              wrong={"weights travel": every(lambda each: True)}),
        right("output", "what the whole block gives, on each rank for its tokens", output(), of="output", wrong=OUTPUT),
        right("input", "the gradient of `x`", to_x(), of="gradient", wrong=INPUT, kind="gradient"),
        right("weights", "the gradients of the norm and of the slices", of_weights(whole), of="weights", wrong=WEIGHTS,
              kind="gradient", names=lambda case: NAMES),
        sends(2, "traffic", "two phases forward, three backward, and the norm's gradient", needed, wrong=TRAFFIC,
              where="not weighed"),
        keeps(1, "kept", "nothing of all tokens that is h wide is kept for the way back", held_at("between"),
              tensors(4), "held between forward and backward", wrong=KEPT, early=shows("between", "output")),
    ),
)  # fmt: skip
