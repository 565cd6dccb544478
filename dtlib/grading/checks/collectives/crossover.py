"""collectives.3: where ring and tree are equally fast, on paper."""

from dtlib.grading.inputs import Case, Cases, Rng, call
from dtlib.grading.kinds import on_paper, values
from dtlib.theory import collectives as theory
from dtlib.theory import units


def draw(rng: Rng) -> Cases:
    """Odd and even powers of two; other numbers just above a power, just below one, in the lower half and the upper: so
    every way of rounding a logarithm is wrong somewhere."""
    powers = (rng.choice([8, 32, 128]), rng.choice([4, 16, 64, 256]))
    others = (rng.choice([9, 17, 33]), rng.choice([7, 15, 31]), rng.choice([10, 20, 40]), rng.choice([6, 12, 24, 100]))
    cases = []
    for n in map(int, (*powers, *others)):
        alpha, rate = float(rng.integers(2, 60)) * units.us, float(rng.integers(5, 95)) * units.GB
        words = f"{n} ranks, α = {units.format_seconds(alpha)}, B = {units.format_rate(rate)}"
        cases.append(call(words, [n, alpha, rate], **{"a power of two": n & (n - 1) == 0}))
    return cases


def right(case: Case) -> float:
    return float(theory.ring_tree_crossover_bytes(*case["arguments"]))


EXERCISE = on_paper(
    "collectives.3", "crossover_bytes", "Ring or tree?", draw,
    values(3, "powers of two", "the crossover for 4, 8, 16, … ranks", right, where="a power of two"),
    values(2, "other ranks", "the crossover for other numbers of ranks", right, where="not a power of two"),
)  # fmt: skip
