"""What only people know of a class: who is in it, until when it may hand in, and what was judged by hand.

It is laid over what was graded, in a report, and never becomes part of what a rerun keeps: so a regrade loses nothing
of it, and whoever takes a row out has the grader's verdict again.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from itertools import zip_longest
from pathlib import Path
from typing import Any

from dtlib.grading.exercises.exercise import Exercise

from .anonymous import Pseudonyms
from .intake.names import folded, printable
from .report.record import ABSENT, Record, entry_of, learner_record, status_of
from .report.text import clean

_DAY = timedelta(days=1)
_ROSTER = ("name", "email", "handed_in", "deadline", "canvas_id", "sis_user_id", "sis_login_id", "section")
_BY_HAND = ("points", "comment")


@dataclass(frozen=True)
class Gradebook:
    """What is laid over the records of a class.

    `roster` has a row a learner by id, None where there is none; `by_hand` the row of a learner's id and exercise.
    `deadline` is for those who have none of their own in the roster. A day late, each that was begun, costs
    `late_percent` of the points. With `pseudonyms` nobody is named.
    """

    roster: Mapping[str, Mapping[str, str]] | None = None
    by_hand: Mapping[tuple[str, str], Mapping[str, str]] = field(default_factory=dict)
    deadline: str = ""
    late_percent: float = 0.0
    pseudonyms: Pseudonyms | None = None

    def __post_init__(self) -> None:
        """Refuse what is no time and no percentage, and a percentage of no deadline."""
        _time(self.deadline, "deadline", lasts=_DAY)
        if not 0 <= self.late_percent <= 100:
            raise ValueError(f"late_percent must be from 0 to 100, not {self.late_percent:g}")
        deadlines = [self.deadline]
        for id, each in (self.roster or {}).items():
            _time(each["deadline"], f"roster, {id!r}: deadline", lasts=_DAY)
            _time(each["handed_in"], f"roster, {id!r}: handed_in")
            deadlines.append(each["deadline"])
        if self.late_percent and not any(deadlines):
            raise ValueError("late_percent must come with a deadline, and neither the class nor the roster has one")

    def of_class(self, learners: Collection[str], exercises: Sequence[Exercise]) -> tuple[dict[str, str], list[Record]]:
        """The roster's id of each of `learners` who is in it, and the records of those who handed in no notebook.

        Raises ``ValueError`` where a row by hand is of nobody, or of an exercise that does not count, or has points
        that it is not worth.
        """
        known = _matched(learners, self.roster or {})
        worth = {each.id: each.points for each in exercises}
        ids = {*(self.roster or {}), *learners}
        seen = set()
        for (learner, exercise), row in self.by_hand.items():
            if learner not in ids:
                raise ValueError(f"by hand: learner must be in the class, and {learner!r} is not")
            if exercise not in worth:
                raise ValueError(f"by hand: exercise must be one that counts, not {exercise!r}")
            if row["points"] and not (row["points"].isdecimal() and int(row["points"]) <= worth[exercise]):
                told = f"must be whole, from 0 to the {worth[exercise]} of {exercise}, not {row['points']!r}"
                raise ValueError(f"by hand: points {told}")
            if (key := (known.get(learner, learner), exercise)) in seen:
                raise ValueError(f"by hand: {key[0]!r} must have one row for {exercise}, and has one under each name")
            seen.add(key)
        gone = [each for each in self.roster or {} if each not in known.values()]
        blank = [entry_of(each, ABSENT) for each in exercises]
        return known, [learner_record(each, blank) for each in gone]

    def lay_over(self, record: Record, id: str | None) -> Record:
        """`record` with all that is known of the learner, who has this `id` in the roster, None for one not in it."""
        record = bare(record)
        name = record["learner"]
        row = (self.roster or {}).get(id or "", {})
        deadline = row.get("deadline") or self.deadline
        handed_in = row.get("handed_in") or record["measured"].get("handed_in", "")
        entries = record["exercises"]
        if (row or deadline) and not handed_in and {each["status"] for each in entries} == {"not attempted"}:
            entries = [{**each, "status": ABSENT, "reason": ""} for each in entries]  # an empty folder is no hand-in
        more = _summed([self._by_hand(entry, (id, name)) for entry in entries])
        if row.get("name"):
            more["name"] = printable(row["name"])
        if deadline and status_of(entries) != ABSENT:
            more["late"] = late = self._late(name, handed_in, deadline)
            taken = min(Fraction(100), late["days"] * Fraction(str(self.late_percent)))  # a float takes 28 % for 29
            late["deducted"] = int(taken * more["points"] / 100)
            more["points"] -= late["deducted"]
        return {**record, **more}

    def _by_hand(self, entry: Record, names: Collection[str | None]) -> Record:
        row = next((row for each in names if each and (row := self.by_hand.get((each, entry["id"])))), None)
        if row is None:
            return entry
        kept = {"points": entry["points"], "status": entry["status"], "comment": clean(row["comment"])}
        if not row["points"]:
            return {**entry, "by_hand": kept}
        points = int(row["points"])
        status = "pass" if points == entry["max_points"] else "partly right" if points else "fail"
        return {**entry, "points": points, "status": status, "by_hand": kept}

    def _late(self, learner: str, handed_in: str, deadline: str) -> dict[str, Any]:
        at, until = _time(handed_in, "handed_in"), _time(deadline, "deadline", lasts=_DAY)
        if at is None or until is None:
            raise ValueError(f"handed_in must be known where there is a deadline: the roster has none for {learner!r}")
        return {"days": max(0, math.ceil((at - until) / _DAY)), "handed_in": handed_in, "deadline": deadline}


def bare(record: Record) -> Record:
    """A record as it was graded, whatever was laid over it."""
    entries = [
        {**{name: value for name, value in entry.items() if name != "by_hand"}, **_graded(entry)}
        for entry in record["exercises"]
    ]
    kept = {name: value for name, value in record.items() if name not in ("id", "name", "late")}
    return {**kept, **_summed(entries)}


def _summed(entries: Sequence[Record]) -> dict[str, Any]:
    """What a learner's record says of `entries`; who is judged by hand in each of them is graded."""
    return {"exercises": entries, "points": sum(each["points"] for each in entries), "status": status_of(entries)}


def _graded(entry: Record) -> Record:
    return {name: entry["by_hand"][name] for name in ("points", "status")} if "by_hand" in entry else {}


def read_roster(path: Path) -> dict[str, dict[str, str]]:
    """The roster in a CSV file: a column ``id``, the name of a learner's folder, and any of ``name``, ``email``,
    ``handed_in``, ``deadline`` and what Canvas asks for. Raises ``ValueError`` that names the line.
    """
    found: dict[str, dict[str, str]] = {}
    for number, row in _rows(path, ("id",), _ROSTER):
        if not row["id"] or folded(row["id"]) in map(folded, found):
            raise ValueError(f"{path.name}, line {number}: id must be there, and no other row's, not {row['id']!r}")
        found[row["id"]] = row
    return found


def read_by_hand(path: Path) -> dict[tuple[str, str], dict[str, str]]:
    """Points and comments by hand in a CSV file: ``learner``, ``exercise``, and ``points`` or ``comment`` or both.

    Raises ``ValueError`` that names the line.
    """
    found: dict[tuple[str, str], dict[str, str]] = {}
    for number, row in _rows(path, ("learner", "exercise"), _BY_HAND):
        key = row["learner"], row["exercise"]
        if key in found:
            raise ValueError(f"{path.name}, line {number}: {' '.join(key)!r} stands there twice")
        found[key] = row
    return found


def _rows(path: Path, needed: Sequence[str], others: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            text = file.read()
        header = text.partition("\n")[0]  # a spreadsheet separates by ";" where numbers have a decimal comma
        delimiter = ";" if ";" in header and "," not in header else ","
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        columns = [name.strip().casefold().replace(" ", "_") for name in next(reader, [])]
        named = [name for name in columns if name]
        if not named:
            raise ValueError(f"{path.name} must have a first line that names its columns, and is empty there")
        if lacking := [name for name in needed if name not in named]:
            raise ValueError(f"{path.name} must have the columns {', '.join(needed)}, and lacks {lacking[0]}")
        if unknown := [name for name in named if name not in (*needed, *others)]:
            raise ValueError(f"{path.name} has a column {unknown[0]!r}; there are {', '.join((*needed, *others))}")
        if twice := [name for name in named if named.count(name) > 1]:
            raise ValueError(f"{path.name} must have each column once, and has {twice[0]} twice")
        for row in reader:
            cells = [(name, cell.strip()) for name, cell in zip_longest(columns, row, fillvalue="")]
            if any(cell and not name for name, cell in cells):
                raise ValueError(f"{path.name}, line {reader.line_num}: it has more cells than columns with a name")
            if any(cell for _, cell in cells):  # spreadsheets leave rows and columns behind that were emptied
                found = dict(cells)
                yield reader.line_num, {name: found.get(name, "") for name in (*needed, *others)}
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be in UTF-8: save it as CSV UTF-8") from error
    except (OSError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read as a table: {error}") from error


def _matched(learners: Collection[str], roster: Mapping[str, Any]) -> dict[str, str]:
    """By learner the id in the roster: the same, or the same but for case and form where nobody has it as it is."""
    found = {each: each for each in learners if each in roster}
    left = {folded(each): each for each in roster if each not in found}
    for each in learners:
        if each not in found and (id := left.pop(folded(each), None)):
            found[each] = id
    return found


def _time(text: str, name: str, lasts: timedelta = timedelta()) -> datetime | None:
    """A time as ISO 8601 has it, in UTC where it names no zone; what is a day alone `lasts` from its beginning."""
    if not text:
        return None
    try:
        found = datetime.fromisoformat(text)
        found = found if found.tzinfo else found.replace(tzinfo=UTC)
        return found + lasts if len(text) <= len("2026-11-27") else found
    except (ValueError, OverflowError):
        raise ValueError(f"{name} must be a time such as 2026-11-27T18:00Z, not {text!r}") from None
