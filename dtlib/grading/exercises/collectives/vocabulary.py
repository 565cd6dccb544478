"""collectives.1: who holds what after which collective, on paper."""

from collections.abc import Callable
from typing import Any

import numpy as np

from dtlib.grading.exercises.compare import show
from dtlib.grading.exercises.exercise import Check, FormError
from dtlib.grading.exercises.inputs import Cases, Rng, call
from dtlib.grading.exercises.kinds import on_paper, values
from dtlib.grading.exercises.seen import Case, Observed

Rows = np.ndarray[Any, Any]

VOCABULARY: dict[str, Callable[[Rows], list[Rows]]] = {
    "broadcast": lambda rows: [rows[0] for _ in rows],
    "all_reduce": lambda rows: [rows.sum(0) for _ in rows],
    "all_gather": lambda rows: [rows.reshape(-1) for _ in rows],
    "reduce_scatter": lambda rows: np.array_split(rows.sum(0), len(rows)),
    "all_to_all": lambda rows: [
        np.concatenate([np.array_split(row, len(rows))[r] for row in rows]) for r in range(len(rows))
    ],
}


def draw(rng: Rng) -> Cases:
    """Each collective on 2, 3, 4 and 5 ranks, with chunks of one number and of several, all of them different."""
    cases = []
    for collective in VOCABULARY:
        for n, chunk in ((2, 1), (3, 2), (2, 3), *((n, int(rng.integers(1, 5))) for n in (4, 5))):
            rows = rng.permutation(200)[: n * n * chunk].reshape(n, n * chunk) - 50.0
            words = f"{collective} of {n} ranks, {n * chunk} numbers each"
            cases.append(call(words, [collective, rows], **{"two ranks": n == 2}))
    return cases


def held(observed: Observed) -> list[Any]:
    """What each rank holds by the answer, lists of numbers as arrays."""
    answer = observed.said[0]["answer"]
    if not isinstance(answer, list | np.ndarray):
        raise FormError(show(answer), "a list with one array for each rank")
    return [np.asarray(row, np.float64) for row in answer]


def right(case: Case) -> list[Rows]:
    collective, rows = case["arguments"]
    return VOCABULARY[collective](rows)


def check(name: str) -> Check:
    words = f"what each rank holds after `{name}`"
    return values(1, name, words, right, of=held, where=lambda case: bool(case["arguments"][0] == name))


EXERCISE = on_paper("collectives.1", "holds_after", "Who holds what", draw, *map(check, VOCABULARY))
