"""zero.1: the bytes of one rank, on paper."""

from functools import partial
from typing import Any

import numpy as np

from dtlib.grading.inputs import Case, Cases, Rng, call
from dtlib.grading.kinds import on_paper, values

PARTS = "weights, gradients, optimizer"
RECIPES = ((2, 4, 12), (4, 2, 8), (1, 2, 6), (2, 4, 8))  # three different widths, so that none stands for another


def draw(rng: Rng) -> Cases:
    """Every stage where N divides, and where it does not: first and last ranks, parameters shorter than N, one rank."""
    n = int(rng.choice([4, 8]))
    even = [n * int(size) for size in rng.integers(50, 4000, 3)]
    odd = [int(rng.integers(1, 60)) * 7 + 3, 1, int(rng.integers(1000, 9000)) * 7 + 5]
    return [
        case([40, 1000], 4, 1, 2, (2, 2, 12)),
        *(case(even, n, stage, int(rng.integers(0, n)), RECIPES[int(rng.integers(0, 4))]) for stage in (0, 1, 2, 3)),
        *(case(odd, 7, stage, rank, RECIPES[1]) for stage, rank in ((3, 0), (3, 6), (2, 4), (1, 3))),
        case([int(rng.integers(2, 40)) * 3 + 1, 2], 3, 3, 1, RECIPES[0]),
        case([5], 1, 3, 0, RECIPES[2]),
    ]


def case(sizes: list[int], n: int, stage: int, rank: int, recipe: tuple[int, int, int]) -> dict[str, Any]:
    words = f"parameters of {', '.join(map(str, sizes))} elements, {n} ranks, stage {stage}, rank {rank}"
    even = all(size % n == 0 for size in sizes)
    return call(f"{words}, {' + '.join(map(str, recipe))} B", [sizes, n, stage, rank, *recipe], even=even)


def right(case: Case) -> list[int]:
    sizes, n, stage, rank, *recipe = case["arguments"]
    share = sum(len(np.array_split(np.empty(size), n)[rank]) for size in sizes)
    return [
        num_bytes * (share if stage >= first else sum(sizes))
        for num_bytes, first in zip(recipe, (3, 2, 1), strict=True)
    ]


part = partial(values, right=right, parts=PARTS, kind="memory")

EXERCISE = on_paper(
    "zero.1", "bytes_on_rank", "What one rank keeps", draw,
    part(1, "weights", "bytes of the weights, where N divides", part=0, where="even"),
    part(1, "gradients", "bytes of the gradients, where N divides", part=1, where="even"),
    part(1, "optimizer", "bytes of the optimizer's part, where N divides", part=2, where="even"),
    part(2, "uneven shares", "exact where N does not divide", where="not even"),
)  # fmt: skip
