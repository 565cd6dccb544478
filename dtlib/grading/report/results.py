"""``results.json``: the whole class in one file, as ``results.schema.json`` beside this module describes it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from .record import RESULTS_SCHEMA, WAITING, Record, Standing
from .text import percent

MAX_FAULTS = 100
MAX_ODD = 30
ODD = ("tampered", "limit")  # kinds of trouble that an instructor may want to ask about


@dataclass(frozen=True)
class Fault:
    """Something on which the grader itself failed: at which learner's which exercise ("" for all), and how."""

    learner: str
    exercise: str
    text: str


@dataclass
class Class:
    """A class while it is graded: everything that ``results.json`` and the report of the class tell."""

    seed: int
    exercises: Sequence[Record]  # id, title, points of each
    grader: Mapping[str, str]
    limits: Mapping[str, Any]
    standings: dict[str, Standing]  # by learner, in order
    state: str = "grading"  # or complete, interrupted
    walls: Mapping[str, str] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    statistics: Sequence[Record] = ()
    odd: list[tuple[str, str, str]] = field(default_factory=list)  # learner, exercise, reason: for the report alone
    num_odd: int = 0
    kept: int = 0
    measured: dict[str, Any] = field(default_factory=dict)

    def look_at(self, record: Record) -> None:
        """Remember, up to a bound, where a learner's code went beyond the rules."""
        for entry in record["exercises"]:
            if entry["trouble"] in ODD and entry["reason"]:
                self.num_odd += 1
                if len(self.odd) < MAX_ODD:
                    self.odd.append((record["learner"], entry["id"], entry["reason"]))

    @property
    def max_points(self) -> int:
        """What all exercises together are worth."""
        return sum(each["points"] for each in self.exercises)

    @property
    def graded(self) -> list[Standing]:
        """Those who are graded; an exercise on which the grader failed counts as zero until it is graded again."""
        return [each for each in self.standings.values() if each.status != WAITING]

    @property
    def mean_percent(self) -> float:
        """The mean of all who are graded, 0 where nobody is."""
        return percent(statistics.fmean([each.points for each in self.graded]), self.max_points) if self.graded else 0.0

    @property
    def median_percent(self) -> float:
        """The median of all who are graded, 0 where nobody is."""
        return (
            percent(statistics.median([each.points for each in self.graded]), self.max_points) if self.graded else 0.0
        )

    def as_dict(self) -> Record:
        """The content of ``results.json``."""
        return {
            "schema": RESULTS_SCHEMA,
            "state": self.state,
            "seed": self.seed,
            "grader": dict(self.grader),
            "limits": dict(self.limits),
            "exercises": [dict(each) for each in self.exercises],
            "max_points": self.max_points,
            "walls": {name: {"stands": not reason, "reason": reason} for name, reason in self.walls.items()},
            "class": {
                "learners": len(self.standings),
                "graded": len(self.graded),
                "mean_percent": self.mean_percent,
                "median_percent": self.median_percent,
            },
            "faults": [vars(each) for each in self.faults[:MAX_FAULTS]],
            "learners": [each.as_dict() for each in self.standings.values()],
            "statistics": [dict(each) for each in self.statistics],
            "measured": self.measured,
        }


def schema(name: str = "results") -> Record:
    """The JSON Schema (draft 2020-12) of ``results.json``, or of a learner's record with ``name="learner"``."""
    text = files(__package__).joinpath(f"{name}.schema.json").read_text(encoding="utf-8")
    return json.loads(text)  # type: ignore[no-any-return]
