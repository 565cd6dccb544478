"""dp.1: what is wrong with a run, by the timeline of its backward passes and all-reduces; on paper."""

from typing import Any

import numpy as np

from dtlib.grading.exercises.inputs import Case, Rng, call, in_any_order
from dtlib.grading.exercises.kinds import by, on_paper

NOTHING, AFTER, ONE, WAITS, EACH, LATE, SLOW = (
    "nothing wrong", "nothing overlapped", "one bucket", "waits for each", "each micro-batch", "late", "slow",
)  # fmt: skip
HELD = 0.6  # of a layer's time, for which a late bucket is held back
OVERTAKEN = -1  # for a late bucket: it leaves behind the next one; on a slow link it is the first, after backward

#: What is wrong and where (bucket or rank), ranks, micro-batches, layers of each bucket, the seconds of an all-reduce
#: for each second of its layers, and whether a layer has a hiccup. Where an all-reduce takes longer than its layers,
#: buckets queue up for the link.
KINDS = (
    (NOTHING, 0, 2, 1, (2, 2, 2), 0.3, False), (NOTHING, 0, 3, 4, (3, 2, 1), 0.5, True),
    (NOTHING, 0, 4, 3, (1, 2, 3, 2), 1.8, False), (NOTHING, 0, 2, 1, (2, 3, 2), 2.5, True),
    (NOTHING, 0, 4, 1, (3, 3), 0.4, True), (NOTHING, 0, 3, 2, (2, 4), 3.0, False),
    (AFTER, 0, 2, 1, (3, 3), 0.4, False), (AFTER, 0, 4, 3, (2, 2, 2), 1.5, True), (AFTER, 0, 3, 1, (1, 3, 2), 1, True),
    (ONE, 0, 2, 1, (6,), 0.5, True), (ONE, 0, 3, 4, (8,), 0.3, True), (ONE, 0, 4, 2, (5,), 1.5, False),
    (WAITS, 0, 2, 1, (3, 3), 0.5, False), (WAITS, 0, 3, 3, (2, 2, 2), 0.3, True), (WAITS, 0, 4, 1, (1, 2, 3), 2, True),
    (EACH, 0, 2, 2, (2, 2, 2), 0.3, False), (EACH, 0, 3, 4, (3, 3), 0.4, True), (EACH, 0, 4, 3, (2, 2, 1), 2.0, False),
    (LATE, 0, 3, 1, (1, 2, 3, 2), 0.2, False), (LATE, 1, 2, 3, (2, 2, 2, 2), 1.6, False),
    (LATE, 3, 4, 2, (2, 1, 2, 2), 0.4, False), (LATE, 2, 3, 1, (2, 3, 2), 1.4, True),
    (LATE, OVERTAKEN, 2, 1, (2, 2, 3), 2.0, False), (LATE, OVERTAKEN, 3, 4, (3, 1, 2, 2), 0.2, True),
    (SLOW, 0, 2, 1, (2, 2, 2), 0.4, False), (SLOW, 2, 4, 3, (3, 2, 2), 0.3, True), (SLOW, 1, 2, 4, (2, 2), 1.6, True),
    (SLOW, 3, 4, 1, (1, 3, 3), 0.5, True), (SLOW, 1, 3, 2, (2, 2, 2), 2.2, False),
)  # fmt: skip
"""Each kind once, in any order."""


def case(
    rng: Rng, number: int, kind: str, place: int, n: int, micro_batches: int, buckets: tuple[int, ...], load: float,
    hiccup: bool,
) -> dict[str, Any]:  # fmt: skip
    overtaken = kind == LATE and place == OVERTAKEN
    place = int(rng.integers(1 if load > 1 else len(buckets) - 1)) if overtaken else place
    took = milliseconds(rng, n, micro_batches, sum(buckets))
    usual = float(np.median(took))
    if kind == SLOW:
        took[place] *= 1.4 if n == 2 else rng.uniform(1.4, 1.8)  # of two it moves the mean
    if hiccup:
        rank, micro, layer = rng.integers(took.shape)
        took[rank, micro, -(len(buckets) % 2) if kind == NOTHING else layer] *= 8  # the last layer, or the first
    told = {LATE: f"bucket {place} late", SLOW: f"rank {place} slow"}.get(kind, kind)
    run = [micro_batches, *timeline(kind, place, overtaken, took, buckets, usual, load)]
    return call(f"run {number}, on {n} ranks", run) | {"wrong": kind, "told": told}


def milliseconds(rng: Rng, n: int, micro_batches: int, layers: int) -> Any:
    """What each layer's backward takes, [ranks, micro-batches, layers]: layers differ, ranks by a few percent."""
    usual = rng.uniform(5, 40) * rng.uniform(0.95, 1.05, layers)
    return usual * rng.uniform(0.97, 1.03, (n, micro_batches, layers))


def timeline(
    kind: str, place: int, overtaken: bool, took: Any, buckets: tuple[int, ...], usual: float, load: float
) -> tuple[list[list[list[Any]]], list[list[list[Any]]]]:
    """By rank the layers' [micro-batch, layer, start, end], and the all-reduces' [first layer, last layer, start, end].

    A rank is in an all-reduce from its own start, until all have started and the link has carried it.
    """
    n, micro_batches, layers = took.shape
    backward: list[list[list[Any]]] = [[] for _ in range(n)]
    reduced: list[list[list[Any]]] = [[] for _ in range(n)]
    now, free = np.zeros(n), np.zeros(n)
    firsts = layers - np.cumsum(buckets)  # the layer that completes each bucket

    def reduce(bucket: int, ready: Any) -> None:
        first, start = int(firsts[bucket]), np.maximum(ready + 0.01 * usual, free)
        free[:] = start.max() + load * usual * buckets[bucket]
        for own, at, end in zip(reduced, start.round(3).tolist(), free.round(3).tolist(), strict=True):
            own.append([first, first + buckets[bucket] - 1, at, end])

    for micro in range(micro_batches):
        now += 0.5 * usual * layers  # forward
        complete: list[int] = []
        for layer in reversed(range(layers)):
            start = now + 0.01 * usual
            now = start + took[:, micro, layer]
            for own, at, end in zip(backward, start.round(3).tolist(), now.round(3).tolist(), strict=True):
                own.append([micro, layer, at, end])
            if layer not in firsts or (micro < micro_batches - 1 and kind != EACH):
                continue
            complete.append(firsts.tolist().index(layer))
            if (kind == AFTER and layer) or (overtaken and complete[-1] == place):
                continue
            for bucket in sorted(complete, reverse=overtaken):
                late = kind == LATE and not overtaken and bucket == place
                reduce(bucket, np.maximum(now, free) + HELD * usual if late else now)
            complete.clear()
            now = np.maximum(now, free) if kind == WAITS else now
    return backward, reduced


def right(case: Case) -> str:
    return str(case["told"])


of = by("wrong", right, kind="overlap")

EXERCISE = on_paper(
    "dp.1", "diagnose_backward", "Why does this backward pass take so long?", in_any_order(KINDS, case),
    of(AFTER, ONE, WAITS)(3, "overlap", "nothing is hidden, and why"),
    of(LATE)(2, "late", "the bucket that leaves late"),
    of(EACH, SLOW)(2, "elsewhere", "an all-reduce for each micro-batch, and the rank that is slow"),
    of(NOTHING)(1, "nothing", "nothing is found where nothing is wrong"),
)  # fmt: skip
