"""What the two exercises on rings share: cases, chunks, and how a ring looks on the wire."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dtlib.grading.exercise import Check, Finding
from dtlib.grading.kinds import FLOAT_BYTES, Sign, every, near, order
from dtlib.grading.seen import Case, Observed
from dtlib.theory import collectives as theory

ATOL = 1e-3  # inputs are multiples of 1/8, so sums are exact; a mean rounds, by a few units in the last place


def draw_ring(rng: np.random.Generator, **more: Any) -> list[dict[str, Any]]:
    """2, 4 and 3 ranks, each with equal chunks and with unequal ones; 4 with 3 elements and with 2.

    Two ranks come first: there a message that is thrown away is missed for certain, and all is quiet at once.
    """
    equal = [(n, n * int(rng.integers(8_000, 12_000))) for n in (2, 4, 3)]
    unequal = [(n, n * int(rng.integers(8_000, 12_000)) + int(rng.integers(1, n))) for n in (2, 4, 3)]
    shapes = [equal[0], unequal[0], *equal[1:], *unequal[1:]]
    return [ring_case(n, length, rng, **more) for n, length in (*shapes, (4, 3), (4, 2))]


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


def cut(row: np.ndarray[Any, Any], n: int) -> list[np.ndarray[Any, Any]]:
    """`row` cut into n chunks, as the exercises define them."""
    return np.array_split(row, n)


def sent(algorithm: str, case: Case) -> list[float]:
    """What theory says that each rank sends in a case."""
    return list(theory.traffic(algorithm, case["num_elements"], FLOAT_BYTES, case["world_size"]).sent_bytes)


def sent_in(messages: Callable[[int], int], factor: float, algorithm: str) -> Sign:
    """Each rank sends ``messages(n)``, and `factor` times the bytes that theory says."""

    def holds(each: Observed) -> bool:
        own = [[m.num_bytes for m in each.seen.data("send") if m.rank == rank] for rank in range(len(each.said))]
        told = zip(own, sent(algorithm, each.case), strict=True)
        return all(len(sizes) == messages(len(own)) and near(sum(sizes), factor * wanted) for sizes, wanted in told)

    return every(holds)


def one_rank_collects(each: Observed) -> bool:
    """Whether, of several ranks, all but one send to that one alone."""
    n = each.case["world_size"]
    told = [each.seen.peers(rank) for rank in range(n)]
    return n == 2 or any(all(told[r] == {root} for r in range(n) if r != root) for root in range(n))


def holds(case: Case) -> list[tuple[int, int, int, int]]:
    """One rank is told nothing before nothing else moves: then its partners stand where they wait for it."""
    return [(case["seed"] % case["world_size"], 0, -1, 0)]


def ring(points: int, steps: Callable[[int], int], words: str) -> Check:
    """Each rank sends to one neighbour, as often as `steps` says, and none waits for its turn: all seen on the wire.

    While one rank is held back, every other must have begun to send *and* to receive: whoever has begun one of them
    alone would do the other when that is over.
    """

    def find(observed: Observed) -> Finding | None:
        seen, n = observed.seen, observed.case["world_size"]
        for rank in range(n):
            if len(seen.peers(rank)) > 1:
                others = ", ".join(map(str, sorted(seen.peers(rank))))
                return Finding(f"rank {rank} sending to ranks {others}", "one neighbour", observed.words)
            number = sum(each.rank == rank for each in seen.data("send"))
            if number != steps(n):
                return Finding(f"{number} messages sent by rank {rank}", f"{steps(n)}", observed.words)
        late = _takes_turns(observed)
        if late is not None:
            begun = "to receive" if late[1] == {"receive"} else "to send" if late[1] else "nothing"
            return Finding(
                f"rank {late[0]} having begun {begun} alone while it waits", "both, at the same time", observed.words
            )
        return None

    def number_is(compare: Callable[[int, int], bool]) -> Any:
        def holds(each: Observed) -> bool:
            n = each.case["world_size"]
            sent = max(sum(m.rank == rank for m in each.seen.data("send")) for rank in range(n))
            return compare(sent, steps(n))

        return every(holds)

    wrong = {
        "not a ring": every(lambda each: any(len(each.seen.peers(rank)) > 1 for rank in range(len(each.said)))),
        "too few messages": number_is(lambda seen, wanted: seen < wanted),
        "too many messages": number_is(lambda seen, wanted: seen > wanted),
        "ranks take turns": every(lambda each: _takes_turns(each) is not None),
    }
    return order(points, "rounds", words, find, wrong=wrong, where="large")


def _takes_turns(observed: Observed) -> tuple[int, set[str]] | None:
    """A rank that had begun only one of sending and receiving when nothing moved any more, and which."""
    seen = observed.seen
    held = next((each for each in seen.asks if each.why == "quiet"), None)
    if held is None or not seen.is_proved:
        return None
    for rank in range(len(observed.said)):
        begun = {each.kind for each in seen.begun_by(rank, held.position)}
        if rank != held.rank and begun != {"send", "receive"}:
            return rank, begun
    return None
