"""JUnit XML, which every CI system shows: one suite a learner, one case a check. It is for the instructor."""

from __future__ import annotations

from typing import IO
from xml.etree import ElementTree

from .record import WAITING, Record


def begin(file: IO[str]) -> None:
    """The head of the document."""
    file.write('<?xml version="1.0" encoding="UTF-8"?>\n<testsuites name="dtlib grade">\n')


def add(file: IO[str], record: Record) -> None:
    """The suite of one learner."""
    suite = ElementTree.Element("testsuite", name=record["learner"] or "(no name)")
    counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for entry in record["exercises"]:
        for number, check in enumerate(entry["checks"]):
            seconds = entry["measured"]["seconds"] if number == 0 else 0.0  # an exercise is timed as a whole
            case = ElementTree.SubElement(
                suite, "testcase", classname=entry["id"], name=f"{check['name']} ({check['kind']})", time=f"{seconds:g}"
            )
            counts["tests"] += 1
            if (outcome := _outcome(entry, check)) is not None:
                case.append(outcome)
                counts[{"failure": "failures", "error": "errors", "skipped": "skipped"}[outcome.tag]] += 1
    for name, count in counts.items():
        suite.set(name, str(count))
    suite.set("time", f"{record['measured']['seconds']:g}")
    ElementTree.indent(suite, level=1)
    file.write("  " + ElementTree.tostring(suite, encoding="unicode") + "\n")


def end(file: IO[str]) -> None:
    """The end of the document."""
    file.write("</testsuites>\n")


def _outcome(entry: Record, check: Record) -> ElementTree.Element | None:
    if entry["status"] in ("not attempted", WAITING):
        return ElementTree.Element("skipped", message=entry["reason"] or entry["status"])
    if entry["status"] == "error":
        return ElementTree.Element("error", message=entry["reason"], type="grader")
    if check["passed"] and check["counted"]:
        return None
    message = check["message"] or entry["reason"] or ("not failed, but not counted" if not check["counted"] else "")
    outcome = ElementTree.Element("failure", message=message, type=check["mistake"] or entry["trouble"] or "wrong")
    outcome.text = f"{check['description']}: {check['points']} of {check['max_points']} points"
    return outcome
