"""asynchrony.7: a server that waits for nobody, and knows how old a gradient is.

The desk says who is done with a gradient and when: one is kept back until the worker of the one before stands there
again, with the weights that it was answered with. So the order is known, and what each worker shows of its weights.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from dtlib.grading.exercises import inputs, oracle
from dtlib.grading.exercises.compare import close, show_bytes
from dtlib.grading.exercises.exercise import Exercise, Finding
from dtlib.grading.exercises.kinds import heard, order, own_work, values
from dtlib.grading.exercises.seen import Ask, Case, Observed
from dtlib.grading.exercises.signs import Theory, Wrong, every

Array = inputs.Array
RTOL, ATOL = 1e-4, 1e-4
HEADER_BYTES = 64  # for what stands beside the weights in a message, or in one of its own

#: Workers, weights, and who is done, in this order: in turn, one alone, one twice as fast, one that comes late, never.
KINDS = (
    (1, 40, "1111"), (2, 300, "112121122"), (2, 75, "2212"), (3, 500, "12213331123"), (3, 900, "2112212213"),
    (3, 61, "331323"), (2, 1200, "1211"),
)  # fmt: skip


def drawn(rng: inputs.Rng, workers: int, size: int, done: str) -> dict[str, Any]:
    """Workers in any order."""
    names = rng.permutation(workers) + 1
    turns, size = [int(names[int(each) - 1]) for each in done], size + int(rng.integers(0, 9))
    told = f"{workers} worker{'s' * (workers > 1)}, {size} weights, updates of rank {', '.join(map(str, turns))}"
    return {
        "world_size": workers + 1, "size": size, "turns": turns, "rate": float(rng.choice([0.25, 0.5, 0.75])),
        "seed": int(rng.integers(2**31)), "words": told, "is": {},
    }  # fmt: skip


def computed(case: Case, worker: int) -> int:
    """How many gradients a worker asks for: those that are applied, and one that comes when there are enough."""
    return case["turns"].count(worker) + (worker != case["turns"][-1])


@oracle.remembered
def numbers(case: Case) -> tuple[Array, dict[int, Array]]:
    """The weights at the start, and of each worker its gradients, [gradients, weights], float32."""
    rng, size = np.random.default_rng(case["seed"]), case["size"]
    start = rng.normal(0, 1, (size,)).astype(np.float32)
    most = len(case["turns"]) + 1  # more than are due, for who asks for more: what is left, the harness takes
    workers = range(1, case["world_size"])
    return start, {each: rng.normal(0, 2, (most, size)).astype(np.float32) for each in workers}


def handed_out(case: Case, rank: int) -> inputs.Pieces:
    start, gradients = numbers(case)
    own = gradients.get(rank, ())
    told = {"weights": start, "rate": case["rate"], "updates": len(case["turns"]), "gradients": len(own)}
    return [("start", told), *(("gradient", each) for each in own)]


def holds(case: Case) -> list[tuple[int, int, int, int]]:
    """A gradient is there when the worker of the one before asks again; one that is not applied, when nothing moves."""
    kept, had, before = [], dict.fromkeys(range(1, case["world_size"]), 0), 0
    for worker in case["turns"]:
        had[worker] += 1
        if before not in (0, worker):
            kept.append((worker, had[worker], before, had[before] + 1))
        before = worker
    return kept + [(each, had[each] + 1, -1, 0) for each in had if each != before]


# What a server does with a gradient

Factor = Callable[[int, int], float]
"""(age, workers): by what the rate is multiplied."""
Told = Callable[[int, int], int]
"""(updates so far, of them this worker's): which version it takes its weights for."""


def replay(
    *,
    factor: Factor = lambda age, n: 1 / (1 + age),
    before: bool = False,
    kept: bool = False,
    told: Told = lambda updates, own: updates,
    late: int = 0,
) -> Callable[[Case], tuple[list[list[float]], list[Array] | None]]:
    """The size of the weights with which each worker asks for each gradient, and the last weights of each rank. What is
    named: an answer goes out `before` the update, or is `told` another version; a worker's own weights are `kept`; at
    the end a gradient that comes `late` is applied, or the last is missed (−1)."""

    def of(case: Case) -> tuple[list[list[float]], list[Array] | None]:
        start, gradients = numbers(case)
        now: Array = np.asarray(start, np.float64)
        own, version = dict.fromkeys(gradients, now), dict.fromkeys(gradients, 0)
        asked = {each: [now] for each in gradients}
        turns = case["turns"]

        def moved(worker: int, update: int, which: int) -> Array:
            down = case["rate"] * factor(update - version[worker], len(gradients)) * gradients[worker][which]
            return np.asarray((own[worker] if kept else now) - down)

        for update, worker in enumerate(turns):
            is_missed = late < 0 and update == len(turns) - 1
            old, now = now, now if is_missed else moved(worker, update, len(asked[worker]) - 1)
            own[worker], version[worker] = old if before else now, told(update + 1, len(asked[worker]))
            asked[worker].append(own[worker])
        shown = [[float(np.linalg.norm(one)) for one in asked[each][: computed(case, each)]] for each in asked]
        ends = [now] * case["world_size"]
        coming = [each for each in gradients if each != turns[-1]]
        if late > 0 and len(coming) == 1:
            ends[0] = ends[coming[0]] = moved(coming[0], len(turns), len(asked[coming[0]]) - 1)
        # Of several that come late, nobody knows which is first.
        return [[], *shown], None if late > 0 and len(coming) > 1 else ends

    return oracle.remembered(of)


def fetched(**how: Any) -> Theory:
    told = replay(**how)
    return lambda case: told(case)[0]


def last(**how: Any) -> Theory:
    told = replay(**how)
    return lambda case: told(case)[1]


def unrated(case: Case) -> Case:
    return {**case, "rate": 1.0}


def shown(each: Observed) -> list[list[float]]:
    """What each rank showed when it asked for its gradients; the harness shows nothing when it takes what is left."""
    return [[ask.shown for ask in asks(each) if ask.rank == rank] for rank in range(each.case["world_size"])]


def asks(each: Observed) -> list[Ask]:
    return [ask for ask in each.seen.asks if ask.label == "gradient" and not math.isnan(ask.shown)]


HOW: dict[str, dict[str, Any]] = {
    "the whole rate": {"factor": lambda age, n: 1.0},
    "divided by the age": {"factor": lambda age, n: 1 / max(age, 1)},
    "one age for all": {"factor": lambda age, n: 1 / n},
    "its own update counted": {"factor": lambda age, n: 1 / (2 + age)},
    "uphill": {"factor": lambda age, n: -1 / (1 + age)},
    "the version of the start": {"told": lambda updates, own: 0},
    "its own gradients counted": {"told": lambda updates, own: own},
    "answered before the update": {"before": True},
    "weights for gradients": {"kept": True},
}


def is_begun(seen: list[list[float]], due: list[list[float]]) -> bool:
    return close([one[: len(two)] for one, two in zip(seen, due, strict=True)], due, 1e-3)


def is_aged(each: Observed) -> bool:
    """That what is shown is right until the first gradient that is not fresh, and not from then on."""
    turns = each.case["turns"]
    fresh = next((at for at, (one, two) in enumerate(pairwise(turns), 1) if one != two), None)
    seen, wanted = shown(each), fetched()(each.case)
    due = [one[: turns[:fresh].count(rank) + 1] for rank, one in enumerate(wanted)]
    return fresh is not None and is_begun(seen, due) and not is_begun(seen, wanted)


def stopped(case: Case) -> list[list[float]]:
    """What is asked for when the server has enough one update early."""
    early = {**case, "turns": case["turns"][:-1]}
    return [one[: computed(early, rank)] if rank else [] for rank, one in enumerate(fetched()(case))]


def is_behind(each: Observed) -> bool:
    """That rank 0 has the last weights, and each worker those of its last gradient, of the start, or these."""
    wanted, told = (replay()(each.case)[1] or [])[0], [said["weights"] for said in each.said]
    sizes = [[*asked[-1:], float(np.linalg.norm(numbers(each.case)[0]))] for asked in shown(each)]
    is_right = [close(one, wanted, RTOL, ATOL) for one in told]
    is_old = [np.isclose(np.linalg.norm(one), size, rtol=1e-3).any() for one, size in zip(told, sizes, strict=True)]
    return is_right[0] and all(np.logical_or(is_right, is_old))


FETCHED: Wrong = {
    **{name: fetched(**how) for name, how in HOW.items()},
    "one age for all": tuple(fetched(factor=each) for each in (lambda age, n: 1 / n, lambda age, n: 0.5)),
    "its own update counted": (fetched(factor=lambda age, n: 1 / (2 + age)), fetched(told=lambda made, own: made - 1)),
    "without the rate": lambda case: replay()(unrated(case))[0],
    "stops one update early": stopped,
    "old gradients only": every(is_aged),
    "asks once too often": every(lambda each: is_begun(shown(each), fetched()(each.case))),
}
LAST: Wrong = {
    **{name: last(**how) for name, how in HOW.items()},
    "without the rate": lambda case: replay()(unrated(case))[1],
    "old gradients only": every(is_aged),
    "late gradients applied": last(late=1),
    "one update too few": last(late=-1),
    "on rank 0 only": every(is_behind),
}


def waits(each: Observed) -> Finding | None:
    """That a worker did not come back, with nothing else under way, before another was done."""
    for ask in asks(each)[: len(each.case["turns"]) - 1]:  # the last is quiet where the server stops too early
        if ask.why == "quiet":
            return Finding("a worker that was not answered until another was done", "an answer at once", each.words)
    return None


def needed(case: Case) -> float:
    """What all gradients and all answers take."""
    messages = 2 * sum(computed(case, each) for each in range(1, case["world_size"]))
    return float(messages * case["size"] * oracle.FLOAT_BYTES)


def find_more(each: Observed) -> Finding | None:
    """That more was sent than a gradient there and the weights back, for each gradient."""
    wanted = needed(each.case)
    messages = wanted / oracle.FLOAT_BYTES / each.case["size"]
    if each.seen.total_bytes <= 1.02 * wanted + HEADER_BYTES * (messages + 2 * each.case["world_size"]):
        return None
    return Finding(f"{show_bytes(each.seen.total_bytes)} sent in all", f"about {show_bytes(wanted)}", each.words)


EXERCISE = Exercise(
    id="asynchrony.7", function="train", title="A server that waits for nobody", harness="asynchrony.served",
    draw=inputs.in_order(KINDS, drawn), handed_out=handed_out, holds=holds,
    checks=(
        own_work("train"),
        heard("train", lambda case: needed(case) / 4),
        order(3, "waits", "no worker waits for another", waits, wrong={"waits for another": every(lambda each: True)}),
        values(3, "fetched", "the weights with which a worker asks for its next gradient, told by their norms",
               fetched(), of=shown, rtol=1e-3, wrong=FETCHED),
        values(2, "last", "the last weights, on all ranks", last(), of="weights", rtol=RTOL, atol=ATOL, wrong=LAST),
        order(2, "traffic", "a gradient there and the weights back", find_more, kind="traffic",
              wrong={"more than an answer": every(lambda each: True)}),
    ),
)  # fmt: skip
