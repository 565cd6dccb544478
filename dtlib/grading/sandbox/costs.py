"""How much an answer may compute: as measured of the references, in units of a little work that is timed here."""

from __future__ import annotations

import json
import time
from functools import cache
from pathlib import Path

import numpy as np

_FILE = Path(__file__).with_name("costs.json")
_TIMES = 25  # what an answer may take longer than the reference


@cache
def unit_seconds() -> float:
    """Processor seconds of a little work of Python and numpy on this machine: the best of some tries."""
    best = float("inf")
    matrix = np.ones((96, 96), np.float32)
    for _ in range(5):
        start = time.thread_time()
        total = 0
        for number in range(20_000):
            total += number & 7
        for _ in range(20):
            matrix = (matrix @ matrix) / np.float32(96)
        best = min(best, time.thread_time() - start)
    return max(best, 1e-4)


@cache
def recorded() -> dict[str, float]:
    """For each exercise what the reference's dearest case took of a rank, in `unit_seconds`."""
    return {str(name): float(cost) for name, cost in json.loads(_FILE.read_text("utf-8")).items()}


def limit(exercise: str, least_seconds: float) -> float:
    """Processor seconds that a rank may take for a case: `least_seconds`, or more where the reference needs much."""
    return max(least_seconds, _TIMES * recorded().get(exercise, 0.0) * unit_seconds())
