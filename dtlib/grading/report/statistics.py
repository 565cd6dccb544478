"""How each exercise went: who tried, who passed, how many points, and what went wrong most often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .record import WAITING, Record
from .text import percent

if TYPE_CHECKING:
    from dtlib.grading.exercise import Exercise

WHOLE = "(whole exercise)"
UNKNOWN = "no known mistake"
CARRIED = "carried error"  # the checks' name for what is right but for an earlier mistake


class Statistics:
    """Counts, record by record; it keeps numbers alone."""

    def __init__(self, exercises: Sequence[Exercise]) -> None:
        self._exercises = list(exercises)
        self._status: dict[str, Counter[str]] = {each.id: Counter() for each in exercises}
        self._points: Counter[str] = Counter()
        self._failures: dict[str, Counter[tuple[str, str]]] = {each.id: Counter() for each in exercises}
        self._seconds: Counter[str] = Counter()

    def add(self, record: Record) -> None:
        """Count one learner. What is not graded, or could not be, is left out of every mean."""
        for entry in record["exercises"]:
            name = entry["id"]
            self._status[name][entry["status"]] += 1
            self._points[name] += entry["points"]
            self._seconds[name] += entry["measured"]["seconds"]
            if entry["status"] == "fail":
                self._failures[name].update(set(_failures(entry)))

    def rows(self) -> list[Record]:
        """One row an exercise, in their order; ``commonest_failure`` is None where nobody failed."""
        return [self._row(exercise) for exercise in self._exercises]

    def seconds(self) -> dict[str, float]:
        """Seconds that each exercise took, all learners together."""
        return {each.id: round(self._seconds[each.id], 3) for each in self._exercises}

    def _row(self, exercise: Exercise) -> Record:
        status = self._status[exercise.id]
        graded = sum(status.values()) - status[WAITING] - status["error"]
        mean = self._points[exercise.id] / graded if graded else 0.0
        failures = self._failures[exercise.id]
        # Among equals that of the first check: the same whatever the order in which learners were counted.
        order = [each.name for each in exercise.checks]
        worst = min(failures, key=lambda each: (-failures[each], _place(each[0], order), each), default=None)
        return {
            "exercise": exercise.id,
            "title": exercise.title,
            "points": exercise.points,
            "graded": graded,
            "attempted": status["pass"] + status["fail"],
            "passed": status["pass"],
            "mean_points": round(mean, 3),
            "mean_percent": percent(mean, exercise.points),
            "commonest_failure": None
            if worst is None
            else {"check": worst[0], "mistake": worst[1], "count": failures[worst]},
        }


def _place(check: str, order: list[str]) -> int:
    return order.index(check) if check in order else len(order)


def _failures(entry: Record) -> list[tuple[str, str]]:
    """What failed, as (check, mistake); a mistake that several checks name is told once, by the first of them.

    What merely follows from an earlier mistake is none of its own.
    """
    if entry["reason"]:
        return [(WHOLE, entry["trouble"] or UNKNOWN)]
    found: list[tuple[str, str]] = []
    seen: set[str] = set()
    for check in entry["checks"]:
        if check["passed"] or not check["counted"]:
            continue
        mistake = check["mistake"] or entry["trouble"] or UNKNOWN
        if mistake == CARRIED and found:
            continue
        if mistake not in seen or mistake == UNKNOWN:
            found.append((check["name"], mistake))
        seen.add(mistake)
    return found
