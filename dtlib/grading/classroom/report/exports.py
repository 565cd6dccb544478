"""What other programs read: CSV for gradebooks, JUnit XML for CI systems, ``results.json`` as Gradescope takes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from xml.etree import ElementTree

from .pages import reason_of, told
from .record import ABSENT, RESULTS_SCHEMA, WAITING, Record, has_late
from .text import cell

JUNIT = '<?xml version="1.0" encoding="UTF-8"?>\n<testsuites name="dtlib grade">\n', "</testsuites>\n"


def score_columns(group: Record) -> list[str]:
    """The columns of ``scores.csv`` before those of the exercises; more of them where there is a deadline."""
    late = ["days_late", "deducted"] if has_late(group) else []
    return ["learner", "status", "points", "max_points", "percent", *late]


def score_row(standing: Record, group: Record) -> list[Any]:
    """The row of a learner in ``scores.csv``, behind the name and the like a column for each exercise."""
    row = [cell(standing["learner"]), *(standing[name] for name in ("status", "points", "max_points"))]
    late = [standing.get("late", {}).get(name, "") for name in ("days", "deducted")] if has_late(group) else []
    return [*row, f"{standing['percent']:.1f}", *late, *(each["points"] for each in standing["exercises"].values())]


def canvas_rows(group: Record, roster: Mapping[str, Mapping[str, str]], title: str) -> Iterator[list[Any]]:
    """What Canvas imports into its gradebook: its own columns, and one assignment, named `title` or ``title (id)``.

    Where there is no verdict the cell is empty, which leaves alone what Canvas has.
    """
    yield ["Student", "ID", "SIS User ID", "SIS Login ID", "Section", cell(title)]
    yield ["    Points Possible", "", "", "", "", group["max_points"]]
    for each, row in _listed(group, roster):
        ids = [row["canvas_id"], row["sis_user_id"], row["sis_login_id"] or row["id"], row["section"]]
        yield [*map(cell, [row["name"] or row["id"], *ids]), _points(each)]


def moodle_rows(
    group: Record, roster: Mapping[str, Mapping[str, str]], title: str, comments: Mapping[str, str]
) -> Iterator[list[Any]]:
    """What Moodle's grade import maps: ``ID number`` or ``Email address`` to the user, points and feedback to the item.

    Both of these have to be mapped, or Moodle forgets the one that is not.
    """
    yield ["ID number", "Email address", "Full name", cell(title), cell(f"{title} feedback")]
    for each, row in _listed(group, roster):
        yield [*map(cell, (row["id"], row["email"], row["name"])), _points(each), cell(comments.get(row["id"], ""))]


def _listed(group: Record, roster: Mapping[str, Mapping[str, str]]) -> Iterator[tuple[Record, Mapping[str, str]]]:
    for each in group["learners"]:
        if row := roster.get(each.get("id", "")):
            yield each, row


def _points(standing: Record) -> int | str:
    return standing["points"] if standing["status"] == "graded" else ""


def suite(record: Record) -> str:
    """The suite of a learner in ``junit.xml``, between the parts of `JUNIT`: a case a check, for the instructor."""
    suite = ElementTree.Element("testsuite", name=record["learner"] or "(no name)")
    for entry in record["exercises"]:
        for number, check in enumerate(entry["checks"]):
            seconds = entry["measured"]["seconds"] if number == 0 else 0.0  # an exercise is timed as a whole
            name = f"{check['name']} ({check['kind']})"
            case = ElementTree.SubElement(suite, "testcase", classname=entry["id"], name=name, time=f"{seconds:g}")
            case.extend(_outcome(entry, check))
    suite.set("tests", str(len(suite)))
    for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(name, str(sum(1 for _ in suite.iter(tag))))
    suite.set("time", f"{record['measured']['seconds']:g}")
    ElementTree.indent(suite, level=1)
    return "  " + ElementTree.tostring(suite, encoding="unicode") + "\n"


def _outcome(entry: Record, check: Record) -> Iterator[ElementTree.Element]:
    """Nothing for a check that passed; a failure accuses, and what has no verdict or was not counted does not."""
    status = entry["status"]
    if status in ("error", "not known"):
        yield ElementTree.Element("error", message=entry["reason"], type="grader" if status == "error" else status)
    elif status in ("not attempted", WAITING, ABSENT):
        yield ElementTree.Element("skipped", message=entry["reason"] or status)
    elif check["verdict"] == "fail" or (entry["reason"] and check["max_points"]):
        kind = check["mistake"] or check["trouble"] or entry["trouble"] or "wrong"
        outcome = ElementTree.Element("failure", message=check["message"] or entry["reason"], type=kind)
        outcome.text = f"{check['description']}: {check['points']} of {check['max_points']} points"
        yield outcome
    elif check["verdict"] != "pass":
        yield ElementTree.Element("skipped", message=check["verdict"])


def gradescope_results(record: Record) -> Record:
    """What ``/autograder/results/results.json`` should hold. Hidden checks show once grades are published.

    The format: https://gradescope-autograders.readthedocs.io/en/latest/specs/. Everything is sent as plain text, which
    Gradescope shows as it is.
    """
    tests: list[Record] = []
    for number, entry in enumerate(record["exercises"], start=1):
        reason = reason_of(entry)
        for part, (check, message) in enumerate(told(entry), start=1):
            shown = check["visible"]
            test: Record = {
                "score": check["points"],
                "max_score": check["max_points"],
                "status": "passed" if check["verdict"] == "pass" else "failed",
                "name": f"{entry['id']} {check['name']}" + (f": {check['description']}" if shown else ""),
                "number": f"{number}.{part}",
                "output": (reason or message) if shown else "",
                "visibility": "visible" if shown else "after_published",
            }
            tests.append(test)
    return {
        "extra_data": {"schema": RESULTS_SCHEMA, "status": record["status"]},  # first: it marks the file as ours
        "score": record["points"],
        "max_score": record["max_points"],
        "execution_time": round(record["measured"]["seconds"]),
        "output": "\n".join([f"{record['points']} of {record['max_points']} points", *record["notes"]]),
        **dict.fromkeys(("output_format", "test_output_format", "test_name_format"), "text"),
        "visibility": "visible",
        "stdout_visibility": "hidden",
        "tests": tests,
    }
