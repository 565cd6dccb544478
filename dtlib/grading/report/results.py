"""The class as a whole: the content of ``results.json``, from which both reports of the class are made."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from .record import NO_VERDICT, RESULTS_SCHEMA, TIMES, WAITING, Record
from .text import percent

if TYPE_CHECKING:
    from dtlib.grading.exercise import Exercise

WHOLE = "(whole exercise)"
UNKNOWN = "no known mistake"
CARRIED = "carried error"  # the checks' name for what is right but for an earlier mistake
_ODD = ("tampered", "limit")  # kinds of trouble that an instructor may want to ask about


def class_record(
    seed: int, exercises: Sequence[Exercise], learners: list[Record], limits: Mapping[str, Any], grader: Record
) -> Record:
    """A class of which nobody is graded yet. `learners` are the entries that `standing` makes, in order."""
    return {
        "schema": RESULTS_SCHEMA,
        "state": "grading",  # or complete, interrupted
        "seed": seed,
        "grader": grader,
        "limits": limits,
        "exercises": [{"id": each.id, "title": each.title, "points": each.points} for each in exercises],
        "max_points": sum(each.points for each in exercises),
        "walls": {},  # "" for one that stood for everybody, else why it did not
        "class": {},
        "alike": [],  # names that differ in case or form alone
        "not_kept": "",  # why no later run believes these records
        "faults": [],  # on what the grader itself failed
        "not_known": [],  # what was ended before anybody could tell what it earns
        "learners": learners,
        "statistics": [],
        "measured": {"kept": 0},
    }


def told(learner: str, exercise: str, text: str) -> Record:
    """Something to tell of an exercise of a learner, of all of them where it is "", or of the class without both."""
    return {"learner": learner, "exercise": exercise, "text": text}


def summarise(group: Record) -> None:
    """Say in `group` how the class stands. What has no verdict yet counts as zero."""
    points = [each["points"] for each in group["learners"] if each["status"] != WAITING]
    group["class"] = {
        "learners": len(group["learners"]),
        "graded": len(points),
        "mean_percent": percent(fmean(points or [0]), group["max_points"]),
        "median_percent": percent(median(points or [0]), group["max_points"]),
    }


class Counts:
    """Counts how each exercise went, record by record; it keeps numbers and a few reasons alone."""

    def __init__(self, exercises: Sequence[Exercise]) -> None:
        self._exercises = exercises
        self._statuses: Counter[tuple[str, str]] = Counter()
        self._points: dict[str, Counter[int]] = {each.id: Counter() for each in exercises}
        self._failures: dict[str, Counter[tuple[str, str]]] = {each.id: Counter() for each in exercises}
        self.measured: dict[str, Any] = {**dict.fromkeys(TIMES[1:], 0.0), "exercise_seconds": Counter()}
        self.odd: list[Record] = []  # what went beyond the rules
        self.not_known: list[Record] = []

    def add(self, record: Record) -> None:
        """Count one learner. What has no verdict is left out of every mean."""
        for entry in record["exercises"]:
            name, status = entry["id"], entry["status"]
            self._statuses[name, status] += 1
            self.measured["exercise_seconds"][name] += entry["measured"]["seconds"]
            for each in TIMES[1:]:
                self.measured[each] = round(self.measured[each] + entry["measured"][each], 3)
            if status not in NO_VERDICT:
                self._points[name][entry["points"]] += 1
            if status in ("fail", "partly right"):
                self._failures[name].update(set(_failures(entry)))
            for is_one, listed in ((status == "not known", self.not_known), (entry["trouble"] in _ODD, self.odd)):
                if is_one:
                    listed.append(told(record["learner"], name, entry["reason"][:300]))

    def rows(self) -> list[Record]:
        """One row an exercise, in their order; ``commonest_failure`` is None where nobody failed."""
        return [self._row(exercise) for exercise in self._exercises]

    def _row(self, exercise: Exercise) -> Record:
        points, failures = self._points[exercise.id], self._failures[exercise.id]
        passed, partly, failed, unknown = (
            self._statuses[exercise.id, status] for status in ("pass", "partly right", "fail", "not known")
        )
        mean = sum(each * count for each, count in points.items()) / max(1, points.total())
        # Among equals that of the first check: the same whatever the order in which learners were counted.
        order = {each.name: number for number, each in enumerate(exercise.checks)}
        worst = min(failures, key=lambda each: (-failures[each], order.get(each[0], len(order)), each), default=None)
        return {
            "exercise": exercise.id,
            "title": exercise.title,
            "points": exercise.points,
            "graded": points.total(),
            "attempted": passed + partly + failed,
            "passed": passed,
            "partly_right": partly,
            "not_known": unknown,
            "mean_points": round(mean, 3),
            "mean_percent": percent(mean, exercise.points),
            "distribution": [points[each] for each in range(exercise.points + 1)],
            "commonest_failure": worst and {"check": worst[0], "mistake": worst[1], "count": failures[worst]},
        }


def _failures(entry: Record) -> Iterator[tuple[str, str]]:
    """What failed, as (check, mistake); a mistake that several checks name is told once, by the first of them.

    Who hung or died is said to have done so, and no check is blamed for it. What merely follows from an earlier mistake
    is none of its own.
    """
    if entry["reason"]:
        yield WHOLE, entry["trouble"] or UNKNOWN
        return
    seen: set[str] = set()
    for check in entry["checks"]:
        mistake = check["mistake"] or UNKNOWN
        if check["verdict"] != "fail" or (mistake == CARRIED and seen) or (mistake in seen and mistake != UNKNOWN):
            continue
        seen.add(mistake)
        if check["trouble"]:
            yield WHOLE, ": ".join(filter(None, (check["trouble"], check["mistake"])))
        else:
            yield check["name"], mistake


def schema(name: str = "results") -> Record:
    """The JSON Schema (draft 2020-12) of ``results.json``, or of a learner's record with ``name="learner"``."""
    text = files(__package__).joinpath(f"{name}.schema.json").read_text(encoding="utf-8")
    return json.loads(text)  # type: ignore[no-any-return]
