"""ep.4: tokens that go to the ranks of their experts and come back, forward and backward."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from dtlib.grading.exercises import inputs, oracle
from dtlib.grading.exercises.compare import close, show_bytes
from dtlib.grading.exercises.exercise import Exercise, Finding
from dtlib.grading.exercises.kinds import heard, order, own_work, values
from dtlib.grading.exercises.seen import Case, Observed
from dtlib.grading.exercises.signs import Sign, Wrong, every, only_if, raised, some_rank

from . import _routing
from ._experts import at_home, by_tokens, everyone, first_in_row, last_of_rank, ranks_of, tensors, theory

RTOL, ATOL = 1e-3, 1e-4  # float32, sums of some hundred numbers around 1

#: Tokens of each rank, experts of a rank, experts a token, ranks that a token visits, and which ranks are visited by
#: nobody; the last ones go mostly to experts at home, and are little beside the weights.
KINDS = (
    ((18, 18), 4, 3, 1, ()), ((21, 16, 19), 3, 4, 2, ()), ((14, 20, 17, 15), 2, 2, 1, ()),
    ((17, 0, 22), 4, 2, 1, (0, 1)), ((12, 15), 2, 4, 2, ()), ((13, 16, 0, 18), 2, 1, 1, ()),
    ((10, 12, 8), 3, 2, 1, ()),
)  # fmt: skip


def draw(rng: inputs.Rng) -> inputs.Cases:
    """Each kind: as many tokens on each rank and not, ranks without any, visited by others and not, one expert a token,
    several on one rank, and all of them."""
    return [case(rng, *kind, lean=kind == KINDS[-1]) for kind in KINDS]


def case(
    rng: inputs.Rng, tokens: tuple[int, ...], own: int, top_k: int, visits: int, idle: tuple[int, ...], *, lean: bool
) -> dict[str, Any]:
    n, width = len(tokens), 320 if lean else int(rng.integers(20, 40))
    homes = np.repeat(np.arange(n), tokens)
    liked = rng.random((len(homes), n)) - 2.0 * np.isin(np.arange(n), idle)
    liked[np.arange(len(homes)), homes] += lean * (rng.random(len(homes)) < 0.6)
    goes = np.argsort(np.argsort(-liked, axis=1), axis=1) < visits
    experts = _routing.experts(rng, len(homes), top_k, np.repeat(goes, own, axis=1) * _routing.uneven(rng, n * own))
    words = f"{n} ranks with {', '.join(map(str, tokens))} tokens and {own} experts each, {top_k} experts a token"
    told = {"two ranks": n == 2, "lean": lean, "all visited": not idle}
    drawn = {"tokens": list(tokens), "own": own, "shape": [64 + 8 * int(rng.integers(5)), width], "experts": experts}
    return drawn | {"world_size": n, "is": told, "words": words, "seed": int(rng.integers(2**31))}


def handed_out(case: Case, rank: int) -> inputs.Pieces:
    whole, n = tensors(case), case["world_size"]
    x, weights, back, experts = (
        by_tokens(case, each)[rank] for each in (whole.x, whole.weights, whole.back, case["experts"])
    )
    up, down = np.split(whole.up, n)[rank], np.split(whole.down, n)[rank]
    return [("start", {"x": x, "experts": experts, "weights": weights, "up": up, "down": down}), ("between", back)]


# Rows that leave


def row_bytes(case: Case) -> int:
    return oracle.FLOAT_BYTES * int(case["shape"][0])


def visits(case: Case) -> int:
    """Tokens that go to other ranks, once to each."""
    return int((first_in_row(case) & ~at_home(case)).sum())


def copies(case: Case) -> int:
    """Pairs of a token and an expert elsewhere."""
    return int((~at_home(case)).sum())


def padded(case: Case) -> int:
    """Rows where each rank sends as many to each other as any of them has."""
    n, goes = case["world_size"], first_in_row(case) & ~at_home(case)
    homes = np.broadcast_to(np.repeat(np.arange(n), case["tokens"])[:, None], goes.shape)
    return n * (n - 1) * int(np.bincount((homes * n + ranks_of(case))[goes]).max())


def small(case: Case) -> int:
    """What numbers of experts, weights and counts take besides, at most: all of them told to all."""
    n = case["world_size"]
    return 16 * (n - 1) * case["experts"].size + 8 * n * n * (case["own"] + 4)


def needed(case: Case) -> float:
    """What all ranks send either way: a row there and a row back for each visit."""
    return 2.0 * visits(case) * row_bytes(case)


def ways(each: Observed) -> tuple[float, float]:
    """What all ranks sent until they asked for the gradient that comes back, and after that."""
    asks = [each.seen.asked(rank, "between")[0] for rank in range(len(each.said))]
    first = float(sum(map(each.seen.sent_by, asks)))
    return first, each.seen.total_bytes - first


def find_ways(each: Observed) -> Finding | None:
    for way, seen in zip(("forward", "backward"), ways(each), strict=True):
        if not 0.99 * needed(each.case) <= seen <= needed(each.case) + small(each.case):
            return Finding(f"{show_bytes(seen)} sent {way}", f"{show_bytes(needed(each.case))} of rows", each.words)
    return None


def find_gathered(each: Observed) -> Finding | None:
    """That most of what it takes to tell all tokens to all was sent, there and back, both ways."""
    seen, whole = each.seen.total_bytes, 4 * (each.case["world_size"] - 1) * len(each.case["experts"])
    if seen <= 0.7 * whole * row_bytes(each.case):
        return None
    return Finding(f"{show_bytes(seen)} sent in all", show_bytes(2 * needed(each.case)), each.words)


def rows(*there_and_back: Callable[[Case], int]) -> Sign:
    """That so many rows were sent either way."""

    def holds(each: Observed) -> bool:
        low = row_bytes(each.case) * sum(number(each.case) for number in there_and_back)
        return all(0.99 * low <= seen <= 1.01 * low + small(each.case) for seen in ways(each))

    return every(holds)


def sent_weights(each: Observed) -> bool:
    """Whether matrices travelled."""
    (h, f), n = each.case["shape"], each.case["world_size"]
    return each.seen.total_bytes > oracle.FLOAT_BYTES * (n - 1) * n * each.case["own"] * h * f


def nothing_elsewhere(failing: Sequence[Observed], passing: Sequence[Observed]) -> bool:
    """Whether tokens without an expert on rank 0, which some cases have, have found nothing."""
    found = [(np.concatenate([said["output"] for said in each.said]), each.case) for each in failing if each.has_come]
    seen = np.concatenate([out[(ranks_of(case) > 0).all(1)].ravel() for out, case in found] or [np.empty(0)])
    return bool(seen.size) and close(seen, 0 * seen)


def nothing_at(name: str) -> Sign:
    return every(lambda each: all(said[name] is None or close(said[name], 0 * said[name]) for said in each.said))


right = partial(values, rtol=RTOL, atol=ATOL)
OUTPUT: Wrong = {
    "no way back where no token came": only_if("all visited"),
    "cut off from autograd": raised("does not require grad"),
    "weights forgotten": theory("output", power=0),
    "weighed twice": theory("output", power=2),
    "first choice alone": theory("output", lambda case: np.cumsum(everyone(case), axis=1) == 1),
    "one expert of each rank": (theory("output", first_in_row), theory("output", last_of_rank)),
    "one rank of each token": theory("output", lambda case: ranks_of(case) == ranks_of(case).max(1)[:, None]),
    "experts counted from zero": Sign(nothing_elsewhere),
}
INPUT: Wrong = {
    "no gradient": nothing_at("gradient"),
    "divided by the ranks": (theory("to_x", n_to=-1), theory("to_x", n_to=-2)),
}
ROUTER: Wrong = {"router cut off": nothing_at("router")}
lacking = some_rank(lambda said, case: any(each is None for each in said["experts"]))
EXPERTS: Wrong = {
    "times the ranks": theory("experts", n_to=1),
    "divided by the ranks": theory("experts", n_to=-1),
    "no gradient where no token came": Sign(lambda failing, passing: bool(passing) and lacking.fits(failing, passing)),
}
TRAFFIC: Wrong = {
    "a copy for each expert": rows(copies, copies),
    "each result comes back alone": rows(visits, copies),
    "padded to the longest": rows(padded, padded),
}
GATHERED: Wrong = {
    "gradients of experts summed": every(lambda each: ways(each)[0] <= needed(each.case) + small(each.case)),
    "experts gathered": every(sent_weights),
    "tokens gathered": every(lambda each: not sent_weights(each)),
}
ROUTED, ROWS = (
    "no token goes where it has no expert, and no expert leaves its rank",
    "a row there and a row back for each rank that a token visits, forward and backward",
)

EXERCISE = Exercise(
    id="ep.4", function="routed_mlp", title="Dispatch and combine", harness="ep.routed", draw=draw,
    handed_out=handed_out,
    checks=(
        own_work("routed_mlp"),
        heard("routed_mlp", lambda case: needed(case) / 4),
        order(0, "routed", ROUTED, find_gathered, gate=True, kind="traffic", where="lean", wrong=GATHERED),
        right(2, "output", "the output of each rank's tokens", theory("output"), of="output", wrong=OUTPUT),
        right(2, "input", "the gradient of `x`", theory("to_x"), of="gradient", wrong=INPUT, kind="gradient"),
        right(2, "router", "the gradient of `weights`", theory("to_weights"), of="router", wrong=ROUTER,
              kind="gradient"),
        right(2, "experts", "the gradients of `up` and `down`", theory("experts"), of="experts", wrong=EXPERTS,
              kind="gradient", names=lambda case: ("up", "down")),
        order(2, "traffic", ROWS, find_ways, wrong=TRAFFIC, kind="traffic"),
    ),
)  # fmt: skip
