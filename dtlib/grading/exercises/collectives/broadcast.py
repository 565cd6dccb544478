"""collectives.4: a broadcast along a tree."""

from collections.abc import Sequence
from typing import Any

from dtlib.grading.exercises import inputs
from dtlib.grading.exercises.compare import close
from dtlib.grading.exercises.exercise import Exercise, Finding
from dtlib.grading.exercises.inputs import Cases, Rng, all_values
from dtlib.grading.exercises.kinds import messages_alone, order, own_work, sends, values
from dtlib.grading.exercises.seen import Case, Observed, rounds
from dtlib.grading.exercises.signs import NOTHING_ELSE, Sign, every, instead
from dtlib.theory import collectives as theory

FUNCTION = "tree_broadcast"


def draw(rng: Rng) -> Cases:
    """Every source of 3 and of 4 ranks; 2, 8 (where a tree of two each takes a round too many) and 5 (whose logarithm
    is nearer to 2 than to 3) with sources that are not their own mirror image: a wrong renumbering fails somewhere. Two
    ranks come first: one listens when the other has returned, or waits. Three have a tensor of rows."""
    sources = [(2, 1), *((4, src) for src in range(4)), (8, int(rng.choice([1, 2, 3, 5, 6, 7])))]
    sources += [*((3, src) for src in range(3)), (5, int(rng.integers(1, 5)))]
    return [
        {
            "world_size": n,
            "src": src,
            "num_elements": 8 * int(rng.integers(400, 600)),
            "seed": int(rng.integers(0, 2**31)),
            "words": f"{n} ranks, src = {src}",
            "is": {"two ranks": n == 2, "a power of two": n in (2, 4, 8), "root 0": src == 0, "one dimension": n != 3},
            **({"columns": 8} if n == 3 else {}),
        }
        for n, src in sources
    ]


def holds(case: Case) -> list[tuple[int, int, int, int]]:
    """Of two ranks, the one that listens comes when the other has spoken: who does not wait has thrown it away."""
    return [(1 - case["src"], 0, -1, 0)] if case["is"]["two ranks"] else []


def right(case: Case) -> list[Any]:
    return [all_values(case)[case["src"]]] * case["world_size"]


def some_heard(observed: Observed) -> bool:
    """Whether other ranks than `src` hold what it said."""
    pairs = zip(observed.said, right(observed.case), strict=True)
    return sum(close(said["tensor"], wanted) for said, wanted in pairs) > 1


def by_source(failing: Sequence[Observed], passing: Sequence[Observed]) -> bool:
    """Whether as many ranks are right with one source and wrong with another."""
    wrong, good = ({each.case["world_size"] for each in some} for some in (failing, passing))
    return bool(wrong & good)


def find_rounds(observed: Observed) -> Finding | None:
    """That the messages take as few rounds as they can."""
    seen, wanted = rounds(observed.seen), theory.tree_broadcast_steps(observed.case["world_size"])
    return Finding(f"{seen} rounds", f"{wanted}", observed.words) if seen > wanted else None


def most_told(observed: Observed) -> int:
    """To how many a rank sends at most."""
    return max(len(observed.seen.peers(rank)) for rank in range(observed.case["world_size"]))


def total(case: Case) -> int:
    """A message for each rank but one."""
    return (int(case["world_size"]) - 1) * inputs.rank_values(case, case["src"]).nbytes


WRONG_VALUES: dict[str, Any] = {
    "returned, not in place": instead("returned", right),
    "rank 0 for src": lambda case: list(all_values(case)[[0] * case["world_size"]]),
    "right for some sources only": Sign(by_source),
    "rounds are missing": every(some_heard),
}
WRONG_BYTES: dict[str, Any] = {
    "everybody sends to everybody": lambda case: case["world_size"] * total(case),
    "sent to ranks that know": every(lambda each: each.seen.total_bytes > total(each.case)),
}
WRONG_ROUNDS: dict[str, Any] = {
    "the root sends to everybody": every(
        lambda each: len(each.seen.peers(each.case["src"])) == each.case["world_size"] - 1
    ),
    "a chain": every(lambda each: most_told(each) == 1),
    "two each": every(lambda each: most_told(each) == 2),
    "ranks that know stand idle": NOTHING_ELSE,
}
VALUES = "every rank ends up with the values of rank `src`"
ROUNDS = "⌈log₂ N⌉ rounds, in each of which a rank sends one message"
EXERCISE = Exercise(
    id="collectives.4", function=FUNCTION, title="A broadcast along a tree", harness="collectives.broadcast",
    draw=draw, handed_out=inputs.values, holds=holds,
    checks=(
        own_work(FUNCTION),
        messages_alone(1, FUNCTION),
        values(3, "values", VALUES, right, of="tensor", wrong=WRONG_VALUES),
        sends(1, "traffic", "all ranks together send (N−1)·D bytes", total, wrong=WRONG_BYTES),
        order(3, "rounds", ROUNDS, find_rounds, wrong=WRONG_ROUNDS),
    ),
)  # fmt: skip
