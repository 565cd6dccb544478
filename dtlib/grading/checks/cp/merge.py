"""cp.1: partial results of attention, merged by their log-sum-exp; on paper."""

from functools import partial
from typing import Any

import numpy as np

from dtlib.grading.inputs import Case, Cases, Rng, call
from dtlib.grading.kinds import on_paper, values
from dtlib.grading.seen import Observed
from dtlib.grading.signs import Wrong, every, only_if
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
    queries, width = int(rng.integers(5, 9)), int(rng.integers(2, 5))
    outputs, log_sums = rng.standard_normal((blocks, queries, width)), rng.standard_normal((blocks, queries))
    log_sums = around + apart * log_sums
    if hidden:
        unseen = rng.random((blocks, queries)) < hidden
        unseen[0, 0] = unseen[-1, 1] = True  # nothing of the first block, of the last
        unseen[:, 2], unseen[:, 3] = True, False  # of any, of none
        unseen[-1, 0] = unseen[0, 1] = False
        log_sums[unseen], outputs[unseen] = -np.inf, 0
    words = f"{blocks} blocks, {queries} queries, log-sums around {around} and {apart} apart"
    arguments = [list(outputs), list(log_sums)]
    return call(words + ", some queries see nothing" * bool(hidden), arguments, small=not around and apart < 10)


def right(case: Case) -> list[Any]:
    """As one softmax over all blocks."""
    found, *others = zip(*case["arguments"], strict=True)
    for each in others:
        found = cp.merge(found, each)
    return list(found)


def lost_where_nothing_is_seen(observed: Observed) -> bool:
    """Whether the output is no number for just the queries that see nothing."""
    lost = np.isnan(observed.said[0]["answer"][0]).any(1)
    return bool((lost == np.isneginf(observed.case["arguments"][1]).all(0)).all())


WRONG: Wrong = {
    "too large for a number": only_if("small"),
    "not a number where nothing is seen": every(lost_where_nothing_is_seen),
}
part = partial(values, right=right, parts=PAIR, rtol=1e-7, atol=1e-9, wrong=WRONG)
EXERCISE = on_paper(
    "cp.1", "merged", "Many blocks, one softmax", draw,
    part(4, "output", "the output of each query, over all blocks", part=0),
    part(3, "log_sum", "its log-sum-exp", part=1),
)  # fmt: skip
