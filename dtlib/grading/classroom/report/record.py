"""The record of a learner and that of the class: plain data from which every report is made.

A learner's is the only thing that a rerun reads again. What may differ from run to run though the verdicts are the same
(seconds, memory, what was printed, the line at which an endless loop was stopped) stands under the key ``"measured"``
alone. All else depends on the submission, the seed and the exercises.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from .text import MAX_NAME, MAX_PRINTED, clean, one_line, percent

if TYPE_CHECKING:
    from dtlib.grading.exercises.exercise import Exercise
    from dtlib.grading.exercises.result import CheckResult

RESULTS_SCHEMA = "dtlib-grade/2"
LEARNER_SCHEMA = "dtlib-grade-learner/2"
WAITING = "not graded yet"
ABSENT = "absent"  # in the roster, and handed in no notebook
#: The statuses that are no verdict, the worst first: they are left out of every mean, and graded again.
NO_VERDICT = ("error", "not known", WAITING, ABSENT)
TIMES = ("seconds", "cpu_seconds", "starved_seconds", "grader_seconds")
WHOLE = "(whole exercise)"
UNKNOWN = "no known mistake"
CARRIED = "carried error"  # the checks' name for what is right but for an earlier mistake
_ODD = ("tampered", "limit")  # kinds of trouble that an instructor may want to ask about
_MOST_NOTES = 20
_MOST_NAMED = 5  # of those with the commonest failure

Record = dict[str, Any]


def schema(name: str = "results") -> Record:
    """The JSON Schema (draft 2020-12) of ``results.json``, or of a learner's record with ``name="learner"``."""
    text = files(__package__).joinpath(f"{name}.schema.json").read_text(encoding="utf-8")
    return json.loads(text)  # type: ignore[no-any-return]


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


def learner_record(
    learner: str, entries: Sequence[Record], notes: Sequence[str] = (), handed_in: str = "", **more: Any
) -> Record:
    """The record of a learner, with what there is `more` to say; `handed_in` is when, as the files have it."""
    measured = [each["measured"] for each in entries]
    return {
        "schema": LEARNER_SCHEMA,
        "fingerprint": "",
        "learner": one_line(learner, MAX_NAME),
        "status": status_of(entries),
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
            "handed_in": handed_in,
        },
    }


def status_of(entries: Sequence[Record]) -> str:
    """The status of a learner: the worst of those that are no verdict, or that all of it is graded."""
    reached = {each["status"] for each in entries}
    return next((each for each in NO_VERDICT if each in reached), "graded")


def digest_of(seed: int) -> str:
    """What a learner is told of a seed: whoever is told the seed later can see that it was this one."""
    return hashlib.sha256(f"dtlib {seed}".encode()).hexdigest()[:16]


def standing(record: Record, file: str) -> Record:
    """The learner's entry in ``results.json``; `file` is the name of the learner's files without their ending."""
    return {
        **{name: record[name] for name in ("learner", "status", "points", "max_points", "seed")},
        "file": file,
        "percent": percent(record["points"], record["max_points"]),
        "exercises": {each["id"]: {"points": each["points"], "status": each["status"]} for each in record["exercises"]},
        **{name: record[name] for name in ("id", "name", "late") if name in record},
    }


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
    points = [each["points"] for each in group["learners"] if each["status"] not in (WAITING, ABSENT)]
    group["class"] = {
        "learners": len(group["learners"]),
        "graded": len(points),
        "mean_percent": percent(fmean(points or [0]), group["max_points"]),
        "median_percent": percent(median(points or [0]), group["max_points"]),
    }


def has_late(group: Record) -> bool:
    """Whether there was a deadline for anybody."""
    return any("late" in each for each in group["learners"])


class Counts:
    """Counts how each exercise went, record by record; it keeps numbers, a few reasons and a few names alone."""

    def __init__(self) -> None:
        self._statuses: Counter[tuple[str, str]] = Counter()
        self._points: defaultdict[str, Counter[int]] = defaultdict(Counter)
        self._failures: defaultdict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
        self._who: defaultdict[tuple[str, tuple[str, str]], list[str]] = defaultdict(list)
        self.measured: dict[str, Any] = {**dict.fromkeys(TIMES[1:], 0.0), "exercise_seconds": Counter()}
        self.odd: list[Record] = []  # what went beyond the rules, or is nothing that can be graded
        self.not_known: list[Record] = []

    def add(self, record: Record) -> None:
        """Count one learner. What has no verdict is left out of every mean."""
        unread = [each["reason"] for each in record["exercises"] if each["trouble"] == "unreadable"]
        if {each["status"] for each in record["exercises"]} <= {"not attempted", ABSENT}:
            unread = record["notes"]  # a script, or a folder that is empty
        self.odd += [told(record["learner"], "", each[:300]) for each in unread[:1]]
        for entry in record["exercises"]:
            name, status = entry["id"], entry["status"]
            self._statuses[name, status] += 1
            self.measured["exercise_seconds"][name] += entry["measured"]["seconds"]
            for each in TIMES[1:]:
                self.measured[each] = round(self.measured[each] + entry["measured"][each], 3)
            if status not in NO_VERDICT:
                self._points[name][entry["points"]] += 1
            if status in ("fail", "partly right"):
                self._failures[name].update(failed := set(_failures(entry)))
                for each_failed in failed:
                    if len(who := self._who[name, each_failed]) < _MOST_NAMED:
                        who.append(record["learner"])
            for is_one, listed in ((status == "not known", self.not_known), (entry["trouble"] in _ODD, self.odd)):
                if is_one:
                    listed.append(told(record["learner"], name, entry["reason"][:300]))

    def row(self, exercise: Exercise) -> Record:
        """How an exercise went; ``commonest_failure`` is None where nobody failed."""
        points, failures = self._points[exercise.id], self._failures[exercise.id]
        passed, partly, failed, unknown = (
            self._statuses[exercise.id, status] for status in ("pass", "partly right", "fail", "not known")
        )
        mean = sum(each * count for each, count in points.items()) / max(1, points.total())
        # Among equals that of the first check: the same whatever the order in which learners were counted.
        order = [*(each.name for each in exercise.checks), WHOLE]
        worst = min(failures, key=lambda each: (-failures[each], order.index(each[0]), each), default=None)
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
            "commonest_failure": worst
            and {
                "check": worst[0],
                "mistake": worst[1],
                "count": failures[worst],
                "learners": self._who[exercise.id, worst],
            },
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
