"""What the exercises on ZeRO share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dtlib.grading.kinds import Theory
from dtlib.grading.oracle import FLOAT_BYTES, remembered, sizes
from dtlib.grading.seen import Case, Observed

ROOM = 6 * 2**20  # batches, activations of a few samples, what libraries keep


def each_rank(theory: Callable[[Case, int], Any]) -> Theory:
    """What ``theory(case, rank)`` says of every rank."""
    return remembered(lambda case: [theory(case, rank) for rank in range(case["world_size"])])


def share_bytes(case: Case, rank: int) -> int:
    """The bytes of a rank's shares, each parameter that takes a gradient split by itself."""
    n = case["world_size"]
    return FLOAT_BYTES * sum(size // n + (rank < size % n) for size in sizes(case, trained=True))


def positions(case: Case, total: int) -> Any:
    """Which of `total` elements a rank is asked for: of many a few."""
    rng = np.random.default_rng(case["seed"])
    return np.sort(rng.choice(total, 5000, replace=False)) if case["weighed"] else np.arange(total)


def sent_before(observed: Observed, label: str, number: int) -> float:
    """Which part of all bytes the ranks had sent when each asked for its n-th piece called `label`."""
    asks = [observed.seen.asked(rank, label)[number] for rank in range(len(observed.said))]
    return sum(map(observed.seen.sent_by, asks)) / max(1, observed.seen.total_bytes)
