"""The record of one learner: plain data from which every report is made, and the only thing that a rerun reads again.

What may differ from run to run though the verdicts are the same (seconds, memory, what was printed, the line at which
an endless loop was stopped) stands under the key ``"measured"`` alone. All else depends on the submission, the seed and
the exercises.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .text import MAX_NAME, MAX_PRINTED, clean, one_line, percent

if TYPE_CHECKING:
    from dtlib.grading.exercise import Exercise
    from dtlib.grading.result import CheckResult

RESULTS_SCHEMA = "dtlib-grade/2"
LEARNER_SCHEMA = "dtlib-grade-learner/2"
WAITING = "not graded yet"
#: The statuses that are no verdict, the worst first: they are left out of every mean, and graded again.
NO_VERDICT = ("error", "not known", WAITING)
TIMES = ("seconds", "cpu_seconds", "starved_seconds")
_MOST_NOTES = 20

Record = dict[str, Any]


def entry_of(
    exercise: Exercise,
    status: str = WAITING,
    results: Sequence[CheckResult] = (),
    *,
    reason: str = "",
    trouble: str = "",
    no_result: Collection[str] = (),
    measured: Mapping[str, Any] | None = None,
) -> Record:
    """One exercise in a record: its status, and the points of all its checks, those that are not visible included.

    `reason` stands for the exercise as a whole where its checks do not say it all; `trouble` is the kind of the first
    trouble. The checks in `no_result` failed because a case brought none, and for nothing else.
    """
    by_name = {each.name: each for each in results}
    checks = [
        {
            **asdict(found := by_name.get(check.name) or check.result("not looked at")),
            "message": clean(found.message),
            "visible": check.visible,
            "trouble": trouble if check.name in no_result else "",
        }
        for check in exercise.checks
    ]
    seen = {**dict.fromkeys(TIMES, 0.0), "peak_bytes": 0, "printed": "", "stood_at": "", **(measured or {})}
    seen |= {name: round(seen[name], 3) for name in TIMES}
    seen |= {"printed": clean(seen["printed"], MAX_PRINTED).rstrip(), "stood_at": one_line(seen["stood_at"], 500)}
    return {
        "id": exercise.id,
        "title": exercise.title,
        "function": exercise.function,
        "status": status,
        "points": sum(each["points"] for each in checks),
        "max_points": exercise.points,
        "reason": clean(reason),
        "trouble": trouble,
        "checks": checks,
        "measured": seen,
    }


def learner_record(learner: str, entries: Sequence[Record], notes: Sequence[str] = (), **more: Any) -> Record:
    """The record of a learner, with what there is `more` to say."""
    reached = {each["status"] for each in entries}
    measured = [each["measured"] for each in entries]
    return {
        "schema": LEARNER_SCHEMA,
        "fingerprint": "",
        "learner": one_line(learner, MAX_NAME),
        "status": next((each for each in NO_VERDICT if each in reached), "graded"),
        "notes": [one_line(note, 500) for note in notes[:_MOST_NOTES]],
        "seed": 0,
        "walls": {},
        **more,
        "points": sum(each["points"] for each in entries),
        "max_points": sum(each["max_points"] for each in entries),
        "exercises": list(entries),
        "measured": {
            **{name: round(sum(each[name] for each in measured), 3) for name in TIMES},
            "peak_bytes": max((each["peak_bytes"] for each in measured), default=0),
        },
    }


def standing(record: Record, file: str) -> Record:
    """The learner's entry in ``results.json``; `file` is the name of the learner's files without their ending."""
    return {
        **{name: record[name] for name in ("learner", "status", "points", "max_points")},
        "file": file,
        "percent": percent(record["points"], record["max_points"]),
        "exercises": {each["id"]: {"points": each["points"], "status": each["status"]} for each in record["exercises"]},
    }
