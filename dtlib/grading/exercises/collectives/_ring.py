"""What the two exercises on rings share: cases, chunks, and how a ring looks on the wire."""

from collections.abc import Callable
from typing import Any

import numpy as np

from dtlib.grading.exercises.exercise import Check, Finding
from dtlib.grading.exercises.inputs import SLOW
from dtlib.grading.exercises.kinds import full_bytes, near, order, sends
from dtlib.grading.exercises.oracle import FLOAT_BYTES
from dtlib.grading.exercises.seen import Case, Observed
from dtlib.grading.exercises.signs import every
from dtlib.theory import collectives as theory

cut = np.array_split  # into n chunks, as the exercises define them
ATOL = 1e-3  # inputs are multiples of 1/8, so sums are exact; a mean rounds, by a few units in the last place


def draw_ring(rng: np.random.Generator, **more: Any) -> list[dict[str, Any]]:
    """2, 4 and 3 ranks, each with equal chunks and with unequal ones; 4 with 3 elements and with 2. Two ranks come
    first: there a message that is thrown away is missed for certain, and one listens late."""
    equal = [(n, n * int(rng.integers(8_000, 12_000))) for n in (2, 4, 3)]
    unequal = [(n, n * int(rng.integers(8_000, 12_000)) + int(rng.integers(1, n))) for n in (2, 4, 3)]
    shapes = [equal[0], unequal[0], *equal[1:], *unequal[1:]]
    cases = [ring_case(n, length, rng, **more) for n, length in (*shapes, (4, 3), (4, 2))]
    cases[0]["slow"] = first(cases[0])
    return cases


def first(case: Case) -> int:
    """The rank that is told nothing before nothing else moves."""
    return int(case["seed"] % case["world_size"])


def ring_case(n: int, length: int, rng: np.random.Generator, **more: Any) -> dict[str, Any]:
    """A case of `length` elements on n ranks."""
    told = "".join(f", {value}" for value in more.values())
    return {
        "world_size": n,
        "num_elements": length,
        "seed": int(rng.integers(0, 2**31)),
        "words": f"{n} ranks, {length} elements{told}",
        "is": {"two ranks": n == 2, "divisible": length % n == 0, "long enough": length >= n, "large": length > 1000},
        **more,
    }


def messages(observed: Observed) -> list[int]:
    ranks = [message.rank for message in observed.seen.data("send")]
    return [ranks.count(rank) for rank in range(len(observed.said))]


def traffic(points: int, words: str, algorithm: str, steps: Callable[[int], int], **wrong: Any) -> Check:
    """Each rank sends what theory says that it does in `algorithm`, which takes `steps` messages."""

    def sent(case: Case) -> list[float]:
        return list(theory.traffic(algorithm, case["num_elements"], FLOAT_BYTES, case["world_size"]).sent_bytes)

    def twice_as_long(each: Observed) -> bool:
        own = zip(messages(each), map(each.seen.sent_bytes, range(len(each.said))), sent(each.case), strict=True)
        return all(number == steps(len(each.said)) and near(seen, 2 * wanted) for number, seen, wanted in own)

    def one_rank_collects(each: Observed) -> bool:
        ranks = range(len(each.said))
        return len(ranks) == 2 or any(all(each.seen.peers(r) == {root} for r in ranks if r != root) for root in ranks)

    known: Any = {
        "whole buffers": lambda case: [(case["world_size"] - 1) * full_bytes(case)] * case["world_size"],
        "one rank does the work": every(one_rank_collects),
        "messages twice as long": every(twice_as_long),
        **wrong,
    }
    return sends(points, "traffic", words, sent, where="large", wrong=known)


def holds(case: Case) -> list[tuple[int, int, int, int]]:
    """One rank is told nothing before nothing else moves: then its partners stand where they wait for it. If it is
    slow, it listens when nothing else moves: then a partner who does not wait for its message has returned."""
    return [(first(case), piece, -1, 0) for piece in range(1 + SLOW * ("slow" in case))]


def takes_turns(observed: Observed) -> Finding | None:
    """That while one rank was held back, every other had begun to send *and* to receive, not one of them alone."""
    seen = observed.seen
    held = next((each for each in seen.asks if each.why == "quiet"), None)
    if held is None or not seen.is_proved:
        return None
    for rank in range(len(observed.said)):
        begun = {each.kind for each in seen.begun_by(rank, held.position)}
        if rank != held.rank and begun != {"send", "receive"}:
            told = f"rank {rank} having begun {'to ' + begun.pop() if begun else 'nothing'} alone while it waits"
            return Finding(told, "both, at the same time", observed.words)
    return None


def ring(points: int, steps: Callable[[int], int], words: str) -> Check:
    """Each rank sends to one neighbour, as often as `steps` says, and none waits for its turn: all seen on the wire."""

    def find(observed: Observed) -> Finding | None:
        seen, n = observed.seen, observed.case["world_size"]
        for rank, number in enumerate(messages(observed)):
            if len(seen.peers(rank)) > 1:
                others = ", ".join(map(str, sorted(seen.peers(rank))))
                return Finding(f"rank {rank} sending to ranks {others}", "one neighbour", observed.words)
            if number != steps(n):
                return Finding(f"{number} messages sent by rank {rank}", f"{steps(n)}", observed.words)
        return takes_turns(observed)

    wrong = {
        "not a ring": every(lambda each: any(len(each.seen.peers(rank)) > 1 for rank in range(len(each.said)))),
        "too few messages": every(lambda each: max(messages(each)) < steps(len(each.said))),
        "too many messages": every(lambda each: max(messages(each)) > steps(len(each.said))),
        "ranks take turns": every(lambda each: takes_turns(each) is not None),
    }
    return order(points, "rounds", words, find, wrong=wrong, where="large")
