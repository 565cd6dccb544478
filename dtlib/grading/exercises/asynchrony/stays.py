"""asynchrony.4: where local steps on unequal data stay, and where the optimum is; on paper."""

from functools import partial
from typing import Any

import numpy as np

from dtlib.grading.exercises.inputs import Case, Rng, call, in_order
from dtlib.grading.exercises.kinds import on_paper, values

MANY = 4000  # local steps after which every worker is at its own optimum

#: Workers, local steps, the range of η λ, and whether one has a loss that is flat. One step, one worker, rates that go
#: beyond the optimum and back (η λ > 1), all of them in the last: x lands on the other side.
KINDS = (
    (2, 1, 0.1, 0.9, False), (2, 5, 0.05, 0.5, False), (3, 2, 0.2, 1.8, False), (4, 8, 0.02, 0.3, False),
    (3, 20, 0.01, 0.2, True), (1, 3, 0.1, 0.6, False), (5, 3, 0.3, 1.7, True), (6, 1, 0.05, 1.5, True),
    (4, 100, 0.01, 0.1, False), (3, 3, 1.2, 1.8, False),
)  # fmt: skip


def drawn(rng: Rng, n: int, local_steps: int, low: float, high: float, flat: bool) -> dict[str, Any]:
    """Where it stays is neither the optimum nor the limit, unless it must be; samples differ."""
    while True:
        rate = float(f"{np.exp(rng.uniform(-4, 0)):.3g}")
        curvatures = [float(f"{each / rate:.4g}") for each in rng.uniform(low, high, n)]
        if flat:
            curvatures[int(rng.integers(n))] = 0.0
        optima = [float(f"{each:.4g}") for each in rng.normal(0, 3, n)]
        samples = [int(each) for each in 10 * rng.permutation(np.arange(1, 3 * n + 1))[:n]]
        numbers = [curvatures, optima, samples, rate, local_steps]
        found = right({"arguments": numbers})
        size = float(np.abs(optima).max())
        apart = [abs(found[0] - found[1]), abs(found[0] - found[2])]
        is_clear = n == 1 or min(apart[1:] if local_steps == 1 else apart) > 0.01 * size
        if is_clear and abs(found[2]) > 0.05 * size and abs(found[3]) > 1e-4:
            words = "λ = {}, optima = {}, samples = {}, η={}, H={}".format(*numbers)
            return call(words, numbers)


def after_round(case: Case, start: float, local_steps: int) -> float:
    """The mean of all workers when each has come so many steps nearer to its own optimum."""
    curvatures, optima, samples, rate, _ = case["arguments"]
    left = (1 - rate * np.asarray(curvatures)) ** local_steps
    return float(np.average(optima + left * (start - np.asarray(optima)), weights=samples))


def stays(case: Case, local_steps: int) -> tuple[float, float]:
    """Where a round changes nothing, and by which factor it brings nearer: a round is a line, two points of it do."""
    zero, one = (after_round(case, start, local_steps) for start in (0.0, 1.0))
    return zero / (1 - (one - zero)), one - zero


def right(case: Case) -> list[float]:
    curvatures, optima, samples, _, local_steps = case["arguments"]
    there, factor = stays(case, local_steps)
    pulls = np.multiply(samples, curvatures)
    return [there, float(np.average(optima, weights=pulls)), stays(case, MANY)[0], factor]


part = partial(values, right=right, parts="stays, optimum, limit, factor", atol=1e-9)

EXERCISE = on_paper(
    "asynchrony.4", "where_it_stays", "Where local steps stay", in_order(KINDS, drawn),
    part(3, "stays", "where the mean stays", part=0),
    part(2, "optimum", "where the loss of all samples is least", part=1),
    part(1, "limit", "where it stays with ever more local steps", part=2),
    part(2, "factor", "by which factor a round brings it nearer", part=3),
)  # fmt: skip
