"""dp.5: many micro-batches, one sync."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dtlib.grading import inputs, oracle
from dtlib.grading.compare import close
from dtlib.grading.exercise import Exercise, Finding
from dtlib.grading.kinds import GATHERED, Sign, Theory, every, only_if, order, own_work, raised, sends, values
from dtlib.grading.seen import Case, Observed

FUNCTION = "accumulate"
RTOL, ATOL = 1e-3, 1e-5  # sums in float32 of a few dozen numbers around 1


def draw(rng: np.random.Generator) -> list[dict[str, Any]]:
    """One micro-batch and several, on two ranks and on three; a weight and a bias of a layer are frozen."""
    cases: list[dict[str, Any]] = []
    for n, micro_batches in ((2, 1), (2, int(rng.integers(3, 6))), (3, int(rng.integers(2, 5)))):
        cases.append(
            {
                "world_size": n,
                "micro_batches": micro_batches,
                "samples": int(rng.integers(2, 5)),
                "widths": [48, 256, int(rng.integers(90, 140)), 1],
                "frozen": [2 * (len(cases) % 2), int(rng.choice([1, 3, 5]))],  # one of the two long weights
                "seed": int(rng.integers(0, 2**31)),
                "weights_seed": int(rng.integers(0, 2**31)),
                "words": f"{n} ranks, {micro_batches} micro-batch{'es' if micro_batches > 1 else ''} a rank",
                "is": {"two ranks": n == 2, "one micro-batch": micro_batches == 1},
            }
        )
    return cases


def handed_out(case: Case, rank: int) -> inputs.Pieces:
    """The network and its micro-batches."""
    return [("start", inputs.network(case, rank, case["micro_batches"]))]


def scaled(factor: Callable[[Case], float], *, only_last: bool = False) -> Theory:
    """A number of times the mean over all micro-batches of all ranks (or over the last of each), on every rank."""

    def theory(case: Case) -> Any:
        mean = oracle.mean_gradients(case, range(case["micro_batches"])[-1 if only_last else 0 :])
        return [oracle.combined([mean], factor(case))] * case["world_size"]

    return oracle.remembered(theory)


right = scaled(lambda case: 1.0)


def alone(factor: Callable[[Case], float]) -> Theory:
    """On each rank a number of times the sum over its own micro-batches."""

    def theory(case: Case) -> Any:
        numbers = range(case["micro_batches"])
        found = [[oracle.local_gradients(case, r, number) for number in numbers] for r in range(case["world_size"])]
        return [oracle.combined(parts, factor(case)) for parts in found]

    return oracle.remembered(theory)


ALONE = alone(lambda case: 1.0), alone(lambda case: 1 / case["micro_batches"])


def not_written_back(observed: Observed) -> bool:
    """Whether each rank holds its own gradient, although an all-reduce of it has been paid for."""
    seen = [said["gradients"] for said in observed.said]
    paid = observed.seen.total_bytes >= 0.99 * needed(observed.case)
    return paid and any(close(seen, theory(observed.case), RTOL, ATOL) for theory in ALONE)


def needed(case: Case) -> float:
    """What all ranks send in an all-reduce of the gradients that there are."""
    return 2.0 * (case["world_size"] - 1) * oracle.num_bytes(case, trained=True)


def calls(observed: Observed) -> list[list[str]]:
    """The collectives that each rank took part in, seen on the wire."""
    return [[op for op, _ in observed.seen.collectives(rank)] for rank in range(observed.case["world_size"])]


def find_one_call(observed: Observed) -> Finding | None:
    """That every rank took part in one all-reduce, and in no other collective."""
    for rank, called in enumerate(calls(observed)):
        if called != ["all_reduce"]:
            names = f" ({', '.join(called[:6])}{', …' if len(called) > 6 else ''})" if called else ""
            return Finding(f"{len(called)} collectives{names} on rank {rank}", "one all_reduce", observed.words)
    return None


def as_often(count: Callable[[Case], int]) -> Sign:
    """So many collectives on every rank."""
    return every(lambda each: all(len(called) == count(each.case) for called in calls(each)))


def num_trained(case: Case) -> int:
    """How many parameters have a gradient."""
    return len(oracle.sizes(case, trained=True))


EXERCISE = Exercise(
    id="dp.5",
    function=FUNCTION,
    title="Many micro-batches, one sync",
    harness="dp.accumulate",
    draw=draw,
    handed_out=handed_out,
    checks=(
        own_work(FUNCTION, built_in=True),
        values(
            3,
            "gradient",
            "`.grad` is that of the mean over all micro-batches of all ranks",
            right,
            of="gradients",
            kind="gradient",
            names=lambda case: [f"gradient of {name}" for name in oracle.names(case)],
            least_sent=lambda case: needed(case) / 2,
            wrong={
                "a frozen parameter has no gradient": raised("NoneType"),
                "sum over ranks": scaled(lambda case: case["world_size"]),
                "not divided by the micro-batches": scaled(lambda case: case["micro_batches"]),
                "not divided at all": scaled(lambda case: case["micro_batches"] * case["world_size"]),
                "last micro-batch only": (
                    scaled(lambda case: 1.0, only_last=True),
                    scaled(lambda case: 1 / case["micro_batches"], only_last=True),
                ),
                "not written back": every(not_written_back),
                "no sync": ALONE,
                "right for one micro-batch only": only_if("one micro-batch"),
            },
            rtol=RTOL,
            atol=ATOL,
        ),
        sends(
            2,
            "traffic",
            "the ranks send what one all-reduce of the trainable parameters needs",
            needed,
            wrong={
                "gathered, then added": GATHERED,
                "a sync for each micro-batch": lambda case: case["micro_batches"] * needed(case),
                "frozen parameters travel": lambda case: 2.0 * (case["world_size"] - 1) * oracle.num_bytes(case),
            },
        ),
        order(
            1,
            "one call",
            "the sync is one call of `all_reduce`",
            find_one_call,
            wrong={
                "a sync for each micro-batch": as_often(lambda case: case["micro_batches"]),
                "a call for each parameter": as_often(num_trained),
                "both at once": as_often(lambda case: case["micro_batches"] * num_trained(case)),
                "nothing sent": every(lambda each: not each.seen.total_bytes),
            },
        ),
    ),
)
