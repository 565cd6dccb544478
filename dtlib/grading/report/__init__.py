"""Everything that `dtlib grade` writes: one small module a format, all made from the learners' records.

`write_learner` and `write_results` are called while the class is graded, `write_class` at its end; it reads the records
one at a time, so that the memory of the grader does not grow with the class.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from . import junit, tables
from .class_md import class_report
from .folder import LEARNERS, RESULTS, Folder, read_json
from .gradescope import gradescope_results
from .learner_md import MARK, learner_report
from .record import LEARNER_SCHEMA, RESULTS_SCHEMA, WAITING, Record, Standing, waiting_record
from .record import standing as tell
from .results import Class, schema
from .statistics import Statistics

if TYPE_CHECKING:
    from dtlib.grading.exercise import Exercise

__all__ = ["Class", "Folder", "Standing", "remove_others", "schema", "write_class", "write_learner", "write_results"]


def write_waiting(folder: Folder, file: str, learner: str, exercises: Sequence[Exercise]) -> None:
    """A zero for Gradescope before anything is graded: whatever happens later, there is a result."""
    folder.write_json(folder.gradescope(file), gradescope_results(waiting_record(learner, exercises)))


def write_learner(folder: Folder, file: str, record: Record) -> None:
    """The files of one learner. The record comes last: where it stands, the others do."""
    folder.write_text(folder.report(file), learner_report(record))
    folder.write_json(folder.gradescope(file), gradescope_results(record))
    folder.write_json(folder.learner(file), record)


def write_results(folder: Folder, group: Class) -> None:
    """``results.json`` as things stand."""
    folder.write_json(folder.path / RESULTS, group.as_dict())


def write_class(folder: Folder, group: Class, exercises: Sequence[Exercise]) -> None:
    """The files of the class, from the records of all learners, which are read one at a time."""
    statistics = Statistics(exercises)
    with ExitStack() as stack:
        scores_file = stack.enter_context(folder.writing(folder.path / "scores.csv"))
        junit_file = stack.enter_context(folder.writing(folder.path / "junit.xml"))
        scores = tables.Scores(scores_file, [each.id for each in exercises])
        junit.begin(junit_file)
        for learner, standing in group.standings.items():
            record = _record(folder, learner, standing, exercises)
            scores.add(standing)
            junit.add(junit_file, record)
            statistics.add(record)
            group.look_at(record)
        junit.end(junit_file)
    group.statistics = statistics.rows()
    group.measured["exercise_seconds"] = statistics.seconds()
    with folder.writing(folder.path / "statistics.csv") as file:
        tables.write_statistics(file, group.statistics)
    folder.write_text(folder.path / "report.md", class_report(group))


def remove_others(folder: Folder, keep: set[str]) -> list[str]:
    """Remove the files of learners who are no longer there, those alone that say they are ours; their names."""
    removed = []
    for path in sorted((folder.path / LEARNERS).glob("*.json")):
        record = read_json(path)
        if path.stem in keep or record is None or record.get("schema") != LEARNER_SCHEMA:
            continue
        report, gradescope = folder.report(path.stem), folder.gradescope(path.stem)
        if _starts_with(report, MARK):
            report.unlink()
        extra = (read_json(gradescope) or {}).get("extra_data")
        if isinstance(extra, dict) and extra.get("schema") == RESULTS_SCHEMA:
            gradescope.unlink()
        path.unlink()
        removed.append(path.stem)
    return removed


def _record(folder: Folder, learner: str, standing: Standing, exercises: Sequence[Exercise]) -> Record:
    record = read_json(folder.learner(standing.file)) if standing.status != WAITING else None
    if record is not None and record.get("schema") == LEARNER_SCHEMA and tell(record, standing.file) == standing:
        return record
    return waiting_record(learner, exercises, standing.status)


def _starts_with(path: Path, mark: str) -> bool:
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(len(mark)) == mark
    except (OSError, ValueError):
        return False
