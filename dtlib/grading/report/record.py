"""The record of one learner: plain data from which every report is made, and the only thing that a rerun reads again.

What may differ from run to run though the verdicts are the same (seconds, memory, what was printed, the line at which
an endless loop was stopped) stands under the one key ``"measured"``. All else depends on the submission, the seed and
the exercises alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .folder import seal
from .text import MAX_NAME, clean, one_line, percent, printed

if TYPE_CHECKING:
    from dtlib.grading.exercise import Exercise
    from dtlib.grading.grader import Graded

RESULTS_SCHEMA = "dtlib-grade/1"
LEARNER_SCHEMA = "dtlib-grade-learner/1"
WAITING = "not graded yet"
MAX_NOTES = 20

Record = dict[str, Any]


@dataclass(frozen=True)
class Standing:
    """What is kept in memory of a learner: points and status, in all and for each exercise.

    `status` is ``graded``, ``error`` (the grader failed on something) or ``not graded yet``; `file` is the name of the
    learner's files without their ending. `exercises` holds (points, status) by exercise.
    """

    learner: str
    file: str
    status: str
    points: int
    max_points: int
    exercises: Mapping[str, tuple[int, str]]

    @property
    def percent(self) -> float:
        """Points in percent of what the exercises are worth, rounded down to a tenth."""
        return percent(self.points, self.max_points)

    def as_dict(self) -> Record:
        """The learner's entry in ``results.json``."""
        return {
            "learner": self.learner,
            "file": self.file,
            "status": self.status,
            "points": self.points,
            "max_points": self.max_points,
            "percent": self.percent,
            "exercises": {name: {"points": each[0], "status": each[1]} for name, each in self.exercises.items()},
        }


def waiting(learner: str, file: str, exercises: Sequence[Exercise]) -> Standing:
    """The standing of a learner of whom nothing is graded yet: zero."""
    total = sum(exercise.points for exercise in exercises)
    return Standing(one_line(learner, MAX_NAME), file, WAITING, 0, total, {each.id: (0, WAITING) for each in exercises})


def standing(record: Record, file: str) -> Standing:
    """The standing that a learner's record tells."""
    exercises = {each["id"]: (each["points"], each["status"]) for each in record["exercises"]}
    return Standing(record["learner"], file, record["status"], record["points"], record["max_points"], exercises)


def waiting_record(learner: str, exercises: Sequence[Exercise], status: str = WAITING) -> Record:
    """The record of a learner of whom nothing is graded yet, for the files of the class."""
    entries = [exercise_record(exercise, None) for exercise in exercises]
    return {
        "learner": one_line(learner, MAX_NAME),
        "status": status,
        "notes": [],
        "points": 0,
        "max_points": sum(each["max_points"] for each in entries),
        "exercises": entries,
        "measured": {"seconds": 0.0, "peak_resident_bytes": 0},
    }


def learner_record(
    learner: str,
    fingerprint: str,
    notes: Sequence[str],
    seed: int,
    graded: Sequence[tuple[Exercise, Graded]],
    walls: Mapping[str, str],
) -> Record:
    """The record of a learner all of whose exercises are graded, sealed with a checksum."""
    entries = [exercise_record(exercise, each) for exercise, each in graded]
    record: Record = {
        "schema": LEARNER_SCHEMA,
        "fingerprint": fingerprint,
        "learner": one_line(learner, MAX_NAME),
        "status": "error" if any(each["status"] == "error" for each in entries) else "graded",
        "notes": [one_line(note, 500) for note in notes[:MAX_NOTES]],
        "seed": seed,
        "walls": dict(walls),
        "points": sum(each["points"] for each in entries),
        "max_points": sum(each["max_points"] for each in entries),
        "exercises": entries,
        "measured": {
            "seconds": round(sum(each["measured"]["seconds"] for each in entries), 3),
            "peak_resident_bytes": max((each["measured"]["peak_resident_bytes"] for each in entries), default=0),
        },
    }
    return {**record, "seal": seal(record)}


def exercise_record(exercise: Exercise, graded: Graded | None) -> Record:
    """One exercise: its status, the points of all its checks, the reason. None where it is not graded yet."""
    entry: Record = {
        "id": exercise.id,
        "title": exercise.title,
        "function": exercise.function,
        "status": graded.status if graded else WAITING,
        "points": 0,
        "max_points": exercise.points,
        "reason": clean(graded.reason) if graded else "",
        "trouble": graded.trouble if graded else "",
        "checks": [],
        "measured": {
            "seconds": 0.0,
            "peak_resident_bytes": 0,
            "peak_tensor_bytes": 0,
            "metered": "",
            "printed": "",
            "stood_at": "",
        },
    }
    told = {result.name: result for result in graded.result.checks} if graded else {}
    for check in exercise.checks:
        result = told.get(check.name)
        points = min(max(result.points, 0), check.points) if result else 0
        entry["points"] += points
        entry["checks"].append(
            {
                "name": check.name,
                "kind": check.kind,
                "description": check.description,
                "visible": check.visible,
                "points": points,
                "max_points": check.points,
                "passed": bool(result and result.passed),
                "counted": bool(result is None or result.counted),
                "mistake": result.mistake if result else "",
                "message": clean(result.message) if result else "",
            }
        )
    if graded:
        entry["measured"] = {
            "seconds": round(graded.seconds, 3),
            "peak_resident_bytes": graded.peak_resident_bytes,
            "peak_tensor_bytes": graded.peak_tensor_bytes,
            "metered": one_line(graded.metered, 200),
            "printed": printed(graded.printed),
            "stood_at": one_line(graded.stood_at, 500),
        }
    return entry


def is_whole(record: Record | None, fingerprint: str) -> bool:
    """Whether `record` is one of ours, undamaged, of these very inputs, and free of faults of the grader's own."""
    return (
        record is not None
        and record.get("schema") == LEARNER_SCHEMA
        and record.get("fingerprint") == fingerprint
        and record.get("status") == "graded"
        and record.get("seal") == seal(record)
    )
