"""compression.4: a matrix as two thin factors: one step of a power method a gradient, on ranks that agree."""

from collections.abc import Callable
from typing import Any

import numpy as np

from dtlib.grading.exercises import inputs, oracle
from dtlib.grading.exercises.compare import show_bytes
from dtlib.grading.exercises.exercise import Exercise, Finding
from dtlib.grading.exercises.kinds import heard, near, order, own_work, values
from dtlib.grading.exercises.seen import Case, Observed
from dtlib.grading.exercises.signs import Sign, Theory, Wrong, every, only_if

Array = inputs.Array
RTOL, ATOL = 1e-3, 2e-3  # float32, entries around 1, factors of a few steps

#: Ranks, rows, columns, rank of the factors, steps, and whether all gradients are zeros.
KINDS = (
    (1, 12, 9, 2, 3, False), (2, 61, 40, 3, 3, False), (3, 53, 67, 2, 4, False), (4, 70, 50, 1, 3, False),
    (3, 40, 30, 2, 2, True), (2, 45, 80, 4, 2, False),
)  # fmt: skip


def draw(rng: inputs.Rng) -> inputs.Cases:
    """Each kind: tall and wide, more columns in the factors and one, and gradients of zeros."""
    cases: inputs.Cases = []
    for n, rows, columns, rank, steps, zeros in KINDS:
        shape = [int(rows + rng.integers(0, 6)), int(columns + rng.integers(0, 6))]
        words = f"{n} {'ranks' if n > 1 else 'rank'}, gradients of shape {tuple(shape)}, r={rank}, {steps} steps"
        case = {"world_size": n, "shape": shape, "rank": rank, "steps": steps, "zeros": zeros}
        case |= {"words": words + (", all zeros" if zeros else ""), "seed": int(rng.integers(2**31))}
        cases.append(case | {"is": {"two ranks": n == 2, "one column": rank == 1, "some ranks": n > 1, "zeros": zeros}})
    return cases


@oracle.remembered
def gradients(case: Case) -> Array:
    """[steps, ranks, rows, columns], float32: a part that all have at all times, one of each rank, one of each step."""
    rng, n = np.random.default_rng(case["seed"]), case["world_size"]
    sizes = (1, 1), (1, n), (case["steps"], n)
    parts = [rng.normal(0, 1, (*size, *case["shape"])) for size in sizes]
    return np.asarray((sum(parts) - parts[2] / 2) * (not case["zeros"]), np.float32)


@oracle.remembered
def starts(case: Case) -> Array:
    """[ranks, columns, r], float32: each rank brings another, as it would with a seed of its own."""
    rng = np.random.default_rng([case["seed"], 1])
    return rng.normal(0, 1, (case["world_size"], case["shape"][1], case["rank"])).astype(np.float32)


def handed_out(case: Case, rank: int) -> inputs.Pieces:
    start = {"start": starts(case)[rank], "steps": case["steps"]}
    return [("start", start), *(("gradient", each[rank]) for each in gradients(case))]


# What ranks do in a step; arrays have a matrix a rank.


def orthonormal(p: Array) -> Array:
    return np.array(np.linalg.qr(p)[0])


def unit_columns(p: Array) -> Array:
    return p / np.maximum(1e-30, np.linalg.norm(p, axis=-2, keepdims=True))


def mean(each: Array) -> Array:
    return np.broadcast_to(each.mean(0), each.shape)


def theory(
    *,
    left: Callable[[Array], Array] = mean, basis: Callable[[Array], Array] = orthonormal,
    right: Callable[[Array], Array] = mean, own_start: bool = False, warm: bool = True,
    remember: Callable[[Array, Array, Array], Any] = lambda meant, product, residual: meant - product,
    right_basis: Callable[[Array], Array] = lambda q: q, meant_last: bool = True,
) -> Theory:  # fmt: skip
    """Of each rank the products that it has instead of the mean, in all steps.

    `left` and `right` make of the ranks' factors those that they go on with, `basis` and `right_basis` what becomes of
    one. ``remember(meant, product, residual)`` gives the residuals.
    """

    def of(case: Case) -> list[Any]:
        n, found = case["world_size"], []
        given, first = gradients(case).astype(np.float64), starts(case).astype(np.float64)
        first = first if own_start else np.repeat(first[:1], n, axis=0)
        q, residual = first, np.zeros_like(given[0])
        for gradient in given:
            meant = gradient + residual
            p = np.stack([basis(each) for each in left(meant @ q)])
            own = (meant if meant_last else gradient).swapaxes(1, 2) @ p
            q = right_basis(np.array(right(own)))
            product = p @ q.swapaxes(1, 2)
            residual = remember(meant, product, residual)
            q = q if warm else first
            found.append(product)
        return [[each[rank] for each in found] for rank in range(n)]

    return oracle.remembered(np.errstate(over="ignore", invalid="ignore")(of))  # of what is not orthonormal


def first(known: Theory) -> Theory:
    """The same of the first step."""
    return lambda case: [each[:1] for each in known(case)]


RIGHT = theory()
MEAN: dict[str, Theory] = {
    "each rank its own start": theory(own_start=True),
    "feedback forgotten": theory(remember=lambda meant, product, residual: 0 * meant),
    "nothing subtracted": theory(remember=lambda meant, product, residual: meant),
    "feedback doubled": theory(remember=lambda meant, product, residual: residual + meant - product),
    "what was left before is lost": theory(remember=lambda meant, product, residual: meant - residual - product),
    "cold start": theory(warm=False),
    "not orthogonal": theory(basis=lambda p: p),
    "columns of length one": theory(basis=unit_columns),
    "own left factor": theory(left=lambda p: p),
    "own right factor": theory(right=lambda q: q),
    "sum for mean": theory(right=lambda q: len(q) * mean(q)),
    "the second factor of the gradient alone": theory(meant_last=False),
    "both factors orthogonal": theory(right_basis=lambda q: np.stack([orthonormal(each) for each in q])),
    "everything sent": lambda case: [
        [each.mean(0) for each in gradients(case).astype(np.float64)] for _ in range(case["world_size"])
    ],
}


def factor_bytes(case: Case) -> float:
    """What all ranks send in the two all-reduces of a step."""
    return 2.0 * (case["world_size"] - 1) * oracle.FLOAT_BYTES * case["rank"] * sum(case["shape"])


def start_bytes(case: Case) -> float:
    """What they send where rank 0 tells its start."""
    return float(case["world_size"] - 1) * oracle.FLOAT_BYTES * case["rank"] * case["shape"][1]


def all_bytes(case: Case) -> float:
    return case["steps"] * factor_bytes(case) + start_bytes(case)


def find_sent(each: Observed) -> Finding | None:
    seen, wanted = each.seen.total_bytes, all_bytes(each.case)
    if near(seen, wanted):
        return None
    return Finding(f"{show_bytes(seen)} sent in all steps", show_bytes(wanted), each.words)


def sent(wanted: Callable[[Case], float]) -> Sign:
    return every(lambda each: near(each.seen.total_bytes, wanted(each.case)))


def gathered(case: Case) -> float:
    return case["steps"] * case["world_size"] / 2 * factor_bytes(case) + start_bytes(case)


def whole_bytes(case: Case) -> float:
    """What an all-gather of the gradients takes, or half of an all-reduce."""
    return float(case["world_size"] - 1) * oracle.FLOAT_BYTES * np.prod(case["shape"]) * case["steps"]


TRAFFIC: Wrong = {
    "the start in every step": sent(lambda case: all_bytes(case) + (case["steps"] - 1) * start_bytes(case)),
    "the start in an all-reduce": sent(lambda case: all_bytes(case) + start_bytes(case)),
    "factors gathered": sent(gathered),
    "the gradient sent": every(lambda each: each.seen.total_bytes >= 0.99 * whole_bytes(each.case)),
    "no start told": sent(lambda case: all_bytes(case) - start_bytes(case)),
}

EXERCISE = Exercise(
    id="compression.4", function="low_rank_mean", title="Two thin factors", harness="compression.exchanges", draw=draw,
    handed_out=handed_out,
    checks=(
        own_work("low_rank_mean", built_in=True),
        heard("low_rank_mean", lambda case: factor_bytes(case) / 4),
        values(3, "first", "what all ranks have after the first step", first(RIGHT),
               of=lambda each: [said["means"][:1] for said in each.said], rtol=RTOL, atol=ATOL, kind="gradient",
               wrong={**{name: first(known) for name, known in MEAN.items()},
                      "zeros divide by zero": only_if(lambda case: not case["zeros"])}),
        values(4, "later", "what they have after the later ones", RIGHT, of="means", rtol=RTOL, atol=ATOL,
               kind="gradient", wrong=MEAN),
        order(3, "traffic", "two all-reduces of a factor a step, and the start once", find_sent, wrong=TRAFFIC,
              kind="traffic", where="some ranks"),
    ),
)  # fmt: skip
