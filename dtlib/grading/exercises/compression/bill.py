"""compression.1: what a rank sends by five schemes, and which ride on an all-reduce; on paper."""

from functools import partial
from math import lcm, prod
from typing import Any

from dtlib.grading.exercises.inputs import Case, Rng, call, in_order
from dtlib.grading.exercises.kinds import on_paper, values

#: Ranks, bytes of a value, elements that share a scale, levels, rank of the factors, and with how many ranks top-k
#: sends as much: one rank and two, levels around a power of two; one rank alone, 64 just so, more than a thousand.
SPLITS = (
    (1, 4, 64, 7, 2, 30.75), (2, 4, 128, 8, 4, 64), (3, 2, 32, 1, 1, 0.75), (6, 4, 256, 15, 3, 1500.75),
    (16, 2, 64, 100, 8, 20.25), (40, 4, 8, 4, 2, 99.75),
)  # fmt: skip


def drawn(rng: Rng, n: int, value_bytes: int, block: int, levels: int, rank: int, most: float) -> dict[str, Any]:
    """Matrices that are wide and tall, one of which is longer as two factors, and vectors."""
    tall, wide = ([int(each) for each in rng.integers(60, 400, 2)] for _ in range(2))
    small = [rank + 1, int(rng.integers(rank + 1, 2 * rank + 2))]  # r(a + b) > ab
    shapes = [sorted(tall), sorted(wide, reverse=True), [int(rng.integers(9, 90))], small]
    whole = lcm(n * block, 8)
    rest = sum(a * b for a, b in (shapes[0], shapes[1], small)) + shapes[2][0]
    shapes.append([whole - rest % whole + whole * int(rng.integers(1, 3))])
    num_elements = rest + shapes[-1][0]
    kept = int(2 * value_bytes * num_elements / ((value_bytes + 4) * most))
    words = f"shapes {shapes}, N={n}, {value_bytes} B a value, blocks of {block}, s={levels}, k={kept}, r={rank}"
    return call(words, [shapes, n, value_bytes, block, levels, kept, rank])


def right(case: Case) -> dict[str, float]:
    """Bits are counted one by one: the least number that tells all codes apart."""
    shapes, n, value_bytes, block, levels, kept, rank = case["arguments"]
    sizes = [prod(shape) for shape in shapes]
    factors = [min(prod(shape), rank * sum(shape)) if shape[1:] else shape[0] for shape in shapes]
    bits = next(each for each in range(1, 64) if 2**each >= 2 * levels + 1)
    twice = 2 * (n - 1) / n  # a reduce-scatter and an all-gather
    return {
        "int8": twice * (sum(sizes) + 4 * sum(sizes) / block),
        "qsgd": (n - 1) * (sum(sizes) * bits / 8 + 4),
        "top-k": (n - 1) * kept * (value_bytes + 4.0),
        "random-k": twice * value_bytes * kept,
        "low rank": twice * value_bytes * sum(factors),
        "most": max(1, 2 * value_bytes * sum(sizes) // (kept * (value_bytes + 4))),
    }


part = partial(values, right=right, parts="int8, qsgd, top-k, random-k, low rank and most", kind="traffic")

EXERCISE = on_paper(
    "compression.1", "bills", "The bill of five schemes", in_order(SPLITS, drawn),
    part(3, "rides", "what rides on an all-reduce: random-k and low rank", part=("random-k", "low rank")),
    part(3, "gathered", "what every rank must be told: QSGD and top-k", part=("qsgd", "top-k")),
    part(2, "int8", "int8 in two passes", part="int8"),
    part(2, "most", "up to how many ranks top-k sends no more than the gradient itself", part="most"),
)  # fmt: skip
