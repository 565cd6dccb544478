"""ep.1: what a rank sends in the all-to-alls of a layer, with a copy an expert and with one a rank; on paper."""

from functools import partial
from math import comb
from typing import Any

from dtlib.grading.exercises.inputs import Case, Cases, Rng, call
from dtlib.grading.exercises.kinds import on_paper, values

TRIPLE = "copies, visits, sent_bytes"

#: Experts, experts a token, ranks: one rank, two, a power of two and none, one expert a token, so many that no rank is
#: left out, all of them, an expert a rank, and fewer experts a rank than a token has.
SPLITS = ((8, 2, 1), (16, 4, 2), (12, 3, 3), (64, 6, 16), (24, 1, 6), (8, 5, 4), (10, 10, 5), (7, 3, 7), (60, 4, 20))


def draw(rng: Rng) -> Cases:
    """A published layer on a node, and each kind of split, elements of one, two and four bytes either way."""
    cases = [case(4096, 7168, 256, 8, 8, 1, 2)]
    for num_experts, top_k, ep in SPLITS:
        there, back = (int(each) for each in rng.permutation([1, 2, 4])[:2])
        tokens, hidden = 20 * int(rng.integers(3, 60)) + 7, 20 * int(rng.integers(1, 9)) + 3  # no multiples of 5
        cases.append(case(tokens, hidden, num_experts, top_k, ep, there, back))
    return cases


def case(*arguments: Any) -> dict[str, Any]:
    words = "{} tokens, h={}, E={}, k={}, N={}, {} B an element out and {} B back".format(*arguments)
    return call(words, arguments)


def right(case: Case) -> list[float]:
    """A rank that has none of a token's experts has lost each of its draws, one after the other."""
    tokens, hidden, num_experts, top_k, ep, there, back = case["arguments"]
    others = num_experts - num_experts // ep
    visits = ep * (1 - comb(others, top_k) / comb(num_experts, top_k))
    sent = [tokens * hidden * each * (1 - 1 / ep) for each in (top_k, visits)]
    return [sent[0], visits, (there + back + there + back) * sent[1]]


part = partial(values, right=right, parts=TRIPLE, kind="traffic")

EXERCISE = on_paper(
    "ep.1", "exchanged", "The bill of an all-to-all", draw,
    part(2, "copies", "elements of a dispatch with a copy for each expert", part=0),
    part(2, "visits", "ranks that a token visits", part=1),
    part(3, "sent", "bytes of a step with a copy for each rank", part=2),
)  # fmt: skip
