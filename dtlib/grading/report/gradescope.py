"""Gradescope's ``results.json`` for one learner.

The format: https://gradescope-autograders.readthedocs.io/en/latest/specs/. Everything is sent as plain text, which
Gradescope shows as it is.
"""

from __future__ import annotations

from .learner_md import reason_of, told
from .record import RESULTS_SCHEMA, Record
from .text import duration


def gradescope_results(record: Record) -> Record:
    """What ``/autograder/results/results.json`` should hold. Hidden checks show once grades are published."""
    total = record["max_points"]
    lines = [f"{record['points']} of {total} points", *record["notes"]]
    tests = []
    for number, entry in enumerate(record["exercises"], start=1):
        reason = reason_of(entry)
        for part, (check, message) in enumerate(told(entry), start=1):
            tests.append(_test(entry, check, reason or message, f"{number}.{part}"))
    return {
        "score": record["points"],
        "max_score": total,
        "execution_time": round(record["measured"]["seconds"]),
        "output": "\n".join(lines),
        "output_format": "text",
        "test_output_format": "text",
        "test_name_format": "text",
        "visibility": "visible",
        "stdout_visibility": "hidden",
        "tests": tests,
        "extra_data": {
            "schema": RESULTS_SCHEMA,
            "status": record["status"],
            "took": duration(record["measured"]["seconds"]),
        },
    }


def _test(entry: Record, check: Record, message: str, number: str) -> Record:
    visible = check["visible"]
    description = (
        f"{entry['id']} {check['name']}: {check['description']}" if visible else f"{entry['id']} {check['name']}"
    )
    return {
        "score": check["points"],
        "max_score": check["max_points"],
        "status": "passed" if check["passed"] and check["counted"] else "failed",
        "name": description,
        "number": number,
        "output": message if visible else "",
        "visibility": "visible" if visible else "after_published",
    }
