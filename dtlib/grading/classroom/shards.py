"""A class graded in shares, on any number of machines, and joined into one.

Each share is of (learner, exercise) pairs, dealt by what they cost. Every machine deals all of them, from what decides
verdicts alone, and grades its own: nobody has to tell anybody anything. A share's folder holds ``results.json`` and
``learners/``, with the entries of its own pairs. `join` puts them together and grades nothing.
"""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from dtlib.grading.exercises import catalogue
from dtlib.grading.exercises.exercise import Exercise
from dtlib.grading.sandbox.costs import recorded

from . import fingerprint, report
from .gradebook import Gradebook, bare
from .intake import Submission
from .intake.folders import Refused, content
from .intake.names import file_name
from .report.exports import canvas_rows, moodle_rows
from .report.folder import LEARNERS, MOST_BYTES, RESULTS, Folder, refuse
from .report.record import LEARNER_SCHEMA, RESULTS_SCHEMA, Record, class_record, learner_record, standing
from .seals import Key

_START_COST = 60.0  # what starts before anything is computed: 0.6 s, and a unit takes 10 ms (mean of 22 references)
_READ_COST = 0.1  # of an exercise that nobody has to run: its notebook is missing or broken, or nobody has begun it
_DAMAGED = (Refused, ValueError, LookupError, TypeError, RecursionError)  # what a file may be that is none of ours
_SAME = {  # what all shares have in common: the field, and what it is called
    "seed": "another seed",
    "exercises": "other exercises",
    "limits": "other limits",
}


class JoinError(ValueError):
    """Raised before anything is written: why shares do not make one class."""


class Shard(NamedTuple):
    """Share `number` of `of`, counted from 1."""

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """The share that `text` names, such as ``"3/16"``. Raises ``ValueError`` for another form or range."""
        found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
        if not found or not 1 <= int(found[1]) <= int(found[2]):
            raise ValueError(f"shard must be K/N with K from 1 to N, such as 3/16, not {text!r}")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


def deal(found: Sequence[Submission], exercises: Sequence[Exercise], shard: Shard) -> dict[str, list[Exercise]]:
    """By learner, those of the `exercises` that are of `shard`; who has none is left out.

    The dearest pair that is left goes to whoever has least so far. So no share costs more than the mean and one
    exercise, whatever learners are called and in whatever order they come.
    """
    pairs = [(_cost(each, one), row, column) for row, each in enumerate(found) for column, one in enumerate(exercises)]
    least = [(0.0, number) for number in range(1, shard.of + 1)]
    mine = []
    for cost, row, column in sorted(pairs, key=lambda pair: (-pair[0], pair[1:])):
        total, number = least[0]
        heapq.heapreplace(least, (total + cost, number))
        if number == shard.number:
            mine.append((row, column))
    dealt: dict[str, list[Exercise]] = {}
    for row, column in sorted(mine):
        dealt.setdefault(found[row].learner, []).append(exercises[column])
    return dealt


def _cost(submission: Submission, exercise: Exercise) -> float:
    """What an exercise of a submission costs, in the units of the recorded costs."""
    return _START_COST + recorded().get(exercise.id, 0.0) if submission.is_run(exercise.id) else _READ_COST


def held(out: Path) -> str | None:
    """The share whose results the folder `out` holds, "" for a whole class, None where it holds no results."""
    try:
        group = _data(out.resolve() / RESULTS, RESULTS_SCHEMA)
        return str(Shard(group["shard"]["number"], group["shard"]["of"])) if "shard" in group else ""
    except _DAMAGED:
        return None


def earlier(since: Path, learner: str) -> Record | None:
    """The record of a learner as it was graded, in a folder of results that is believed; None where there is none."""
    try:
        return bare(_data(since.resolve() / LEARNERS / f"{file_name(learner)}.json", LEARNER_SCHEMA))
    except _DAMAGED:
        return None


def join(
    parts: Collection[Path],
    out: Path,
    book: Gradebook | None = None,
    title: str = "dtlib",
    since: Path | None = None,
) -> Record:
    """Put the shares in the folders `parts` together and write the report of the class to the folder `out`.

    Every share of the class has to be there, once and complete, with one seed, of the same submissions, exercises and
    limits, and graded by this very version; a class that one machine graded is its only share. Their seals are by other
    machines' keys, so they are believed as they stand. The `book` is laid over the class; with a roster, what Canvas
    and Moodle import is written too, for an assignment of this `title`. Whom the shares left out, since nothing had
    changed, is taken from `since`. Returns ``results.json``'s content; raises `JoinError` before anything is written.
    """
    shares = sorted((_Share(each) for each in parts), key=lambda each: each.shard)
    _refuse_mixed(shares)
    group = shares[0].group
    exercises = [catalogue.all_exercises()[each["id"]] for each in group["exercises"]]
    not_kept = next((why for each in shares if (why := each.group["not_kept"])), "")
    kept = group["shard"].get("kept", {})
    names = sorted({*kept}.union(*(each.learners for each in shares)))
    book, walls = book or Gradebook(), [each.group["walls"] for each in shares]

    def records() -> Iterator[Record]:
        """Everybody's, one at a time: nobody's is kept in memory."""
        for name in names:
            if name in kept:
                record = _kept(since, name, kept[name], exercises)
                walls.append(record["walls"])
            else:
                record = _joined(name, shares, exercises, not_kept)
            yield _told(book, record, ids.get(name))
        for one in absent:
            yield _told(book, one, one["learner"])

    try:
        ids, absent = book.of_class(names, exercises)
        shown = sorted(each["learner"] for each in records())  # all of it is read before anything is written
    except ValueError as error:
        raise JoinError(str(error)) from error
    joined = class_record(group["seed"], exercises, [], group["limits"], group["grader"])
    joined |= {"state": "complete", "alike": [] if book.pseudonyms else group["alike"], "not_kept": not_kept}
    if book.roster is not None:
        joined["unlisted"] = [_shown(book, name, None) for name in names if name not in ids]
    joined["walls"] = stood(walls)
    faults = [{**one, "learner": _shown(book, one["learner"], ids)} for each in shares for one in each.group["faults"]]
    joined["faults"] = sorted(faults, key=lambda one: [*one.values()])
    measured = [each.group["measured"] for each in shares]
    joined["measured"] |= {
        "kept": len(kept),
        "time": f"{datetime.now(UTC):%Y-%m-%dT%H:%MZ}",
        "seconds": max(each["seconds"] for each in measured),
        "jobs": sum(each["jobs"] for each in measured),
    }
    try:
        for each in shares:
            refuse(out, each.path, "a share")
        with Folder(out, Key(apart_from=(out, *parts))) as folder:
            folder.remove_others(set(map(file_name, shown)))
            for name in ("canvas.csv", "moodle.csv"):  # an earlier report's would name whom this one does not
                (folder.path / name).unlink(missing_ok=True)
            comments: dict[str, str] = {}
            for record in records():
                report.write_learner(folder, file := file_name(record["learner"]), record)
                joined["learners"].append(standing(record, file))
                comments[record.get("id", "")] = _comments(record)
            joined["learners"].sort(key=lambda each: each["learner"])
            report.write_class(folder, joined, exercises)
            if book.pseudonyms:
                book.pseudonyms.write({id: row["name"] for id, row in (book.roster or {}).items()})
            elif book.roster is not None:
                report.write_table(folder, "canvas.csv", canvas_rows(joined, book.roster, title))
                report.write_table(folder, "moodle.csv", moodle_rows(joined, book.roster, title, comments))
    except ValueError as error:
        raise JoinError(str(error)) from error
    return joined


def _kept(since: Path | None, learner: str, mark: str, exercises: Sequence[Exercise]) -> Record:
    """The record of a learner whom no share graded, since nothing had changed."""
    record = earlier(since, learner) if since else None
    ids = [each.id for each in exercises]
    if record is None or record["fingerprint"] != mark or [each["id"] for each in record["exercises"]] != ids:
        raise JoinError(f"the shares kept {learner} from earlier results, which since must name and does not")
    return record


def _told(book: Gradebook, record: Record, id: str | None) -> Record:
    """A record as the report tells it."""
    record = book.lay_over(record, id)
    if book.pseudonyms:
        return book.pseudonyms.hide(record, id)
    return {**record, "id": id} if id else record


def _shown(book: Gradebook, learner: str, ids: Mapping[str, str] | None) -> str:
    return book.pseudonyms.of((ids or {}).get(learner, learner)) if book.pseudonyms and learner else learner


def _comments(record: Record) -> str:
    """All that was written to a learner by hand, in one line."""
    told = ((each["id"], each.get("by_hand", {}).get("comment", "")) for each in record["exercises"])
    return "; ".join(f"{name}: {comment}" for name, comment in told if comment)


class _Share:
    """A share's folder: what its ``results.json`` says, and the records of its learners."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        try:
            self.group = _data(self.path / RESULTS, RESULTS_SCHEMA)
            self.learners = {each["learner"]: each for each in self.group["learners"]}
            self.group.setdefault("shard", {"number": 1, "of": 1, "class": "", "kept": {}})
            self.shard = Shard(self.group["shard"]["number"], self.group["shard"]["of"])
        except _DAMAGED as error:
            raise JoinError(f"{path} holds no results of dtlib grade --shard ({_why(error)})") from error

    def record(self, learner: str) -> Record:
        try:
            record = _data(self.path / LEARNERS / f"{file_name(learner)}.json", LEARNER_SCHEMA)
            if standing(record, file_name(learner)) != self.learners[learner]:
                raise ValueError("it is not as results.json says")
        except _DAMAGED as error:
            told = f"{self.path.name} has no record of {learner} ({_why(error)}): run shard {self.shard} again"
            raise JoinError(told) from error
        return record


def _refuse_mixed(shares: Sequence[_Share]) -> None:
    """Raise `JoinError` where `shares` are not all of one class, and complete."""
    if not shares:
        raise JoinError("there are no shares to join")
    first, here = shares[0], {"version": fingerprint.version(), "fingerprint": fingerprint.of_grader()}
    for each in shares:
        if (grader := each.group["grader"]) != here:
            names = (f"dtlib {one['version']} ({one['fingerprint'][:12]})" for one in (grader, here))
            told = "{} was graded by {}, and this is {}: dtlib, Python, numpy and torch must be the same"
            raise JoinError(told.format(each.path.name, *names))
        if each.shard.of != first.shard.of:
            raise JoinError(f"{first.path.name} is shard {first.shard}, and {each.path.name} shard {each.shard}")
        if other := next((words for name, words in _SAME.items() if each.group[name] != first.group[name]), ""):
            raise JoinError(f"{each.path.name} has {other} than {first.path.name}")
        if each.group["shard"]["class"] != first.group["shard"]["class"]:
            raise JoinError(f"{each.path.name} saw other submissions than {first.path.name}: grade both again")
    by_shard: dict[Shard, list[str]] = {}
    for each in shares:
        by_shard.setdefault(each.shard, []).append(each.path.name)
    if twice := next((names for names in by_shard.values() if len(names) > 1), None):
        why = "hold the same shard" if first.shard.of > 1 else "are each a whole class"
        raise JoinError(f"{' and '.join(twice)} {why}: give one of them")
    if missing := [number for number in range(1, first.shard.of + 1) if Shard(number, first.shard.of) not in by_shard]:
        told = ", ".join(map(str, missing[:10])) + (f" and {len(missing) - 10} more" if len(missing) > 10 else "")
        raise JoinError(f"of {first.shard.of} shards these are missing: {told}")
    if begun := next((each for each in shares if each.group["state"] != "complete"), None):
        raise JoinError(f"{begun.path.name} is not complete ({begun.group['state']}): run shard {begun.shard} again")


def _joined(learner: str, shares: Sequence[_Share], exercises: Sequence[Exercise], not_kept: str) -> Record:
    """The record of a learner out of all shares that have a part of it."""
    parts = [each.record(learner) for each in shares if learner in each.learners]
    entries = {entry["id"]: entry for part in parts for entry in part["exercises"]}
    if lacking := [each.id for each in exercises if each.id not in entries]:
        raise JoinError(f"{', '.join(lacking)} of {learner} is in no share: grade all of them again")
    return learner_record(
        learner,
        [entries[each.id] for each in exercises],
        parts[0]["notes"],
        fingerprint="" if not_kept else parts[0]["fingerprint"],
        grader=shares[0].group["grader"],
        seed=parts[0]["seed"],
        handed_in=max(part["measured"].get("handed_in", "") for part in parts),
        walls=stood([part["walls"] for part in parts]),
    )


def stood(walls: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """A wall stood for all if it stood for each."""
    names = dict.fromkeys(name for each in walls for name in each)
    return {name: next((why for each in walls if (why := each.get(name))), "") for name in names}


def _data(path: Path, schema: str) -> dict[str, Any]:
    """The record in `path`, whoever sealed it. Raises one of `_DAMAGED` where there is none."""
    record: dict[str, Any] = json.loads(content(path, MOST_BYTES))
    if record["schema"] != schema:
        raise ValueError(f"it has the format {record['schema']}, not {schema}")
    return {name: value for name, value in record.items() if name != "seal"}


def _why(error: Exception) -> str:
    return f"it lacks {error}" if isinstance(error, LookupError) else str(error)
