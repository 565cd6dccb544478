"""cp.3: attention of tokens whose keys and values travel around a ring."""

from collections.abc import Callable
from typing import Any

import numpy as np

from dtlib.grading import inputs, oracle
from dtlib.grading.exercise import Exercise
from dtlib.grading.kinds import ROOM, Ranges, keeps, messages_alone, own_work, sends, values
from dtlib.grading.seen import Case
from dtlib.grading.signs import Theory, Wrong, every, only_if, some_rank
from dtlib.theory import cp

from . import _attention as attention
from ._attention import Merge, merged, seen

TOLERANCE = 3e-4  # float32, means of numbers around 1, with weights from scores of up to some hundred
LARGE = 100.0  # queries with which scores are too large for an exponential
GRANTED = 12  # of a rank's tensors: three that are given, two blocks of two, the output, a product, and room


def draw(rng: inputs.Rng) -> inputs.Cases:
    """Lengths that are equal and not, one token too, of two ranks and more, causal and not; scores that are large; and
    a case to be weighed."""
    cases = []
    for n, is_equal, causal, largest in (
        (2, True, False, 1.5), (3, False, True, 1.5), (4, True, True, 1.5), (2, False, True, LARGE),
        (3, True, False, 1.5), (4, False, False, LARGE), (3, True, True, 1.5), (4, False, True, 1.5),
    ):  # fmt: skip
        own = int(rng.integers(10, 18))
        lengths = [own] * n if is_equal else [int(each) for each in own + rng.permutation(n) * 3]
        if n == 4 and causal and not is_equal:
            lengths[int(rng.integers(1, n))] = 1
        cases.append(attention.case(rng, lengths, causal=causal, largest=largest))
    return [*cases, attention.case(rng, [256] * 6, causal=False, shape=(1, 4096), weighed=True)]


def handed_out(case: Case, rank: int) -> inputs.Pieces:
    at, width = rows(case), case["width"]
    places = None if at is None else (at[:, None] * width + np.arange(width)).ravel()
    return [("start", attention.given(case, rank) | {"positions": places})]


def rows(case: Case) -> Any:
    """The queries that are asked for: all (None), or of many a few."""
    return np.random.default_rng(case["seed"]).integers(0, case["lengths"][0], 4) if case["weighed"] else None


def output(
    merge: Merge = merged, *, mask: Any = seen, power: float = -0.5,
    blocks: Callable[[int, int], Any] = lambda rank, n: range(n),
) -> Theory:  # fmt: skip
    """Of each rank its tokens' attention to such blocks, merged in such a way."""

    def theory(case: Case) -> list[Any]:
        n, at = case["world_size"], rows(case)
        found = [
            merge([attention.part(case, rank, block, at, mask, power) for block in blocks(rank, n)])
            for rank in range(n)
        ]
        return found if at is None else [each.ravel() for each in found]

    return theory


def everything(case: Case, rank: int, block: int) -> Any:
    return np.ones((case["lengths"][rank], case["lengths"][block]), bool)


def where(condition: str, theory: Theory) -> Theory:
    """A theory of cases with a property; it says nothing of others."""
    return lambda case: theory(case) if case["is"][condition] else None


def needed(case: Case, tensors: int = 2) -> float:
    """What all ranks send if so many of a rank's tensors visit all others."""
    n, seq = case["world_size"], sum(case["lengths"])
    keys_and_values = n * cp.ring_elements(1, seq, case["heads"], case["width"], n, backward=False)
    return oracle.FLOAT_BYTES * keys_and_values / 2 * tensors


def held(tensors: float) -> Callable[[Case, int], float]:
    """So many tensors like a rank's q, its scores twice, and room."""

    def most(case: Case, rank: int) -> float:
        own = case["lengths"][rank]
        return oracle.FLOAT_BYTES * case["heads"] * own * (tensors * case["width"] + 2 * own) + ROOM

    return most


OUTPUT: Wrong = {
    "averaged": (output(attention.averaged), output(attention.averaged_of_seen)),
    "each block its own largest": output(attention.own_largest),
    "outputs added up": output(lambda parts: sum(each.output for each in parts)),
    "own block alone": output(blocks=lambda rank, n: [rank]),
    "a block is missing": (
        output(blocks=lambda rank, n: [each for each in range(n) if each != (rank + 1) % n]),
        output(blocks=lambda rank, n: [each for each in range(n) if each != rank]),
    ),
    "positions from 0": where("causal", output(mask=attention.local)),
    "causal forgotten": where("causal", output(mask=everything)),
    "scores not scaled": output(power=0.0),
    "too large for a number": only_if("small scores"),
    "not a number": some_rank(lambda said, case: bool(np.isnan(said["output"]).any())),
    "right for equal lengths only": only_if("equal lengths"),
}
TRAFFIC: Wrong = {
    "queries travel too": lambda case: needed(case, 3),
    "one step too many": lambda case: needed(case) * case["world_size"] / (case["world_size"] - 1),
    "nothing sent": every(lambda each: not each.seen.total_bytes),
}
HELD: Ranges = {"all keys and values": (held(GRANTED), None)}

EXERCISE = Exercise(
    id="cp.3", function="ring_attention", title="Attention around a ring", harness="cp.ring", draw=draw,
    handed_out=handed_out,
    checks=(
        own_work("ring_attention", built_in=True),
        messages_alone(1, "ring_attention"),
        values(4, "output", "attention to all tokens, on each rank for its own", output(), of="output", wrong=OUTPUT,
               rtol=TOLERANCE, atol=TOLERANCE, least_sent=lambda case: needed(case) / 4),
        sends(2, "traffic", "keys and values visit every other rank once", needed, wrong=TRAFFIC),
        keeps(2, "held", "never more than two blocks of keys and values", lambda seen, rank: seen.peak(rank),
              held(GRANTED), "held at a time", wrong=HELD),
    ),
)  # fmt: skip
