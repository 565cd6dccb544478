"""compression.5: the bandwidth below which compression pays, with and without overlap, on two levels; on paper."""

import math
from functools import partial
from typing import Any

from dtlib.grading.exercises.inputs import Case, Rng, call, in_order
from dtlib.grading.exercises.kinds import on_paper, values

TRIPLE = "across, everywhere, hidden"
GB = 1e9

#: Nodes, cards of a node, bytes that are left of each, milliseconds of compressing it all, the part of what is sent
#: inside that backward hides, and milliseconds that it hides besides: one card a node, one node, hidden or not; at
#: last more across than inside.
KINDS = (
    (4, 8, 0.25, 5, 0, 0), (2, 1, 0.5, 30, 0, 15), (16, 8, 0.01, 40, 1, 60), (3, 6, 0.02, 25, 1, 200),
    (1, 8, 0.1, 30, 1, 10), (8, 4, 0.3, 60, 0.5, 0), (6, 2, 0.6, 15, 1, 1), (64, 8, 0.05, 35, 1, 500),
    (9, 1, 0.25, 1, 0, 0),
)  # fmt: skip


def drawn(
    rng: Rng, nodes: int, cards: int, left: float, milliseconds: float, inside: float, more: float
) -> dict[str, Any]:
    """Compressing what stays in a node takes longer than it saves there."""
    full = float(rng.uniform(1, 6)) * GB
    compressed = full * left * float(rng.uniform(0.8, 1.25))
    rate = float(rng.uniform(250, 450)) * GB
    seconds = (milliseconds / 1e3 + 2 * (1 - 1 / cards) * full / rate) * float(rng.uniform(0.9, 1.3))
    hidden = inside * 2 * (1 - 1 / cards) * full / rate + more / 1e3 * float(rng.uniform(0.8, 1.2))
    numbers = [full, compressed, seconds, hidden, nodes, cards, rate]
    words = "D={:.7g} B, D'={:.7g} B, {:.7g} s to compress, {:.7g} s hidden, {} nodes of {} cards, {:.7g} B/s inside"
    return call(words.format(*numbers), numbers)


def right(case: Case) -> list[float]:
    """Where both ways take equally long, by halving what lies between too slow and too fast."""
    full, compressed, seconds, hidden, nodes, cards, rate = case["arguments"]

    def sends(inside: float, across: float, bandwidth: float) -> float:
        return 2 * (1 - 1 / cards) * inside / rate + 2 * (1 - 1 / nodes) * across / cards / bandwidth

    def gains(place: int, bandwidth: float) -> float:
        dense, less = (sends(full, each, bandwidth) for each in (full, compressed))
        if place == 1:
            return dense - sends(compressed, compressed, bandwidth) - seconds
        return max(0, dense - hidden * (place == 2)) - max(0, less - hidden * (place == 2)) - seconds / cards

    found = []
    for place in range(3):
        low, high = 1e-3, 1e18
        for _ in range(200):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if gains(place, middle) > 0 else (low, middle)
        found.append(low if nodes > 1 else 0.0)
    return found


part = partial(values, right=right, parts=TRIPLE, kind="overlap", atol=1e-9)

EXERCISE = on_paper(
    "compression.5", "pays_below", "Below which bandwidth?", in_order(KINDS, drawn),
    part(2, "across", "compressed between nodes alone", part=0),
    part(2, "everywhere", "compressed inside as well", part=1),
    part(3, "hidden", "compressed between nodes, with transfers behind the backward pass", part=2),
)  # fmt: skip
