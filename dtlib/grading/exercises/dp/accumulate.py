"""dp.5: many micro-batches, one sync."""

from collections.abc import Callable
from typing import Any

from dtlib.grading.exercises import inputs, kinds, oracle, signs
from dtlib.grading.exercises.compare import close
from dtlib.grading.exercises.exercise import Exercise, Finding
from dtlib.grading.exercises.seen import Case, Observed

RTOL, ATOL = 1e-3, 1e-5  # sums in float32 of a few dozen numbers around 1


def draw(rng: inputs.Rng) -> inputs.Cases:
    """One micro-batch and several, on two ranks and on three; a weight and a bias of a layer are frozen."""
    cases: inputs.Cases = []
    for n, micro_batches in ((2, 1), (2, int(rng.integers(3, 6))), (3, int(rng.integers(2, 5)))):
        widths = [48, 256, int(rng.integers(90, 140)), 1]
        frozen = [2 * (len(cases) % 2), int(rng.choice([1, 3, 5]))]  # one of the two long weights
        words = f"{micro_batches} micro-batch{'es' if micro_batches > 1 else ''} a rank"
        own = {"micro_batches": micro_batches, "frozen": frozen}
        cases.append(inputs.training(rng, n, widths, words, {"one micro-batch": micro_batches == 1}, **own))
    return cases


def handed_out(case: Case, rank: int) -> inputs.Pieces:
    return [("start", inputs.model(case, rank, case["micro_batches"]))]


def scaled(factor: Callable[[Case], float] = lambda case: 1.0, *, only_last: bool = False) -> signs.Theory:
    """A number of times the mean over all micro-batches of all ranks (or over the last of each), on every rank."""

    def theory(case: Case) -> Any:
        mean = oracle.mean_gradients(case, range(case["micro_batches"])[-1 if only_last else 0 :])
        return [oracle.combined([mean], factor(case))] * case["world_size"]

    return oracle.remembered(theory)


def first_only(case: Case) -> Any:
    m = case["micro_batches"]
    return scaled()(dict(case, micro_batches=1)) if m > 1 else None


def all_but_last(case: Case) -> Any:
    m = case["micro_batches"]
    return [oracle.combined([own], (m - 1) / m) for own in scaled()(dict(case, micro_batches=m - 1))] if m > 1 else None


@oracle.remembered
def alone(case: Case) -> Any:
    """On each rank the sum over its own micro-batches."""
    numbers, ranks = range(case["micro_batches"]), range(case["world_size"])
    return [oracle.combined([oracle.local_gradients(case, rank, number) for number in numbers]) for rank in ranks]


def is_alone(observed: Observed) -> bool:
    """Whether each rank holds the sum over its own micro-batches, divided by their number, by the ranks, or by both."""
    sums, m, n = alone(observed.case), observed.case["micro_batches"], observed.case["world_size"]
    factors = (1, 1 / m, 1 / n, 1 / m / n)
    seen = [said["gradients"] for said in observed.said]
    return any(close(seen, [oracle.combined([own], factor) for own in sums], RTOL, ATOL) for factor in factors)


def needed(case: Case) -> float:
    return 2 * oracle.gather_bytes(case, trained=True)


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


def as_often(count: Callable[[Case], int]) -> signs.Sign:
    return signs.every(lambda each: all(len(called) == count(each.case) for called in calls(each)))


GRADIENT: signs.Wrong = {
    "a frozen parameter has no gradient": signs.raised("NoneType"),
    "sum over ranks": scaled(lambda case: case["world_size"]),
    "not divided by the micro-batches": scaled(lambda case: case["micro_batches"]),
    "not divided at all": scaled(lambda case: case["micro_batches"] * case["world_size"]),
    "divided twice": scaled(lambda case: 1 / case["world_size"]),
    "divided by the micro-batches twice": scaled(lambda case: 1 / case["micro_batches"]),
    "first micro-batch only": first_only,
    "last micro-batch only": (scaled(only_last=True), scaled(lambda case: 1 / case["micro_batches"], only_last=True)),
    "last micro-batch missing": all_but_last,
    "not written back": signs.every(lambda each: is_alone(each) and each.seen.total_bytes >= 0.99 * needed(each.case)),
    "no sync": signs.every(is_alone),
    "the mean on top of one's own": lambda case: [*map(oracle.combined, zip(scaled()(case), alone(case), strict=True))],
    "right for one micro-batch only": signs.only_if("one micro-batch"),
}
TRAFFIC: signs.Wrong = {
    "gathered, then added": signs.GATHERED,
    "a sync for each micro-batch": lambda case: case["micro_batches"] * needed(case),
    "frozen parameters travel": lambda case: 2 * oracle.gather_bytes(case),
}
ONE_CALL: signs.Wrong = {
    "a sync for each micro-batch": as_often(lambda case: case["micro_batches"]),
    "a call for each parameter": as_often(lambda case: len(oracle.sizes(case, trained=True))),
    "nothing sent": signs.every(lambda each: not each.seen.total_bytes),
}
CHECKS = (
    kinds.own_work("accumulate", built_in=True),
    kinds.values(
        3, "gradient", "`.grad` is that of the mean over all micro-batches of all ranks", scaled(), of="gradients",
        kind="gradient", names=lambda case: [f"gradient of {name}" for name in oracle.names(case)],
        least_sent=lambda case: needed(case) / 2, wrong=GRADIENT, rtol=RTOL, atol=ATOL,
    ),
    kinds.sends(
        2, "traffic", "the ranks send what one all-reduce of the trainable parameters needs", needed, wrong=TRAFFIC
    ),
    kinds.order(1, "one call", "the sync is one call of `all_reduce`", find_one_call, wrong=ONE_CALL),
)  # fmt: skip
EXERCISE = Exercise(
    id="dp.5", function="accumulate", title="Many micro-batches, one sync", harness="dp.accumulate",
    draw=draw, handed_out=handed_out, checks=CHECKS,
)  # fmt: skip
