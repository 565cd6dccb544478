"""The two CSV files: points for a gradebook, and statistics of the exercises."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from typing import IO, Any

from .record import Record, Standing
from .text import cell


class Scores:
    """``scores.csv``: one row a learner, one column an exercise."""

    def __init__(self, file: IO[str], exercises: Sequence[str]) -> None:
        self._writer = csv.writer(file)
        self._exercises = exercises
        self._writer.writerow(["learner", "status", "points", "max_points", "percent", *exercises])

    def add(self, standing: Standing) -> None:
        """The row of one learner."""
        row: list[Any] = [cell(standing.learner), standing.status, standing.points, standing.max_points]
        points = [standing.exercises[name][0] for name in self._exercises]
        self._writer.writerow([*row, f"{standing.percent:.1f}", *points])


def write_statistics(file: IO[str], rows: Sequence[Record]) -> None:
    """``statistics.csv``: one row an exercise."""
    writer = csv.writer(file)
    names = ["exercise", "title", "points", "graded", "attempted", "passed", "mean_points", "mean_percent"]
    writer.writerow([*names, "commonest_failure_check", "commonest_failure_mistake", "commonest_failure_count"])
    for row in rows:
        worst = row["commonest_failure"] or {"check": "", "mistake": "", "count": 0}
        told = [cell(worst["check"]), cell(worst["mistake"]), worst["count"]]
        writer.writerow([cell(row[name]) if isinstance(row[name], str) else row[name] for name in names] + told)
