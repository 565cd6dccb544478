"""cp.3: attention of tokens whose keys and values travel around a ring."""

from collections.abc import Callable
from typing import Any

import numpy as np

from dtlib.grading.exercises import inputs, oracle
from dtlib.grading.exercises.exercise import Exercise
from dtlib.grading.exercises.kinds import ROOM, Ranges, keeps, messages_alone, own_work, sends, values
from dtlib.grading.exercises.seen import Case
from dtlib.grading.exercises.signs import Theory, Wrong, every, only_if, some_rank
from dtlib.theory import cp

from . import _attention as attention
from ._attention import Merge, merged, seen

TOLERANCE = 3e-4  # float32, means of numbers around 1, with weights from scores of up to some hundred
LARGE = 100.0  # queries with which scores are too large for an exponential
GRANTED = 8  # of a rank's tensors: three that are given, the output, products, and room; thrice what each block gives


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
        if causal:  # else places from rank times one length are in the right order too
            lengths = attention.in_front(lengths)
        if n == 4 and causal and not is_equal:
            lengths[int(rng.integers(1, n))] = 1
        cases.append(attention.case(rng, lengths, causal=causal, largest=largest))
    # The first rank has few tokens: what it holds are the others' keys and values, and nothing else of any size.
    return [*cases, attention.case(rng, [16, *[256] * 5], causal=False, shape=(1, 4096), weighed=True)]


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


def places_from(whose: Callable[[int, int], int]) -> Callable[[Case, int, int], Any]:
    """As if all ranks before one had as many tokens as ``whose(that one, the one that computes)``."""

    def mask(case: Case, rank: int, block: int) -> Any:
        first, first_key = (each * case["lengths"][whose(each, rank)] for each in (rank, block))
        return attention.local(case, rank, block, first, first_key)

    return mask


PLACES = [places_from(each) for each in (lambda each, rank: each, lambda each, rank: rank, lambda each, rank: 0)]


def own_block_alone(case: Case, rank: int, block: int) -> Any:
    """Hidden is what comes later in the own block, and nothing of others."""
    return seen(case, rank, block) if block == rank else everything(case, rank, block)


def where(condition: str, theory: Theory) -> Theory:
    """A theory of cases with a property; it says nothing of others."""
    return lambda case: theory(case) if case["is"][condition] else None


def needed(case: Case, tensors: int = 2) -> float:
    """What all ranks send if so many of a rank's tensors visit all others."""
    n, seq = case["world_size"], sum(case["lengths"])
    keys_and_values = n * cp.ring_elements(1, seq, case["heads"], case["width"], n, backward=False)
    return oracle.FLOAT_BYTES * keys_and_values / 2 * tensors


def held(blocks: float) -> Callable[[Case, int], float]:
    """So many blocks of keys and values, what is granted of a rank's own tokens, its scores twice, and room."""

    def most(case: Case, rank: int) -> float:
        own, longest = case["lengths"][rank], max(case["lengths"])
        rows = (GRANTED + 3 * case["world_size"]) * own + 2 * blocks * longest
        return oracle.FLOAT_BYTES * case["heads"] * (rows * case["width"] + 2 * own * longest) + ROOM

    return most


OUTPUT: Wrong = {
    "places from the own length": tuple(where("causal", output(mask=each)) for each in PLACES),
    "later blocks not hidden": where("causal", output(mask=own_block_alone)),
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
    "always causal": output(mask=attention.in_all),
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
HELD: Ranges = {"all keys and values": (held(3), None)}

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
              held(2), "held at a time", wrong=HELD),
    ),
)  # fmt: skip
