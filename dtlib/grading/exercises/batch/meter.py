"""batch.2: the noise of gradients from what ranks hold anyway: two squares, two estimates, one all-reduce."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dtlib.grading.exercises import inputs, oracle
from dtlib.grading.exercises.compare import show_bytes
from dtlib.grading.exercises.exercise import Exercise, Finding
from dtlib.grading.exercises.kinds import heard, order, own_work, values
from dtlib.grading.exercises.seen import Case, Observed
from dtlib.grading.exercises.signs import Theory, Wrong, every, only_if

Array = inputs.Array
RTOL, ATOL = 1e-3, 1e-3  # float32, squares around 1, variances around 50
MORE = 64  # bytes that a rank may send besides, in a step, to each other rank

#: Ranks, rows (0: none), entries of a row, steps, and what is particular: as many samples on all ranks, other ones in
#: every step, gradients that are all noise, ranks that see the same samples, and a rank with few of them whose gradient
#: is short by chance.
KINDS = (
    (2, 0, 1900, 3, "equal"), (3, 0, 1500, 4, "different"), (4, 41, 40, 3, "different"), (3, 0, 500, 4, "noise"),
    (4, 0, 1500, 2, "the same"), (2, 30, 50, 5, "different"), (3, 0, 1600, 3, "short"),
)  # fmt: skip


def drawn(rng: inputs.Rng, n: int, rows: int, columns: int, steps: int, particular: str) -> dict[str, Any]:
    """Where counts differ, some rank has twice as many samples as another in each step.

    All noise: there the estimate of ‖G‖² is below 0 in one step, and above in another, and what is told of it is never
    near 0. Where a gradient is short, the estimate of σ² is below 0 in a step.
    """
    columns += int(rng.integers(0, 9))
    shape = [rows, columns] if rows else [columns]
    while True:
        counts = rng.integers(4, 65, (steps, n))
        if particular == "different" and (counts.max(1) < 2 * counts.min(1)).any():
            continue
        counts = np.full((steps, n), counts[0, 0]) if particular in ("equal", "the same") else counts
        words = f"{n} ranks, gradients of shape {tuple(shape)}, {steps} steps, of {counts.tolist()} samples"
        case = {"world_size": n, "shape": shape, "steps": steps, "counts": counts.tolist(), "particular": particular}
        case |= {"words": f"{words} ({particular})", "seed": int(rng.integers(2**31))}
        case["is"] = {"two ranks": n == 2, "one dimension": not rows, "noise": particular == "noise"}
        case["is"]["a first meter"] = (n, particular) in ((2, "equal"), (3, "different"), (4, "different"))
        if is_clear(case):
            return case


def is_clear(case: Case) -> bool:
    """Whether nothing hangs on rounding, and estimates are below 0 where it is drawn."""
    steps = zip(gradients(case).astype(float), np.array(case["counts"]), strict=True)
    told = [two_estimates(rows, counts, 0) for rows, counts in steps]
    squares, variances = np.array([so_far(told[: step + 1]) for step in range(len(told))]).T
    if case["particular"] == "noise":
        each = np.cumsum(np.maximum(0, [square for square, _ in told])) / np.arange(1, len(told) + 1)
        differs = np.abs(np.maximum(0, squares) - each).max() > 0.1
        return bool(squares.min() < -0.1 and np.abs(squares).min() > 0.1 and differs)
    if case["particular"] == "short":
        return bool(variances[0] < -1 and np.abs(variances).min() > 1)
    return bool(squares.min() > 0.1)


@oracle.remembered
def gradients(case: Case) -> Array:
    """[steps, ranks, entries], float32: what all samples have in common, and noise that falls with the samples. It lies
    in few directions, so that one step tells little."""
    rng, counts = np.random.default_rng(case["seed"]), np.array(case["counts"])[:, :, None]
    size = int(np.prod(case["shape"]))
    common = rng.normal(0, 1, size) / np.sqrt(size) * (case["particular"] != "noise")
    spread = np.where(np.arange(size) % (size // 12) == 3, 1, 0.02)
    spread = spread * np.sqrt((60 if case["particular"] == "noise" else 20) / (spread**2).sum())
    drawn = rng.normal(0, 1, (*counts.shape[:2], size))
    if case["particular"] == "the same":
        drawn = np.repeat(drawn[:, :1], counts.shape[1], axis=1)
    found = common * np.linspace(1.6, 1.2, len(counts))[:, None, None] + drawn * spread / np.sqrt(counts)
    if case["particular"] == "short":
        found[0, np.argmin(counts[0])] *= 0.1
    return found.astype(np.float32)


def handed_out(case: Case, rank: int) -> inputs.Pieces:
    own = zip(gradients(case)[:, rank], case["counts"], strict=True)
    return [("steps", case["steps"])] + [
        ("gradient", {"gradient": each.reshape(case["shape"]), "num_samples": counts[rank]}) for each, counts in own
    ]


# A step: the gradients of all ranks in rows, and their samples.


def by_samples(rows: Array, counts: Array) -> Array:
    return np.array(counts @ rows / counts.sum())


def two_estimates(rows: Array, counts: Array, rank: int) -> tuple[float, float]:
    """(‖G‖², σ²) by the two equations that are right in the mean."""
    return solved((rows**2).sum(1).mean(), (by_samples(rows, counts) ** 2).sum(), (1 / counts).mean(), 1 / counts.sum())


def solved(small: float, large: float, per_small: float, per_large: float) -> tuple[float, float]:
    square, variance = np.linalg.solve([[1, per_small], [1, per_large]], [small, large])
    return float(square), float(variance)


So = Callable[[Sequence[tuple[float, float]]], tuple[float, float]]
"""Of the estimates of all steps so far those that are told."""


def so_far(told: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return float(np.mean([each[0] for each in told])), float(np.mean([each[1] for each in told]))


def theory(name: str, estimate: Callable[..., Any] = two_estimates, so: So = so_far, ratio: Any = None) -> Theory:
    """Of each rank the numbers called `name` after each step; ``ratio(steps)`` is a scale of another kind."""

    def of(case: Case) -> list[Any]:
        steps = list(zip(gradients(case).astype(np.float64), np.array(case["counts"]), strict=True))
        found = []
        for rank in range(case["world_size"]):
            told = [estimate(rows, counts, rank) for rows, counts in steps]
            pairs = [so(told[: step + 1]) for step in range(len(told))]
            if name == "scale":
                scales = [variance / square for square, variance in pairs]
                found.append([ratio(told[: step + 1]) for step in range(len(told))] if ratio else scales)
            else:
                found.append([each[name == "variance"] for each in pairs])
        return found

    return oracle.remembered(of)


SQUARE, VARIANCE, SCALE = (theory(name) for name in ("square", "variance", "scale"))


def of_mean(join: Callable[[Array, Array], Array] = by_samples, own: bool = False) -> Theory:
    """Of each rank what the optimizer gets, in each step."""

    def of(case: Case) -> list[Any]:
        steps = list(zip(gradients(case).astype(np.float64), np.array(case["counts"]), strict=True))
        shape = case["shape"]
        return [[(rows[rank] if own else join(rows, counts)).reshape(shape) for rows, counts in steps]
                for rank in range(case["world_size"])]  # fmt: skip

    return oracle.remembered(of)


def other(per_small: Any = None, per_large: Any = None, small: Any = None, large: Any = None) -> Callable[..., Any]:
    """Two equations in which one thing is another."""

    def estimate(rows: Array, counts: Array, rank: int) -> tuple[float, float]:
        right = ((rows**2).sum(1).mean(), (by_samples(rows, counts) ** 2).sum(), (1 / counts).mean(), 1 / counts.sum())
        wrong = small, large, per_small, per_large
        return solved(*(two(rows, counts, rank) if two else one for one, two in zip(right, wrong, strict=True)))

    return estimate


def changed(change: Callable[[float, float, Array, Array], tuple[float, float]]) -> Callable[..., Any]:
    """The two estimates, one of them changed."""
    return lambda rows, counts, rank: change(*two_estimates(rows, counts, rank), rows, counts)


ESTIMATES: dict[str, Callable[..., Any]] = {
    "the mean of the counts": other(per_small=lambda rows, counts, rank: 1 / counts.mean()),
    "own samples for all": other(per_small=lambda rows, counts, rank: 1 / counts[rank]),
    "its own square": other(
        per_small=lambda rows, counts, rank: 1 / counts[rank], small=lambda rows, counts, rank: (rows[rank] ** 2).sum()
    ),
    "squares by samples": other(small=lambda rows, counts, rank: counts @ (rows**2).sum(1) / counts.sum()),
    "square of the mean length": other(small=lambda rows, counts, rank: np.sqrt((rows**2).sum(1)).mean() ** 2),
    "square of the plain mean": other(large=lambda rows, counts, rank: (rows.mean(0) ** 2).sum()),
    "lengths for squares": other(
        small=lambda rows, counts, rank: np.sqrt((rows**2).sum(1)).mean(),
        large=lambda rows, counts, rank: np.sqrt((by_samples(rows, counts) ** 2).sum()),
    ),
    "each step cut off": changed(lambda square, variance, rows, counts: (max(0.0, square), variance)),
    "a variance cut off": changed(lambda square, variance, rows, counts: (square, max(0.0, variance))),
    "a variance without its sign": changed(lambda square, variance, rows, counts: (square, abs(variance))),
    "that of the mean itself": changed(
        lambda square, variance, rows, counts: ((by_samples(rows, counts) ** 2).sum(), variance)
    ),
    "of a rank's mean": changed(lambda square, variance, rows, counts: (square, variance * (1 / counts).mean())),
    "of a step": changed(lambda square, variance, rows, counts: (square, variance / counts.sum())),
    "a difference of squares": changed(
        lambda square, variance, rows, counts: (square, variance * ((1 / counts).mean() - 1 / counts.sum()))
    ),
    "divided by N": changed(lambda square, variance, rows, counts: (square, variance * (1 - 1 / len(counts)))),
}
JOINED: dict[str, So] = {
    "below zero cut off": lambda told: (max(0.0, so_far(told)[0]), so_far(told)[1]),
    "without its sign": lambda told: (abs(so_far(told)[0]), so_far(told)[1]),
    "the last step alone": lambda told: told[-1],
    "the first step alone": lambda told: told[0],
    "sums of the steps": lambda told: (sum(each[0] for each in told), sum(each[1] for each in told)),
}
RATIOS: dict[str, Any] = {
    "a mean of ratios": lambda told: float(np.mean([variance / square for square, variance in told])),
    "upside down": lambda told: so_far(told)[0] / so_far(told)[1],
    "without its sign": lambda told: abs(so_far(told)[1] / so_far(told)[0]),
}
MEAN: Wrong = {
    "plain mean": of_mean(lambda rows, counts: rows.mean(0)), "sum for mean": of_mean(lambda rows, counts: rows.sum(0)),
    "not divided": of_mean(lambda rows, counts: counts @ rows), "no sync": of_mean(own=True),
    "divided by the ranks": of_mean(lambda rows, counts: counts @ rows / len(counts)),
}  # fmt: skip


def part(points: int, name: str, description: str, right: Theory) -> Any:
    known = {each: theory(name, estimate) for each, estimate in ESTIMATES.items()}
    known |= {each: theory(name, so=so) for each, so in JOINED.items()}
    ratios = {each: theory(name, ratio=ratio) for each, ratio in RATIOS.items()} if name == "scale" else {}
    wrong: Any = {each: tuple(some[each] for some in (ratios, known) if each in some) for each in {**ratios, **known}}
    wrong["another meter's steps"] = only_if("a first meter")
    return values(points, name, description, right, of=name, rtol=RTOL, atol=ATOL, wrong=wrong)


def needed(case: Case) -> float:
    """What all ranks send in an all-reduce of the gradient in each step."""
    return 2.0 * (case["world_size"] - 1) * case["steps"] * oracle.FLOAT_BYTES * int(np.prod(case["shape"]))


def find_more(each: Observed) -> Finding | None:
    seen, n = each.seen.total_bytes, each.case["world_size"]
    if seen <= 1.01 * needed(each.case) + MORE * n * (n - 1) * each.case["steps"]:
        return None
    return Finding(f"{show_bytes(seen)} sent in all", f"hardly more than {show_bytes(needed(each.case))}", each.words)


def is_twice(each: Observed) -> bool:
    """Whether one all-reduce sends twice what a step needs."""
    longest = max((size for name, size in each.seen.collectives() if name == "all_reduce"), default=0)
    return 1.9 < longest * each.case["steps"] / needed(each.case) < 2.1


def times(least: Callable[[int], float]) -> Any:
    return every(lambda each: each.seen.total_bytes >= 0.99 * least(each.case["world_size"]) * needed(each.case))


EXERCISE = Exercise(
    id="batch.2", function="noise_meter", title="The noise that ranks can see", harness="batch.measured",
    draw=inputs.in_order(KINDS, drawn), handed_out=handed_out,
    checks=(
        own_work("noise_meter", built_in=True),
        heard("noise_meter", lambda case: needed(case) / 2),
        values(2, "mean", "what the optimizer gets, in each step", of_mean(), of="mean", rtol=RTOL, atol=1e-5,
               kind="gradient", wrong=MEAN),
        part(2, "square", "the estimate of ‖G‖² after each step", SQUARE),
        part(2, "variance", "the estimate of σ² after each step", VARIANCE),
        part(2, "scale", "the noise scale after each step", SCALE),
        order(2, "traffic", "one all-reduce of the gradient in each step, and a few numbers", find_more,
              kind="traffic", wrong={"twice the bytes at a time": every(is_twice),
                                     "two all-reduces": times(lambda n: 2), "gathered": times(lambda n: n / 2)}),
    ),
)  # fmt: skip
