"""collectives.1: who holds what after which collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from dtlib.grading.checks.on_paper import mistake, own_formula
from dtlib.grading.compare import answer, any_of, compare, right_only_if, show
from dtlib.grading.exercise import Check, Exercise, Finding, FormError, Run, describe_case

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


def _draw_rows(rng: np.random.Generator) -> list[dict[str, Any]]:
    cases = []
    for collective in VOCABULARY:
        for n, shortest in ((2, 1), (int(rng.integers(3, 6)), 2)):  # not always one number a chunk
            rows = rng.integers(-9, 10, (n, n * int(rng.integers(shortest, 4)))).astype(np.float64)
            cases.append(
                {"arguments": [collective, rows], "words": f"{collective} of {n} ranks, {rows.shape[1]} numbers each"}
            )
    return cases


def _held(run: Run) -> list[Any]:
    value = answer(run)
    if not isinstance(value, list | np.ndarray):
        raise FormError(show(value), "a list with one array for each rank")
    return [np.asarray(row, np.float64) for row in value]


def _inspect_rows(run: Run) -> Finding | None:
    collective, rows = run.case["arguments"]
    expected = VOCABULARY[collective](rows)
    seen = _held(run)
    if len(seen) != len(expected):
        return Finding(f"{len(seen)} arrays", f"{len(expected)}, one for each rank", describe_case(run.case))
    findings = (
        compare(one, two, f"on rank {rank}; {describe_case(run.case)}")
        for rank, (one, two) in enumerate(zip(seen, expected, strict=True))
    )
    return next((finding for finding in findings if finding), None)


def _holds(wrong: Callable[[Rows], Sequence[Rows]]) -> Any:
    def fits(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
        back = [run for run in failing if run.trouble is None]
        return bool(back) and all(
            [row.tolist() for row in _held(run)]
            == [np.asarray(row).tolist() for row in wrong(run.case["arguments"][1])]
            for run in back
        )

    return fits


def _shift(rows: Rows, by: int) -> list[Rows]:
    chunks = np.array_split(rows.sum(0), len(rows))
    return [chunks[(rank + by) % len(rows)] for rank in range(len(rows))]


_KNOWN = {
    "broadcast": [
        mistake(
            "everybody's rows",
            _holds(VOCABULARY["all_gather"]),
            "Every rank now holds all rows. In a broadcast one rank speaks. Whose row should they end up with?",
        ),
        mistake(
            "nothing moved",
            _holds(list),
            "Each rank still holds its own row. Rank 0 speaks: who has to hear it?",
        ),
    ],
    "all_reduce": [
        mistake(
            "all-gather for all-reduce",
            _holds(VOCABULARY["all_gather"]),
            "The rows were put side by side: that is an all-gather, and the result grew N times. What does *reduce* do "
            "to numbers at the same position?",
        ),
        mistake(
            "reduce for all-reduce",
            _holds(lambda rows: [rows.sum(0), *rows[1:]]),
            "Rank 0 has the sum, the others do not. What does the *all* stand for?",
        ),
        mistake(
            "mean for sum",
            _holds(lambda rows: [rows.mean(0) for _ in rows]),
            "This is the mean over the ranks. The task asks for the sum; who divides, and when, is a later decision.",
        ),
    ],
    "all_gather": [
        mistake(
            "all-reduce for all-gather",
            _holds(VOCABULARY["all_reduce"]),
            "The rows were added. A gather adds nothing: how long is what a rank holds afterwards?",
        ),
        mistake(
            "gather for all-gather",
            _holds(lambda rows: [rows.reshape(-1), *rows[1:]]),
            "Only rank 0 holds everything. What does the *all* stand for?",
        ),
    ],
    "reduce_scatter": [
        mistake(
            "all-reduce for reduce-scatter",
            _holds(VOCABULARY["all_reduce"]),
            "Every rank holds the whole sum: that is an all-reduce. Which share of it should stay on which rank?",
        ),
        mistake(
            "scatter without reduce",
            _holds(lambda rows: [np.array_split(row, len(rows))[rank] for rank, row in enumerate(rows)]),
            "Each rank kept a piece of its own row and nothing was added. What happens to a piece before it is "
            "handed out?",
        ),
        mistake(
            "chunk of the neighbour",
            any_of(_holds(partial(_shift, by=1)), _holds(partial(_shift, by=-1))),
            "The chunks are right and lie one rank off. Rank r is to hold chunk r.",
        ),
    ],
    "all_to_all": [
        mistake(
            "all-gather for all-to-all",
            _holds(VOCABULARY["all_gather"]),
            "Every rank received everything. In an all-to-all each rank has a different message for each of the "
            "others: how long is what a rank holds afterwards?",
        ),
        mistake(
            "nothing moved",
            _holds(list),
            "Each rank still holds its own row. Think of the rows as a table of N × N messages: what does the "
            "exchange do to the table?",
        ),
        mistake(
            "one number for each chunk",
            _holds(lambda rows: list(rows.T)),
            "The table was turned over number by number, which is right for chunks of one number. How long is a chunk?",
        ),
        mistake(
            "chunks of one rank",
            _holds(lambda rows: [np.concatenate([np.array_split(row, len(rows))[0] for row in rows]) for _ in rows]),
            "Every rank received the same: the first chunk of each row. Which chunk is meant for rank r?",
        ),
    ],
}
_TWO_RANKS = mistake(
    "right for two ranks only",
    right_only_if(lambda case: len(case["arguments"][1]) == 2),
    "With two ranks it is right, with more it is not: half is one share of the whole for two ranks alone.",
)


def _vocabulary_check(collective: str) -> Check:
    return Check(
        name=collective,
        kind="value",
        points=1,
        description=f"what each rank holds after `{collective}`",
        inspect=_inspect_rows,
        mistakes=(*_KNOWN[collective], _TWO_RANKS),
        applies=lambda case: case["arguments"][0] == collective,
    )


VOCABULARY_EXERCISE = Exercise(
    id="collectives.1",
    function="holds_after",
    title="Who holds what",
    harness="paper.call",
    draw=_draw_rows,
    checks=(own_formula("holds_after"), *(_vocabulary_check(collective) for collective in VOCABULARY)),
)
