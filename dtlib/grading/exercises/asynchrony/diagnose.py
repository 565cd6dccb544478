"""asynchrony.5: what is wrong with a server, by the log of its updates; on paper."""

import heapq
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np

from dtlib.grading.exercises.inputs import Rng, call, in_any_order, in_words
from dtlib.grading.exercises.kinds import by, on_paper

NOTHING, TORN, EARLY, LOST = "nothing wrong", "torn weights", "answered before the update", "gradient lost"
TWICE, PUSH, RATE, BOUND = "gradient used twice", "age from the push", "rate not lowered", "bound not kept"
PARTS = 3

#: What is wrong, workers, the bound (None: none), and whether one worker is slow: then its gradients are very old.
KINDS = (
    (NOTHING, 2, None, False), (NOTHING, 4, None, True), (NOTHING, 3, 1, True), (NOTHING, 4, 0, False),
    (NOTHING, 3, 2, True), (NOTHING, 5, None, False),
    (TORN, 2, None, False), (TORN, 4, 1, True), (TORN, 3, 0, False),
    (EARLY, 2, None, False), (EARLY, 4, None, True), (EARLY, 5, None, False),
    (LOST, 2, None, False), (LOST, 3, None, True), (LOST, 4, None, False),
    (TWICE, 2, None, False), (TWICE, 3, None, True), (TWICE, 4, None, False),
    (PUSH, 2, None, False), (PUSH, 4, 1, True), (PUSH, 3, 0, False),
    (RATE, 2, None, False), (RATE, 4, 2, True), (RATE, 3, None, False),
    (BOUND, 2, 1, True), (BOUND, 2, 0, False), (BOUND, 3, 0, False), (BOUND, 4, 2, True), (BOUND, 5, 2, True),
)  # fmt: skip


def case(rng: Rng, number: int, kind: str, n: int, bound: int | None, slow: bool) -> dict[str, Any]:
    while True:
        log = logged(rng, kind, n, bound, slow)
        if shows(log, kind, slow):
            words = {name: np.asarray(each).tolist() for name, each in log.items()}
            return call(f"run {number}: {in_words(words)}", [log]) | {"wrong": kind}


def logged(rng: Rng, kind: str, n: int, bound: int | None, slow: bool) -> dict[str, Any]:
    """A run of a few updates: who computes how long is drawn, and at one update, or at all, it goes wrong."""
    first, kept = n * ((kind, n) != (LOST, 3)), None if kind == BOUND else bound  # of three, a worker's first one
    wrong_at = first + int(rng.integers(min(n + first, 4)))
    updates, rate = int(rng.integers(9, 13)) + 2 * n, float(f"{rng.uniform(0.05, 0.4):.2g}")
    updates += 10 * (slow and n == 4 and kept is None)  # until who is slow comes a second time
    slowest = {4: 0, 5: 4}.get(n * (kind == BOUND), int(rng.integers(n)))
    pace = rng.uniform(0.8, 1.2, n) * np.where(np.arange(n) == slowest, (2.5 if n == 5 else 5) if slow else 1, 1)
    again: tuple[int, ...] = ()  # a row that is applied once more, later
    under_way = [(float(pace[worker] * rng.uniform(0.7, 1.3)), worker) for worker in range(n)]
    heapq.heapify(under_way)
    clocks, fetched, waiting, rows, handed = [0] * n, [0] * n, set[int](), list[tuple[int, ...]](), 0
    while len(rows) < updates:
        now, worker = heapq.heappop(under_way)
        row = (worker, clocks[worker], fetched[worker])
        if kind != LOST or handed != wrong_at:
            rows.append(row)
        if again and (again[0] == worker) == (n == 4):  # behind this worker's next one, or another's
            rows.append(again)
            again = ()
        if kind == TWICE and handed == wrong_at:
            if n == 2:
                rows.append(row)
            else:
                again = row
        handed += 1
        clocks[worker] += 1
        waiting.add(worker)
        for each in sorted(waiting):
            is_late = kind == BOUND and n == 2 and min(clocks) > 0  # it keeps the bound from then on
            if (kept is None and not is_late) or clocks[each] - min(clocks) <= (bound or 0):
                waiting.discard(each)
                fetched[each] = len(rows) - (kind == EARLY and each == worker)
                heapq.heappush(under_way, (now + float(pace[each] * rng.uniform(0.7, 1.3)), each))
    rows = rows[:updates]
    workers, numbers, versions = (np.array(column) for column in zip(*rows, strict=True))
    ages = np.arange(updates) - versions
    told = np.zeros(updates, int) if kind == PUSH else ages
    parts = np.repeat(versions[:, None], PARTS, axis=1)
    if kind == TORN:
        parts[int(rng.integers(n, updates)), 1 if n == 4 else slice(1 + n % 2, None)] += 1
    return {
        "workers": n, "bound": bound, "rate": rate, "worker": workers.tolist(), "clock": numbers.tolist(),
        "fetched": versions.tolist(), "age": told.tolist(), "parts": parts,
        "rates": [rate if kind == RATE else rate / (1 + int(age)) for age in told],
    }  # fmt: skip


def shows(log: dict[str, Any], kind: str, slow: bool) -> bool:
    """Whether the mistake is to be seen: a clock left out between others, one that is there again, with four workers
    behind a later one; of two workers the first one's, else the last one's. Of two, the last gradient is fresh where
    ages are wrong. A bound that is passed, where nobody is slow by one, and only when the worker starts: the others
    have caught up when its gradient is applied, of two with the next update. Of four workers the first alone is so far
    behind, of five the last, and not behind the mean."""
    worker, clock, n = log["worker"], log["clock"], log["workers"]
    own = [[c for w, c in zip(worker, clock, strict=True) if w == each] for each in range(n)]
    if min(map(len, own)) < 2 or any(each[0] for each in own) != ((kind, n) == (LOST, 3)):
        return False
    off = [place for place, each in enumerate(own) if each != list(range(len(each)))]
    if kind in (LOST, TWICE) and off != [0 if n == 2 else n - 1]:
        return False
    if kind == TWICE:
        falls = any(one > two for each in own for one, two in pairwise(each))
        return falls == (n == 4) and any(len(set(each)) < len(each) for each in own)
    if log["bound"] is None:
        return kind not in (PUSH, RATE) or n > 2 or bool(log["fetched"][-1] == len(worker) - 1)

    def ahead(versions: Iterable[int], of: Iterable[int] = range(n)) -> int:
        counts = ([worker[:version].count(each) for each in of] for version in versions)
        return max(c - min(each) for c, each in zip(clock, counts, strict=True))

    over, later = ahead(log["fetched"]) - log["bound"], ahead(range(len(worker))) - log["bound"]
    if kind != BOUND:
        done = [[worker[:version].count(each) for each in range(n)] for version in log["fetched"]]
        is_apart = any(max(each) - min(each) > log["bound"] for each in done)
        return over <= 0 and (is_apart or kind != NOTHING or log["bound"] != 1)
    others = {4: range(1, 4), 5: range(4)}.get(n)
    if slow:
        return (over == 1 if n == 5 else over > 0) and not (others and ahead(log["fetched"], others) > log["bound"])
    return over == 1 and later <= 0 and (n > 2 or ahead([each + 1 for each in log["fetched"]]) <= log["bound"])


of = by("wrong")

EXERCISE = on_paper(
    "asynchrony.5", "diagnose_server", "What is wrong with this server?", in_any_order(KINDS, case),
    of(TORN, EARLY)(2, "weights", "what is wrong with the weights that workers get"),
    of(LOST, TWICE)(2, "updates", "what is wrong with the gradients that are used"),
    of(PUSH, RATE, BOUND)(3, "ages", "what is wrong with ages, rates or the bound"),
    of(NOTHING)(2, "nothing", "nothing where nothing is wrong"),
)  # fmt: skip
