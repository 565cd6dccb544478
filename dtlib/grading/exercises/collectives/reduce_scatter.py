"""collectives.5: half of a ring, the reduce-scatter."""

from typing import Any

from dtlib.grading.exercises import inputs
from dtlib.grading.exercises.exercise import Exercise
from dtlib.grading.exercises.inputs import Case, all_values
from dtlib.grading.exercises.kinds import full_bytes, messages_alone, own_work, values
from dtlib.grading.exercises.signs import Theory, Wrong, every
from dtlib.theory import collectives as theory

from ._ring import ATOL, cut, draw_ring, holds, ring, traffic

FUNCTION = "ring_reduce_scatter"


def chunks(case: Case) -> list[Any]:
    """Chunk r of the sum for rank r."""
    return cut(all_values(case).sum(0), case["world_size"])


def moved(by: int) -> Theory:
    return lambda case: [*chunks(case)[by:], *chunks(case)[:by]]


def sums(case: Case, rank: int) -> Any:
    """What each rank contributes to the chunk of `rank`."""
    return [[cut(row, case["world_size"])[rank]] for row in all_values(case)]


VALUES: Wrong = {
    "not returned": every(lambda each: all(said["returned"] is None for said in each.said)),
    "chunk of the neighbour": (moved(1), moved(-1)),
    "all-reduce": lambda case: [all_values(case).sum(0)] * case["world_size"],
}
TWICE: Wrong = {"twice the bytes": lambda case: 2 * (case["world_size"] - 1) * full_bytes(case)}
OWN = "rank r returns chunk r of the sum"
STEPS = theory.ring_reduce_scatter_steps

EXERCISE = Exercise(
    id="collectives.5", function=FUNCTION, title="Half of a ring: reduce-scatter", harness="collectives.reduce_scatter",
    draw=draw_ring, handed_out=inputs.values, holds=holds,
    checks=(
        own_work(FUNCTION),
        messages_alone(1, FUNCTION),
        values(3, "values", OWN, chunks, of="returned", atol=ATOL, sums=sums, wrong=VALUES),
        traffic(2, "each rank sends (N−1)/N·D bytes", "ring_reduce_scatter", STEPS, **TWICE),
        ring(2, STEPS, "N−1 messages to one neighbour, and none waits for its turn"),
    ),
)  # fmt: skip
