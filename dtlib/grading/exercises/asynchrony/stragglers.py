"""asynchrony.1: what a step waits for the slowest of N, and what backup workers make of it; on paper."""

from fractions import Fraction
from functools import partial
from math import comb, fsum
from typing import Any

from dtlib.grading.exercises.inputs import Case, Rng, call, in_order
from dtlib.grading.exercises.kinds import on_paper, values

#: Measured times, how many of them are slow and by which factor, workers, the most backups, and the best number: none,
#: all, and some between. One worker, one time, times that come again, a power of two and none.
KINDS = (
    (1, 0, 1, 3, 2, 0), (5, 1, 2, 1, 2, 0), (6, 2, 1.5, 4, 3, 0), (20, 1, 10, 8, 4, 2), (30, 2, 6, 6, 1, 1),
    (24, 2, 20, 16, 6, None), (12, 3, 4, 2, 4, None), (40, 1, 8, 64, 5, None), (9, 4, 1.2, 5, 0, 0),
    (12, 4, 8, 8, 10, 10),
)  # fmt: skip


def drawn(rng: Rng, m: int, slow: int, factor: float, n: int, most: int, wanted: int | None) -> dict[str, Any]:
    """Which number of backups is best is clear. Times in any order; where there are more than two, one comes twice."""
    while True:
        times = [round(float(each), 3) for each in rng.uniform(0.9, 1.1, m)]
        times[:slow] = [round(each * factor * float(rng.uniform(0.9, 1.1)), 3) for each in times[:slow]]
        if m > 2:
            times[-1] = times[-2]
        times = [times[k] for k in rng.permutation(m)]
        costs = [(n + b) * each for b, each in enumerate(backed(times, n, most))]
        best, *others = sorted(costs)
        is_clear = all(each > 1.002 * best for each in others)
        is_unsorted = m < 3 or times not in (sorted(times), sorted(times, reverse=True))
        is_late = wanted != 10 or costs[1] > 1.002 * costs[0]  # the first backup does not pay, many do
        if is_late and is_clear and is_unsorted and wanted in (None, costs.index(best)):
            return call(f"times = {times}, N={n}, at most {most} backups", [times, n, most])


def backed(times: list[float], n: int, most: int) -> list[float]:
    """Seconds until `n` of n + b workers are done, by adding up how long fewer are, in whole numbers of outcomes."""
    m, ordered = len(times), sorted(times)
    found = []
    for b in range(most + 1):
        seconds = [ordered[0]]
        for i in range(1, m):  # i of m times are over: of all m^(n + b) outcomes, those in which fewer than n are done
            fewer = sum(comb(n + b, k) * i**k * (m - i) ** (n + b - k) for k in range(n))
            seconds.append((ordered[i] - ordered[i - 1]) * (fewer / m ** (n + b)))
        found.append(fsum(seconds))
    return found


def right(case: Case) -> dict[str, Any]:
    times, n, most = case["arguments"]
    mean, waited = fsum(times) / len(times), backed(times, n, most)
    costs = [(n + b) * each for b, each in enumerate(waited)]
    return {
        "slowest": waited[0],
        "waits": (waited[0] - mean) / waited[0],
        "exponential": mean * float(sum(Fraction(1, k) for k in range(1, n + 1))),
        "backed": waited,
        "best": costs.index(min(costs)),
    }


part = partial(values, right=right, parts="slowest, waits, exponential, backed and best", atol=1e-9)

EXERCISE = on_paper(
    "asynchrony.1", "stragglers", "Waiting for the slowest", in_order(KINDS, drawn),
    part(2, "slowest", "how long the slowest takes, by what was measured", part="slowest"),
    part(1, "waits", "the part of its time that a worker waits", part="waits"),
    part(2, "exponential", "the slowest by theory, of exponential times", part="exponential"),
    part(2, "backed", "the seconds of a step with backups", part="backed"),
    part(2, "best", "how many backups a gradient is cheapest with", part="best"),
)  # fmt: skip
