"""The report that a learner reads: Markdown with every check, its reason, and how to see the same again."""

from __future__ import annotations

from .record import WAITING, Record
from .text import bar, fenced, markdown, percent, prose

MARK = "<!-- dtlib-grade-report/1 -->"
SIGNS = {"pass": "✓", "fail": "✗", "not attempted": "○", "error": "⚠", WAITING: "…"}
_NOTHING_RAN = ("unreadable", "syntax", "missing")
OUR_FAULT = "The grader itself failed here, which is not your fault. Your instructor has been told."


def learner_report(record: Record) -> str:
    """The whole report of one learner. Of a check that learners do not see it shows the name and the points alone."""
    points, total = record["points"], record["max_points"]
    lines = [
        MARK,
        f"# {markdown(record['learner'])}",
        "",
        f"**{points} of {total} points** · {percent(points, total):g} % · {bar(points / total if total else 0, 20)}",
        "",
    ]
    for note in record["notes"]:
        lines += [f"> Note: {prose(note)}", ""]
    lines += ["| | exercise | points |", "|:-:|:--|--:|"]
    for entry in record["exercises"]:
        sign = sign_of(entry)
        lines.append(
            f"| {sign} | {entry['id']} · {markdown(entry['title'])} | {entry['points']} / {entry['max_points']} |"
        )
    lines.append("")
    for entry in record["exercises"]:
        lines += _exercise(entry, record.get("seed"))
    lines += ["---", "", "✓ right · ◐ in part · ✗ not yet · ○ not attempted · – not counted", ""]
    return "\n".join(lines)


def sign_of(entry: Record) -> str:
    """The sign of an exercise: ✓, ✗, ◐ for some of its points, ○ where nobody tried, ⚠ where the grader failed."""
    return "◐" if entry["status"] == "fail" and entry["points"] else SIGNS[entry["status"]]


def _in_words(entry: Record) -> str:
    words = {"pass": "all right", "fail": "right in part" if entry["points"] else "not yet"}
    return words.get(entry["status"], str(entry["status"]))


def check_sign(entry: Record, check: Record) -> str:
    """The sign of one check of an exercise."""
    if not check["counted"]:
        return "–"
    return SIGNS["pass" if check["passed"] else "fail" if entry["status"] == "fail" else entry["status"]]


def told(entry: Record) -> list[tuple[Record, str]]:
    """Each check of an exercise with what a learner is told; what was said is not said again, what is hidden never.

    A condition that is worth no points is only told of where it is not met.
    """
    said: set[str] = set()
    pairs = []
    for check in entry["checks"]:
        if check["max_points"] == 0 and (check["passed"] or not check["message"]):
            continue
        message = check["message"] if check["visible"] else ""
        pairs.append((check, "As above." if message in said else message))
        said.update([message] if message else [])
    return pairs


def reason_of(entry: Record) -> str:
    """What stands for the exercise as a whole, "" where its checks say everything."""
    return OUR_FAULT if entry["status"] == "error" else str(entry["reason"])


def _exercise(entry: Record, seed: int | None) -> list[str]:
    points = f"{entry['points']} of {entry['max_points']} points"
    lines = [
        f"## {sign_of(entry)} {entry['id']} · {markdown(entry['title'])}",
        "",
        f"*{_in_words(entry)}*, {points}",
        "",
    ]
    if reason := reason_of(entry):
        lines += [prose(reason), ""]
    if entry["status"] in ("pass", "fail"):
        for check, message in told(entry):
            lines += _check(entry, check, "" if reason else message)
        if any(not check["counted"] for check in entry["checks"]):
            lines += ["", "What is marked – is not counted as long as the first check finds something wrong."]
        lines.append("")
    measured = entry["measured"]
    if measured["stood_at"]:
        lines += [f"When its time was up, it stood here: {prose(measured['stood_at'])}", ""]
    if measured["printed"]:
        lines += ["Your function printed:", "", fenced(measured["printed"]), ""]
    if entry["status"] == "fail" and seed is not None and entry["trouble"] not in _NOTHING_RAN:
        lines += [f'The same cases again, in your notebook: `grading.check("{entry["id"]}", seed={seed})`', ""]
    return lines


def _check(entry: Record, check: Record, message: str) -> list[str]:
    name = f"**{markdown(check['name'])}** ({check['points']}/{check['max_points']})"
    if not check["visible"]:
        return [f"- {check_sign(entry, check)} {name}: one of the checks that are made when the exercise is graded"]
    lines = [f"- {check_sign(entry, check)} {name}: {prose(check['description'])}"]
    if message:
        lines.append(f"  <br>{prose(message)}")
    return lines
