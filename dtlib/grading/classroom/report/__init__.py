"""Everything that `dtlib grade` writes, all made from the learners' records.

`write_learner` and `write_results` are called while the class is graded, `write_class` at its end; it reads the records
one at a time, so that the memory of the grader does not grow with the class.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from .exports import JUNIT, gradescope_results, score_columns, score_row, suite
from .folder import FEEDBACK, GRADESCOPE, LEARNERS, REPORTS, RESULTS, Folder
from .pages import class_reports, feedback_page, learner_report
from .record import LEARNER_SCHEMA, Counts, Record, entry_of, learner_record, schema, standing, summarise

if TYPE_CHECKING:
    from dtlib.grading.exercises.exercise import Exercise

__all__ = ["schema", "write_class", "write_learner", "write_results", "write_share", "write_table"]


def write_learner(folder: Folder, file: str, record: Record) -> None:
    """The files of one learner. The record comes last: where it stands, the others do."""
    said = learner_report(record)
    folder.write(folder.of(REPORTS, file), said)
    folder.write(folder.of(FEEDBACK, file), feedback_page(said))
    folder.write_json(folder.of(GRADESCOPE, file), gradescope_results(record))
    folder.write_sealed(folder.of(LEARNERS, file), record)


def write_results(folder: Folder, group: Record) -> None:
    """``results.json`` as things stand."""
    summarise(group)
    folder.write_sealed(folder.path / RESULTS, group)


def write_share(folder: Folder, group: Record, exercises: Sequence[Exercise]) -> None:
    """``results.json`` of a share of a class, which has no reports: those are made of all shares together."""
    counts = Counts()
    for _, record in _records(folder, group, exercises):
        counts.add(record)
    group["measured"] |= counts.measured
    group["not_known"] = counts.not_known
    write_results(folder, group)


def write_class(folder: Folder, group: Record, exercises: Sequence[Exercise]) -> None:
    """The files of the class, from the records of all learners."""
    counts = Counts()
    with folder.writing(folder.path / "scores.csv") as file, folder.writing(folder.path / "junit.xml") as suites:
        scores = csv.writer(file)
        scores.writerow([*score_columns(group), *(each.id for each in exercises)])
        suites.write(JUNIT[0])
        for each, record in _records(folder, group, exercises):
            scores.writerow(score_row(each, group))
            suites.write(suite(record))
            counts.add(record)
        suites.write(JUNIT[1])
    group["statistics"] = [counts.row(each) for each in exercises]
    group["measured"] |= counts.measured
    group["not_known"] = counts.not_known
    write_results(folder, group)
    for name, text in class_reports(group, exercises, counts.odd).items():
        folder.write(folder.path / name, text)


def write_table(folder: Folder, name: str, rows: Iterable[Sequence[object]]) -> None:
    """A CSV file of the class."""
    with folder.writing(folder.path / name) as file:
        csv.writer(file).writerows(rows)


def _records(folder: Folder, group: Record, exercises: Sequence[Exercise]) -> Iterator[tuple[Record, Record]]:
    """Each learner's standing and record; who has none gets one that says so."""
    for each in group["learners"]:
        record = folder.read_sealed(folder.of(LEARNERS, each["file"]), LEARNER_SCHEMA)
        if record is None or standing(record, each["file"]) != each:
            entries = [entry_of(one, each["status"]) for one in exercises if one.id in each["exercises"]]
            record = learner_record(each["learner"], entries)
        yield each, record
