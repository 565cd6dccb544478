"""What the exercises on ZeRO share."""

from collections.abc import Callable
from typing import Any

import numpy as np

from dtlib.grading.exercises.oracle import FLOAT_BYTES, remembered, sizes
from dtlib.grading.exercises.seen import Case, Observed
from dtlib.grading.exercises.signs import Theory


def each_rank(theory: Callable[[Case, int], Any]) -> Theory:
    """What ``theory(case, rank)`` says of every rank."""
    return remembered(lambda case: [theory(case, rank) for rank in range(case["world_size"])])


def share_bytes(case: Case, rank: int, *, flat: bool = False) -> int:
    """The bytes of a rank's shares: each parameter that takes a gradient is split by itself, or with `flat` all at
    once."""
    n, lengths = case["world_size"], sizes(case, trained=True)
    return FLOAT_BYTES * sum(size // n + (rank < size % n) for size in ([sum(lengths)] if flat else lengths))


def positions(case: Case, total: int) -> Any:
    """Which of `total` elements a rank is asked for: of many a few."""
    few = min(5000, total // 2)
    return np.sort(np.random.default_rng(case["seed"]).choice(total, few, replace=False))


def sent_before(observed: Observed, label: str, number: int) -> float:
    """Which part of all bytes the ranks had sent when each asked for its n-th piece called `label`."""
    asks = [observed.seen.asked(rank, label)[number] for rank in range(len(observed.said))]
    return sum(map(observed.seen.sent_by, asks)) / max(1, observed.seen.total_bytes)
