"""zero.5: gradients reduced and freed while backward goes on, stage 2.

Between two layers stands a gate (see `inputs`). All ranks but one are kept at the last gate of each backward until that
one asks what comes after it: if it does, it has not waited for what they had yet to send.
"""

from collections.abc import Callable
from typing import Any

from dtlib.grading.exercises import inputs, kinds, oracle, signs
from dtlib.grading.exercises.exercise import Exercise
from dtlib.grading.exercises.seen import Case, Observed

from ._shared import each_rank, positions, sent_before, share_bytes

RTOL, ATOL = 1e-3, 1e-6
LAYERS_IN_FLIGHT = 6  # a gradient, what is sent and received of it, and the same of one that is still under way


def draw(rng: inputs.Rng) -> inputs.Cases:
    """Sizes that N divides and others, biases shorter than N, frozen parameters, layers in another order, one backward
    and two, the second with a list that was cleared; 20 layers that can be weighed."""
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
        is_short, clears = n == 3, n == 4 and not odd
        widths = [*[width] * (20 if weighed else 6), n - 1 if is_short else width]
        use = [*range(2, len(widths) - 1), 0, 1] if shuffled else list(range(len(widths) - 1))
        words = f"{len(use)} layers of {width}×{width}{', used in another order' if shuffled else ''}, "
        words += f"{steps} backward{'s' if steps > 1 else ''}{', some parameters frozen' if frozen else ''}"
        words += f"{f', the last of {n - 1}' if is_short else ''}{', entries set to None between' if clears else ''}"
        properties = {"divisible": not odd, "none frozen": not frozen, "in order": not shuffled}
        properties |= {"long enough": not is_short}
        own = {"steps": steps, "use": use, "frozen": list(frozen), "biases": not weighed, "weighed": weighed}
        own |= {"gated": True, "clears": clears, "leader": int(rng.integers(n))}
        cases.append(inputs.training(rng, n, widths, words, properties, **own))
    return cases


def handed_out(case: Case, rank: int) -> inputs.Pieces:
    """The model; in each backward a key at each gate, and nothing when it has ended."""
    start = inputs.model(case, rank, case["steps"]) | {"clears": case["clears"]}
    start |= {"positions": asked_for(case, rank)} if case["weighed"] else {}
    backwards = [[*inputs.gates(case, rank, step), ("backward ended", None)] for step in range(case["steps"])]
    return [("start", start), *(piece for backward in backwards for piece in backward)]


def holds(case: Case) -> list[tuple[int, int, int, int]]:
    """The others stand at their last gates until the leader asks what comes after its backward."""
    others = [rank for rank in range(case["world_size"]) if rank != case["leader"]]
    ends = [(step + 1) * (len(case["widths"]) - 1) for step in range(0 if case["weighed"] else case["steps"])]
    return [(rank, end - 1, case["leader"], end) for rank in others for end in ends]


def asked_for(case: Case, rank: int) -> Any:
    return positions(case, share_bytes(case, rank) // oracle.FLOAT_BYTES)


def told(entries: Callable[[Case, int, int], Any]) -> signs.Theory:
    """What each rank tells that holds ``entries(case, rank, step)`` after each backward, and no `.grad`."""

    def of_rank(case: Case, rank: int) -> Any:
        found = []
        for step in range(case["steps"]):
            own = entries(case, rank, step)
            if case["weighed"]:
                own = [oracle.flat([each for each in own if each is not None])[asked_for(case, rank)]]
            found += [*own, 0]
        return found

    return each_rank(of_rank)


@oracle.remembered
def means(case: Case) -> Any:
    return [oracle.mean_gradients(case, [step]) for step in range(case["steps"])]


def added(case: Case, step: int) -> slice:
    """The backwards that have added to what is there after one."""
    return slice(step if case["clears"] else 0, step + 1)


def shares(case: Case, rank: int, step: int, since: int = 0) -> Any:
    """The shares of a rank, added up since a backward."""
    return oracle.shares(case, rank % case["world_size"], oracle.combined(means(case)[added(case, step)][since:]))


def whole(case: Case, rank: int, step: int) -> Any:
    """The mean gradients in full."""
    return [None if each is None else each.reshape(-1) for each in oracle.combined(means(case)[added(case, step)])]


@oracle.remembered
def contributions(case: Case) -> Any:
    """What each rank contributes to the shares of every rank."""

    def of(source: int) -> Any:
        local = [oracle.local_gradients(case, source, step) for step in range(case["steps"])]
        return told(lambda case, rank, step: oracle.shares(case, rank, oracle.combined(local[added(case, step)])))(case)

    return [of(source) for source in range(case["world_size"])]


def said(observed: Observed) -> Any:
    """What each rank told after each backward, and how many parameters had a `.grad`."""
    steps = [zip(said["shares"], said["left"], strict=True) for said in observed.said]
    return [[each for shares, left in rank for each in [*shares, left]] for rank in steps]


def names(case: Case) -> list[str]:
    entries = ["the shares"] if case["weighed"] else [f"the share of {name}" for name in oracle.names(case)]
    steps = range(1, case["steps"] + 1)
    return [f"{name} after backward {step}" for step in steps for name in [*entries, "parameters with a `.grad`"]]


def let_go_early(observed: Observed) -> bool:
    """Whether the leader's backward ended while the others stood at their last gates."""
    last = {(rank, piece) for rank, piece, _, _ in holds(observed.case)}
    return any(each.why != "quiet" for each in observed.seen.asks if (each.rank, each.number) in last)


def most(case: Case, rank: int) -> float:
    """The weights, the shares, and some layers."""
    own = share_bytes(case, rank) + LAYERS_IN_FLIGHT * oracle.FLOAT_BYTES * max(oracle.sizes(case))
    return oracle.num_bytes(case) + own + kinds.ROOM


def needed(case: Case) -> float:
    return case["steps"] * oracle.gather_bytes(case, trained=True)


right = told(shares)
GRADIENT: signs.Wrong = {
    "the gradient stays": signs.some_rank(lambda said, case: any(said["left"])),
    "the last one is not waited for": signs.Sign(lambda failing, passing: any(map(let_go_early, failing))),
    "whole gradients": told(whole),
    "a share of another rank": told(lambda case, rank, step: shares(case, rank + 1, step)),
    "only the last backward": told(lambda case, rank, step: shares(case, rank, step, since=-1)),
    "the second backward counts otherwise": signs.first_step(said, right, RTOL, ATOL),
    "a frozen parameter": signs.only_if("none frozen"),
    "right for layers in order only": signs.only_if("in order"),
}
MEMORY: kinds.Ranges = {
    "reduced after backward": signs.every(lambda each: sent_before(each, "gate", len(each.case["widths"]) - 3) < 0.25),
    "gradients never freed": signs.every(
        lambda each: each.seen.held(0, "backward ended") > 1.9 * oracle.num_bytes(each.case)
    ),
    "many in flight": signs.NOTHING_ELSE,
}
TRAFFIC: signs.Wrong = {
    "all-reduce": lambda case: 2 * needed(case),
    "everything gathered": lambda case: case["world_size"] * needed(case),
}
CHECKS = (
    kinds.own_work("shard_gradients", built_in=True),
    kinds.heard("shard_gradients", lambda case: needed(case) / 4),
    kinds.values(
        3, "gradient",
        "each entry is this rank's share of the mean gradient, added up over backwards, and every `.grad` is None",
        right, of=said, rtol=RTOL, atol=ATOL, names=names, wrong=GRADIENT, kind="gradient",
        sums=lambda case, rank: [found[rank] for found in contributions(case)],
    ),
    kinds.keeps(
        4, "memory", "at no moment of backward does a rank hold more than its shares and the gradients of a few layers",
        lambda seen, rank: seen.peak(rank), most, "at the peak, the weights among them", wrong=MEMORY,
    ),
    kinds.sends(
        2, "traffic", "each backward sends one reduce-scatter of all gradients", needed, where="not weighed",
        wrong=TRAFFIC,
    ),
)  # fmt: skip
EXERCISE = Exercise(
    id="zero.5", function="shard_gradients", title="Gradients that go as they come", harness="zero.gradients",
    draw=draw, handed_out=handed_out, holds=holds, checks=CHECKS,
)  # fmt: skip
