"""cp.1: partial results of attention, merged by their log-sum-exp; on paper."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from dtlib.grading.exercises.inputs import Case, Cases, Rng, call, in_words
from dtlib.grading.exercises.kinds import on_paper, values
from dtlib.grading.exercises.seen import Observed
from dtlib.grading.exercises.signs import Sign, Wrong, every
from dtlib.theory import cp

PAIR = "output, log_sum"

#: Blocks, around which number the scores lie and how far apart, and the share of queries that see nothing of a block.
KINDS = (
    (2, 0, 2, 0.0), (1, 0, 2, 0.0), (3, 0, 1, 0.0), (5, 1000, 3, 0.0), (4, -1000, 3, 0.0), (3, 0, 2000, 0.0),
    (3, 0, 2, 0.5), (4, 1000, 2, 0.5), (2, -1000, 3, 0.5), (3, 0, 0, 0.3),
)  # fmt: skip


def draw(rng: Rng) -> Cases:
    """One block and several; scores of any size; queries that see nothing of the first block, of the last, of any."""
    return [case(rng, *kind) for kind in KINDS]


def case(rng: Rng, blocks: int, around: float, apart: float, hidden: float) -> dict[str, Any]:
    queries, width = int(rng.integers(4, 6)), int(rng.integers(1, 3))
    outputs, log_sums = rng.standard_normal((blocks, queries, width)), rng.standard_normal((blocks, queries))
    outputs, log_sums = outputs.round(2), (around + apart * log_sums).round(2)
    log_sums[:, 0] -= 4 * apart * (apart > 10)  # far below the others' largest, whatever is drawn
    if hidden:
        unseen = rng.random((blocks, queries)) < hidden
        unseen[0, 0] = unseen[-1, 1] = True  # nothing of the first block, of the last
        unseen[:, 2], unseen[:, 3] = True, False  # of any, of none
        unseen[-1, 0] = unseen[0, 1] = False
        log_sums[unseen], outputs[unseen] = -np.inf, 0
    told = {"small": not around and apart < 10, "all seen": not hidden}
    words = in_words({"log_sums": log_sums, "outputs": outputs})
    return call(words, [list(outputs), list(log_sums)], **told)


def right(case: Case) -> list[Any]:
    """As one softmax over all blocks."""
    found, *others = zip(*case["arguments"], strict=True)
    for each in others:
        found = cp.merge(found, each)
    return list(found)


def found(observed: Observed) -> tuple[Any, Any, Any]:
    """Of each query: whether its result is no number, its log-sum, and whether it sees anything."""
    output, log_sum = (np.asarray(each, float) for each in observed.said[0]["answer"])
    seen = ~np.isneginf(observed.case["arguments"][1]).all(0)
    return np.isnan(output).any(1) | np.isnan(log_sum), log_sum, seen


def overflows(observed: Observed) -> bool:
    """Whether a query that sees something has no number, or one without end, and no sum that vanished."""
    lost, log_sum, seen = found(observed)
    return bool((np.isposinf(log_sum) | (lost & ~np.isneginf(log_sum)))[seen].any())


def vanishes(observed: Observed) -> bool:
    """Whether the sum of a query that sees something is 0."""
    _, log_sum, seen = found(observed)
    return bool(np.isneginf(log_sum)[seen].any())


def where_large(holds: Callable[[Observed], bool]) -> Sign:
    """That it holds in some case that failed, and that no case of small log-sums did in which all is seen."""

    def fits(failing: Sequence[Observed], passing: Sequence[Observed]) -> bool:
        spared = not any(each.case["is"]["small"] and each.case["is"]["all seen"] for each in failing)
        large = [each for each in failing if each.has_come and each.case["is"]["all seen"]]
        return spared and any(map(holds, large))

    return Sign(fits)


def lost_where_nothing_is_seen(observed: Observed) -> bool:
    """Whether it is no number for all queries that see nothing, and for others only that see nothing of a block."""
    lost, _, seen = found(observed)
    partly = np.isneginf(observed.case["arguments"][1]).any(0)
    return bool(lost.any() and lost[~seen].all() and partly[lost].all())


def number_where_nothing_is_seen(observed: Observed) -> bool:
    """Whether the log-sum of just the queries that see nothing is wrong, and a number."""
    _, log_sum, seen = found(observed)
    wanted = right(observed.case)[1]
    return bool(np.isfinite(log_sum).all() and np.allclose(log_sum[seen], wanted[seen]))


WRONG: Wrong = {
    "too large for a number": where_large(overflows),
    "too small for a number": where_large(vanishes),
    "not a number where nothing is seen": every(lost_where_nothing_is_seen),
    "a number where nothing is seen": every(number_where_nothing_is_seen),
}
part = partial(values, right=right, parts=PAIR, rtol=1e-7, atol=1e-9, wrong=WRONG)
EXERCISE = on_paper(
    "cp.1", "merged", "Many blocks, one softmax", draw,
    part(4, "output", "the output of each query, over all blocks", part=0),
    part(3, "log_sum", "its log-sum-exp", part=1),
)  # fmt: skip
