"""compression.3: the largest entries of each rank, gathered, and what is left over for the next step."""

from collections.abc import Callable
from typing import Any

import numpy as np

from dtlib.grading.exercises import inputs, oracle
from dtlib.grading.exercises.compare import show_bytes
from dtlib.grading.exercises.exercise import Exercise, Finding
from dtlib.grading.exercises.kinds import heard, near, order, own_work, values
from dtlib.grading.exercises.seen import Case, Observed
from dtlib.grading.exercises.signs import Sign, Theory, Wrong, every, raised

Array = inputs.Array
RTOL, ATOL = 1e-4, 1e-4
ENTRY_BYTES = 12  # a value, and an index of 8 bytes at most

#: Ranks, rows (0: none), entries of a row, entries that are kept, steps, and which ranks have gradients of zeros.
KINDS = (
    (1, 0, 90, 11, 3, ()), (2, 0, 900, 70, 3, ()), (3, 37, 41, 100, 3, ()), (4, 0, 1603, 90, 4, ()),
    (3, 0, 1000, 61, 2, (1,)), (2, 3, 5, 40, 2, ()), (2, 0, 700, 50, 2, (0, 1)),
)  # fmt: skip


def drawn(
    rng: inputs.Rng, n: int, rows: int, columns: int, k: int, steps: int, idle: tuple[int, ...]
) -> dict[str, Any]:
    """Flat and in rows, lengths that the ranks divide and not, more kept than there is, and zeros."""
    columns, k = columns + int(rng.integers(0, 7)), k + int(rng.integers(0, 7))
    shape = [rows, columns] if rows else [columns]
    zeros = f", gradients of zeros on rank {', '.join(map(str, idle))}" if idle else ""
    words = f"{n} {'ranks' if n > 1 else 'rank'}, gradients of shape {tuple(shape)}, k={k}, {steps} steps{zeros}"
    told = {"one dimension": not rows, "two ranks": n == 2, "sparse": k < columns}
    while True:
        case = {"world_size": n, "shape": shape, "k": k, "steps": steps, "idle": list(idle), "words": words, "is": told}
        case["seed"] = int(rng.integers(2**31))
        if is_clear(case):
            return case


@oracle.remembered
def gradients(case: Case) -> Array:
    """[steps, ranks, entries], float32: some entries are larger than others, so that ranks often choose the same."""
    rng = np.random.default_rng(case["seed"])
    size = (case["steps"], case["world_size"], int(np.prod(case["shape"])))
    found = rng.normal(0, 1, size) * np.exp(rng.normal(0, 0.7, size[2]))
    found[:, case["idle"]] = 0
    return found.astype(np.float32)


def handed_out(case: Case, rank: int) -> inputs.Pieces:
    start = {name: case[name] for name in ("shape", "k", "steps")}
    return [("start", start), *(("gradient", each[rank].reshape(case["shape"])) for each in gradients(case))]


# What ranks do in a step; arrays have a row a rank.

Choose = Callable[[Array, Array, int], Array]
"""(meant, gradients, k): which entries each rank sends."""
Remember = Callable[[Array, Array, Array, Array], Array]
"""(meant, sent, mean, residuals): the residuals after the step."""


def largest(meant: Array, own: Array, k: int) -> Array:
    """The k largest of a row."""
    return np.argsort(np.argsort(-meant, axis=1, kind="stable"), axis=1, kind="stable") < k


def by_size(meant: Array, own: Array, k: int) -> Array:
    return largest(np.abs(meant), own, k)


def left_over(meant: Array, sent: Array, mean: Array, residuals: Array) -> Array:
    return meant - sent


def theory(
    name: str, choose: Choose = by_size, remember: Remember = left_over, join: Callable[[Array], Any] | None = None
) -> Theory:
    """Of each rank its means, or residuals, after each step; `join` makes of what was sent the mean of all ranks.

    Which zeros are sent where all are alike, nobody knows: of a `join` by what was sent nothing is said there.
    """

    def of(case: Case) -> list[Any] | None:
        if case["idle"] and join in (by_those_who_sent, last_one):
            return None
        own, found = gradients(case).astype(np.float64), []
        residuals = np.zeros_like(own[0])
        for step in own:
            meant = step + residuals
            sent = np.where(choose(meant, step, case["k"]), meant, 0)
            mean = np.broadcast_to(join(sent) if join else sent.mean(0), sent.shape)
            residuals = remember(meant, sent, mean, residuals)
            found.append(mean if name == "means" else residuals)
        return [[each[rank].reshape(case["shape"]) for each in found] for rank in range(case["world_size"])]

    return oracle.remembered(of)


def is_clear(case: Case) -> bool:
    """Whether no rank's choice hangs on rounding."""
    own = gradients(case).astype(np.float64)
    residuals = np.zeros_like(own[0])
    for step in own:
        meant = step + residuals
        sizes = -np.sort(-np.abs(meant), axis=1)
        k = case["k"]
        if k < sizes.shape[1] and ((sizes[:, k - 1] - sizes[:, k] < 1e-5) & (sizes[:, 0] > 0)).any():
            return False
        residuals = np.where(by_size(meant, step, k), 0, meant)
    return True


def by_those_who_sent(sent: Array) -> Array:
    return sent.sum(0) / np.maximum(1, (sent != 0).sum(0))


def last_one(sent: Array) -> Array:
    """Of each entry what the last rank that sent it said."""
    found = np.zeros(sent.shape[1])
    for row in sent:
        found = np.where(row != 0, row, found)
    return found / len(sent)


def needed(case: Case) -> float:
    n = case["world_size"]
    return float(case["steps"] * n * (n - 1) * min(case["k"], np.prod(case["shape"])) * ENTRY_BYTES)


def find_dense(each: Observed) -> Finding | None:
    """That more was sent than each rank's entries to each other rank."""
    seen, most, n = each.seen.total_bytes, needed(each.case), each.case["world_size"]
    if seen <= 1.02 * most + 64 * n * n * each.case["steps"]:
        return None
    return Finding(f"{show_bytes(seen)} sent in all", f"at most {show_bytes(most)}", each.words)


def dense(per_rank: Callable[[int], float]) -> Sign:
    """That as many times all entries were sent by each rank, or more."""

    def holds(each: Observed) -> bool:
        case, size = each.case, oracle.FLOAT_BYTES * int(np.prod(each.case["shape"]))
        return each.seen.total_bytes >= 0.99 * case["steps"] * case["world_size"] * per_rank(case["world_size"]) * size

    return every(holds)


WRONG: dict[str, dict[str, Any]] = {
    "feedback forgotten": {"remember": lambda meant, sent, mean, residuals: 0 * meant},
    "nothing subtracted": {"remember": lambda meant, sent, mean, residuals: meant},
    "feedback doubled": {"remember": lambda meant, sent, mean, residuals: residuals + meant - sent},
    "what was left before is lost": {
        "remember": lambda meant, sent, mean, residuals: np.where(sent == meant, 0, meant - residuals)
    },
    "against the mean": {"remember": lambda meant, sent, mean, residuals: meant - mean},
    "what was sent is remembered": {"remember": lambda meant, sent, mean, residuals: sent},
    "divided by the ranks too": {"remember": lambda meant, sent, mean, residuals: meant - sent / len(sent)},
    "everything sent": {"choose": lambda meant, own, k: np.ones(meant.shape, bool)},
    "largest with their signs": {"choose": largest},
    "chosen without the residual": {"choose": lambda meant, own, k: by_size(own, own, k)},
    "a share of k": {"choose": lambda meant, own, k: by_size(meant, own, max(1, k // len(own)))},
    "chosen of the mean": {
        "choose": lambda meant, own, k: np.broadcast_to(by_size(meant.mean(0)[None], own, k), meant.shape)
    },
    "sum for mean": {"join": lambda sent: sent.sum(0)},
    "no sync": {"join": lambda sent: sent},
    "divided by those who sent": {"join": by_those_who_sent},
    "one rank of each entry": {"join": last_one},
}


def part(points: int, name: str, description: str, of: str) -> Any:
    """The means, or the residuals, of all steps."""
    wrong: Wrong = {known: theory(of, **options) for known, options in WRONG.items()}
    wrong = {**wrong, "more is kept than there is": raised("out of range")}
    return values(
        points, name, description, theory(of), of=of, rtol=RTOL, atol=ATOL, kind="gradient", wrong=wrong,
        names=lambda case: [f"{name}, step {step + 1}," for step in range(case["steps"])],
    )  # fmt: skip


TRAFFIC: Wrong = {
    "gathered in full": dense(lambda n: n - 1 if n > 2 else 1.01),
    "an all-reduce of all entries": dense(lambda n: 2 * (n - 1) / n),
    "wide numbers": every(lambda each: near(each.seen.total_bytes, needed(each.case) * 16 / ENTRY_BYTES)),
}

EXERCISE = Exercise(
    id="compression.3", function="top_k_mean", title="Top-k that forgets nothing", harness="compression.fed_back",
    draw=inputs.in_order(KINDS, drawn), handed_out=handed_out,
    checks=(
        own_work("top_k_mean"),
        heard("top_k_mean", lambda case: needed(case) / ENTRY_BYTES * 4 / case["world_size"] * (not case["idle"])),
        part(4, "mean", "the mean of what all ranks sent, in each step", "means"),
        part(3, "residual", "what each rank has left over, after each step", "residuals"),
        order(3, "traffic", "each rank's entries go once to each other rank", find_dense, wrong=TRAFFIC, kind="traffic",
              where=lambda case: case["is"]["sparse"] and case["world_size"] > 1),
    ),
)  # fmt: skip
