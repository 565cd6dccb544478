"""zero.5: gradients reduced and freed while backward goes on, stage 2.

Between two layers stands a gate (see `inputs`). All ranks but one are kept at the last gate of each backward until that
one asks what comes after it: if it does, it has not waited for what they had yet to send.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dtlib.grading import inputs, oracle
from dtlib.grading.compare import close
from dtlib.grading.exercise import Exercise
from dtlib.grading.kinds import (
    NOTHING_ELSE,
    Ranges,
    Sign,
    Theory,
    Wrong,
    every,
    heard,
    keeps,
    only_if,
    own_work,
    sends,
    values,
)
from dtlib.grading.seen import Case, Observed

from ._shared import ROOM, each_rank, positions, sent_before, share_bytes

RTOL, ATOL = 1e-3, 1e-6
LAYERS_IN_FLIGHT = 6  # a gradient, what is sent and received of it, and the same of one that is still under way


def draw(rng: np.random.Generator) -> list[dict[str, Any]]:
    """Sizes that N divides and others, biases shorter than N, frozen parameters, layers in another order, one backward
    and two; 20 layers that can be weighed."""
    cases = []
    for n, steps, odd, frozen, shuffled, weighed in (
        (2, 1, 0, (), False, False),
        (4, 2, 0, (), False, False),
        (3, 2, 1, (0, 5), False, False),
        (4, 2, 1, (), True, False),
        (2, 2, 1, (3,), False, False),
        (2, 2, 0, (), False, True),
    ):
        width = 1000 if weighed else n * int(rng.integers(40, 60) // n) + odd
        last = width if weighed or shuffled or not odd else 1
        widths = [*[width] * (20 if weighed else 6), last]
        use = list(range(len(widths) - 1))
        cases.append(
            {
                "world_size": n,
                "steps": steps,
                "samples": int(rng.integers(2, 5)),
                "widths": widths,
                "use": [*use[2:], *use[:2]] if shuffled else use,
                "frozen": list(frozen),
                "biases": not weighed,
                "gated": True,
                "weighed": weighed,
                "leader": int(rng.integers(n)),
                "seed": int(rng.integers(2**31)),
                "weights_seed": int(rng.integers(2**31)),
                "words": f"{n} ranks, {len(use)} layers of {width}×{width}"
                f"{', used in another order' if shuffled else ''}, "
                f"{steps} backward{'s' if steps > 1 else ''}{', some parameters frozen' if frozen else ''}",
                "is": {"two ranks": n == 2, "divisible": not odd, "none frozen": not frozen, "in order": not shuffled},
            }
        )
    return cases


def handed_out(case: Case, rank: int) -> inputs.Pieces:
    """The network; in each backward a key at each gate, and nothing when it has ended."""
    start = inputs.network(case, rank, case["steps"])
    start |= {"positions": asked_for(case, rank)} if case["weighed"] else {}
    backwards = [[*inputs.gates(case, rank, step), ("backward ended", None)] for step in range(case["steps"])]
    return [("start", start), *(piece for backward in backwards for piece in backward)]


def holds(case: Case) -> list[tuple[int, int, int, int]]:
    """The others stand at their last gates until the leader asks what comes after its backward."""
    others = [rank for rank in range(case["world_size"]) if rank != case["leader"]]
    ends = [(step + 1) * (len(case["widths"]) - 1) for step in range(0 if case["weighed"] else case["steps"])]
    return [(rank, end - 1, case["leader"], end) for rank in others for end in ends]


def asked_for(case: Case, rank: int) -> Any:
    """Which elements of its shares a rank is asked for."""
    return positions(case, share_bytes(case, rank) // oracle.FLOAT_BYTES)


def told(case: Case, rank: int, entries: Callable[[int], Any]) -> list[Any]:
    """What a rank tells that holds ``entries(step)`` after each backward, and no `.grad`."""
    found = []
    for step in range(case["steps"]):
        own = entries(step)
        if case["weighed"]:
            own = [oracle.flat([each for each in own if each is not None])[asked_for(case, rank)]]
        found += [*own, 0]
    return found


@oracle.remembered
def means(case: Case) -> Any:
    """The mean gradient of each backward."""
    return [oracle.mean_gradients(case, [step]) for step in range(case["steps"])]


def shares(since: Callable[[int], int] = lambda step: 0, ahead: int = 0) -> Theory:
    """The shares of each rank, or of one some numbers ahead, added up since a backward."""

    def of_rank(case: Case, rank: int) -> Any:
        of = (rank + ahead) % case["world_size"]
        return told(
            case, rank, lambda step: oracle.shares(case, of, oracle.combined(means(case)[since(step) : step + 1]))
        )

    return each_rank(of_rank)


def whole(case: Case, rank: int) -> Any:
    """The mean gradients in full."""
    added = [oracle.combined(means(case)[: step + 1]) for step in range(case["steps"])]
    return told(case, rank, lambda step: [None if each is None else each.reshape(-1) for each in added[step]])


@oracle.remembered
def contributions(case: Case) -> Any:
    """For each rank, what each of all contributes to its shares."""
    ranks, steps = range(case["world_size"]), range(case["steps"])
    local = [[oracle.local_gradients(case, source, step) for step in steps] for source in ranks]

    def shared(rank: int, of: list[Any]) -> list[Any]:
        return told(case, rank, lambda step: oracle.shares(case, rank, oracle.combined(of[: step + 1])))

    return [[shared(rank, of) for of in local] for rank in ranks]


def said(observed: Observed) -> Any:
    """What each rank told after each backward, and how many parameters had a `.grad`."""
    return [
        [each for shares, left in zip(said["shares"], said["left"], strict=True) for each in [*shares, left]]
        for said in observed.said
    ]


def names(case: Case) -> list[str]:
    """Of what a rank tells."""
    entries = ["the shares"] if case["weighed"] else [f"the share of {name}" for name in oracle.names(case)]
    steps = range(1, case["steps"] + 1)
    return [f"{name} after backward {step}" for step in steps for name in [*entries, "parameters with a `.grad`"]]


def right_first(observed: Observed) -> bool:
    """Whether all is right after the first backward."""
    wanted = shares()(observed.case)
    first = len(names(observed.case)) // observed.case["steps"]
    return all(close(one[:first], two[:first], RTOL, ATOL) for one, two in zip(said(observed), wanted, strict=True))


def let_go_early(observed: Observed) -> bool:
    """Whether the leader's backward ended while the others stood at their last gates."""
    case = observed.case
    last = {(rank, piece) for rank, piece, _, _ in holds(case)}
    return any(each.why != "quiet" for each in observed.seen.asks if (each.rank, each.number) in last)


def most(case: Case, rank: int) -> float:
    """The weights, the shares, and some layers."""
    own = share_bytes(case, rank) + LAYERS_IN_FLIGHT * oracle.FLOAT_BYTES * max(oracle.sizes(case))
    return oracle.num_bytes(case) + own + ROOM


def needed(case: Case) -> float:
    """What all ranks send for a reduce-scatter of all gradients in each backward."""
    return float(case["steps"] * (case["world_size"] - 1) * oracle.num_bytes(case, trained=True))


GRADIENT: Wrong = {
    "the gradient stays": every(lambda each: any(any(said["left"]) for said in each.said)),
    "the last one is not waited for": Sign(lambda failing, passing: any(map(let_go_early, failing))),
    "whole gradients": each_rank(whole),
    "a share of another rank": shares(ahead=1),
    "only the last backward": shares(since=lambda step: step),
    "the second backward counts otherwise": every(right_first),
    "a frozen parameter": only_if("none frozen"),
    "right for layers in order only": only_if("in order"),
}
MEMORY: Ranges = {
    "reduced after backward": every(lambda each: sent_before(each, "gate", len(each.case["widths"]) - 3) < 0.25),
    "gradients never freed": every(
        lambda each: max(each.seen.held(0, "backward ended"), 0) > 1.9 * oracle.num_bytes(each.case)
    ),
    "many in flight": NOTHING_ELSE,
}
TRAFFIC: Wrong = {
    "all-reduce": lambda case: 2 * needed(case),
    "everything gathered": lambda case: case["world_size"] * needed(case),
}
CHECKS = (
    own_work("shard_gradients", built_in=True),
    heard("shard_gradients", lambda case: needed(case) / 4),
    values(
        3, "gradient",
        "each entry is this rank's share of the mean gradient, added up over backwards, and every `.grad` is None",
        shares(), of=said, rtol=RTOL, atol=ATOL, names=names, wrong=GRADIENT, kind="gradient",
        sums=lambda case, rank: contributions(case)[rank],
    ),
    keeps(
        4, "memory", "at no moment of backward does a rank hold more than its shares and the gradients of a few layers",
        lambda seen, rank: seen.peak(rank), most, "at the peak, the weights among them", wrong=MEMORY,
    ),
    sends(
        2, "traffic", "each backward sends one reduce-scatter of all gradients", needed, where="not weighed",
        wrong=TRAFFIC,
    ),
)  # fmt: skip
EXERCISE = Exercise(
    id="zero.5",
    function="shard_gradients",
    title="Gradients that go as they come",
    harness="zero.gradients",
    draw=draw,
    handed_out=handed_out,
    holds=holds,
    checks=CHECKS,
)
