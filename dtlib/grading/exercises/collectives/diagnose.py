"""collectives.7: what went wrong in an all-reduce, and on which rank, by what ranks held and sent; on paper."""

from typing import Any

import numpy as np

from dtlib.grading.exercises.inputs import Case, Cases, Rng, call, in_any_order, in_words
from dtlib.grading.exercises.kinds import by, on_paper

MISSING, TWICE, GROUPS, MEAN, OWN, LAST, HALF, GATHERED, ROOT, NOTHING = (
    "not added", "added twice", "two groups", "mean", "own row kept", "last chunk not written", "one journey",
    "gathered", "through one rank", "nothing wrong",
)  # fmt: skip
OF_NO_RANK = (MEAN, HALF, GATHERED, NOTHING)
RANKS = (3, 4, 5, 6)


def draw(rng: Rng) -> Cases:
    """Each fault on three numbers of ranks, three among them, of whom the first and the last are at fault once each; in
    any order."""
    cases = []
    for kind in (MISSING, TWICE, GROUPS, MEAN, OWN, LAST, HALF, GATHERED, ROOT, NOTHING):
        sizes = [int(n) for n in rng.permutation([RANKS[0], *rng.choice(RANKS[1:], 2, replace=False)])]
        ranks = (int(kind == GROUPS), sizes[1] - 1, int(rng.integers(1, sizes[2])))
        cases += [(kind, n, rank) for n, rank in zip(sizes, ranks, strict=True)]
    return in_any_order(cases, case)(rng)


def case(rng: Rng, number: int, kind: str, n: int, rank: int) -> dict[str, Any]:
    """No number is by chance the sum of its column, and few enough to be told."""
    before = rng.uniform(-50, 50, (n, n * (2 if n < 5 else 1))).round(2)
    while np.isclose(before, before.sum(0)).any():
        before = rng.uniform(-50, 50, before.shape).round(2)
    if kind in (MISSING, TWICE) and not rank:  # so small that sums which are nearly right are not
        before[0] = (before[0] / 500).round(3)
    after, sent = ended(kind, before, rank)
    told = {"before": before, "after": after, "sent": sent}
    return call(f"run {number}, on {n} ranks: {in_words(told)}", [told]) | {
        "wrong": [kind, None if kind in OF_NO_RANK else rank]
    }


def ended(kind: str, before: Any, rank: int) -> tuple[Any, list[int]]:
    """The rows after it, and the numbers that each rank has sent."""
    n, length = before.shape
    chunk = length // n
    after, sent = np.tile(before.sum(0), (n, 1)), [2 * (n - 1) * chunk] * n
    if kind == MISSING:
        after -= before[rank]
    if kind == TWICE:
        after += before[rank]
    if kind == GROUPS:
        for group in (range(rank), range(rank, n)):
            after[group] = before[group].sum(0)
            for each in group:
                sent[each] = 2 * (len(group) - 1) * length // len(group)
    if kind == MEAN:
        after /= n
    if kind == OWN:
        after[rank] = before[rank]
    if kind == LAST:  # of the second journey, in which rank r begins with chunk r and ends with chunk r + 1
        first = (rank + 1) % n * chunk
        after[rank, first : first + chunk] = before[rank, first : first + chunk]
    if kind == HALF:
        summed, after, sent = after, before.copy(), [(n - 1) * chunk] * n
        for each in range(n):
            after[each, each * chunk : (each + 1) * chunk] = summed[each, each * chunk : (each + 1) * chunk]
    if kind == GATHERED:
        sent = [(n - 1) * length] * n
    if kind == ROOT:
        sent = [(n - 1) * length if each == rank else length for each in range(n)]
    return after, sent


def right(case: Case) -> Any:
    return case["wrong"]


of = by("wrong", right, kind="schedule")

EXERCISE = on_paper(
    "collectives.7", "diagnose_all_reduce", "What went wrong in this all-reduce?", draw,
    of(MISSING, TWICE, GROUPS, MEAN)(3, "sums", "sums that are wrong"),
    of(OWN, LAST, HALF)(3, "places", "sums that do not stand everywhere"),
    of(GATHERED, ROOT)(2, "sent", "sums that are right and cost too much"),
    of(NOTHING)(1, "nothing", "nothing is found where nothing is wrong"),
)  # fmt: skip
