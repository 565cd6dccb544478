"""What the exercises on ranks of this chapter share: cases, chunks, and mistakes that fit more than one of them."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dtlib.grading.checks.on_paper import mistake
from dtlib.grading.checks.on_ranks import FLOAT_BYTES, inspect_rounds, is_divisible, peers
from dtlib.grading.compare import each_rank, every_run, gives, right_only_if, some_rank
from dtlib.grading.exercise import Case, Finding, Mistake, Run, Trouble
from dtlib.grading.rounds import count_rounds
from dtlib.theory import collectives as theory

# Inputs are multiples of 1/8, so sums are exact; a mean rounds, by a few units in the last place of numbers up to 400.
ATOL = 1e-3


def cut(row: np.ndarray[Any, Any], n: int) -> list[np.ndarray[Any, Any]]:
    """`row` cut into n chunks, as the exercises define them."""
    return np.array_split(row, n)


def traffic(algorithm: str, case: Case, **options: int) -> theory.Traffic:
    """What theory says that `algorithm` sends in a case."""
    return theory.traffic(algorithm, case["num_elements"], FLOAT_BYTES, case["world_size"], **options)


def _waits(trouble: Trouble) -> bool:
    """Whether the learner's line at which a rank hung sends, receives or waits."""
    return trouble.kind == "hung" and re.search(r"recv|send|wait|batch|barrier", trouble.line) is not None


def not_in_place(expected: Callable[[Case], Sequence[Any]]) -> Mistake:
    """The mistake of returning what should have been written into the tensor."""
    return mistake(
        "returned, not in place",
        gives(each_rank("returned"), lambda case: list(expected(case)), atol=ATOL),
        "What the function returns is right, and the tensor it was given is not. The task asks to change it in place: "
        "what does `tensor = something` do to the caller's tensor, and what does `tensor.copy_(something)`?",
    )


DIVISIBLE = mistake(
    "right for divisible lengths only",
    right_only_if(is_divisible),
    "It is right where the ranks divide the length, and only there. What becomes of the elements that are left over, "
    "and how long is the buffer that receives a longer chunk?",
)
TOO_SHORT = mistake(
    "too short to go round",
    right_only_if(lambda case: bool(case["num_elements"] >= case["world_size"])),
    "It goes wrong where there are fewer elements than ranks, so that some chunks are empty. Does every rank still "
    "send and receive as often as its neighbours expect?",
)
DEADLOCK = mistake(
    "everybody waits",
    lambda failing, passing: any(run.trouble is not None and _waits(run.trouble) for run in failing),
    "Nobody moves: every rank waits for a message that another would send only later. Write down the first call of "
    "each rank: who can finish it? Which call starts a message without waiting for it?",
)


def draw_ring(rng: np.random.Generator) -> list[tuple[int, int, int]]:
    """(ranks, elements, seed): 2, 4 and 3 ranks with equal chunks, 3 and 4 with unequal ones, 4 with 2 or 3."""
    shapes = [(n, n * int(rng.integers(25_000, 40_000))) for n in (2, 4, 3)]
    shapes += [(n, n * int(rng.integers(25_000, 40_000)) + int(rng.integers(1, n))) for n in (3, 4)]
    shapes.append((4, int(rng.integers(2, 4))))
    return [(n, length, int(rng.integers(0, 2**31))) for n, length in shapes]


def _one_neighbour(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
    """Whether messages were sent, and each rank sent to one other alone."""
    back = [run for run in failing if run.trouble is None]
    return any(peers(data) for run in back for data in run.ranks) and all(
        len(peers(data)) <= 1 for run in back for data in run.ranks
    )


def _takes(comparison: Callable[[int, int], bool], steps: Callable[[int], int]) -> Any:
    """Recognise by the rounds: in every failing run `comparison` holds between those seen and those of a ring."""

    def fits(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
        seen = [(count_rounds([d["events"] for d in run.ranks]), run) for run in failing if run.trouble is None]
        return bool(seen) and all(
            number is not None and comparison(number, steps(run.case["world_size"])) for number, run in seen
        )

    return fits


def _one_collects(run: Run) -> bool:
    """Whether all ranks but one send to that one alone."""
    told = [peers(data) for data in run.ranks]
    return any(all(told[rank] == {root} for rank in range(len(told)) if rank != root) for root in range(len(told)))


def one_rank_does_the_work(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
    """Whether, wherever there are more than two ranks, all send to a single one."""
    several = [run for run in failing if run.case["world_size"] > 2]
    return bool(every_run(_one_collects)(several, passing))


ONE_RANK = (
    "One rank collects, adds and hands out, while the links of the others stand idle. Could each rank do that for a "
    "part of the buffer?"
)


def ring_mistakes(steps: Callable[[int], int]) -> tuple[Mistake, ...]:
    """Mistakes of a ring that should take ``steps(n)`` rounds."""
    turns, fewer = _takes(operator.gt, steps), _takes(operator.lt, steps)
    return (
        NOT_A_RING,
        mistake(
            "ranks take turns",
            lambda failing, passing: _one_neighbour(failing, passing) and turns(failing, passing),
            TAKES_TURNS,
        ),
        mistake(
            "too few rounds",
            fewer,
            "Fewer rounds than a ring with N chunks takes: either too much travels in a round, or something has not "
            "travelled at all.",
        ),
    )


TAKES_TURNS = (
    "The neighbours are the right ones, and they take turns: one sends while the other waits. Both directions of a "
    "link work at once: start the send, receive, and only then wait for the send."
)
NOT_A_RING = mistake(
    "not a ring",
    some_rank(lambda data, case: len(peers(data)) > 1),
    "A rank sends to more than one other. On a ring each rank talks to one neighbour and listens to the other, in "
    "every step.",
)
WHOLE_BUFFERS = (
    "Each step carries the whole buffer. After a step, which part of what travelled is needed at its destination?"
)


def inspect_ring(steps: Any) -> Any:
    """The rounds, and that each rank sends to one neighbour only."""
    by_rounds = inspect_rounds(lambda case: steps(case["world_size"]))

    def inspect(run: Run) -> Finding | None:
        for rank, data in enumerate(run.ranks):
            if len(peers(data)) > 1:
                others = ", ".join(map(str, sorted(peers(data))))
                return Finding(f"rank {rank} sending to ranks {others}", "one neighbour", run.case["words"])
        return by_rounds(run)

    return inspect
