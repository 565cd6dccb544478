"""The report of the class: Markdown that also serves as the summary of a job on GitHub, which allows 1024 KiB."""

from __future__ import annotations

from collections.abc import Sequence

from dtlib.grading.walls import MEANING

from .learner_md import MARK, SIGNS
from .record import WAITING, Record, Standing
from .results import Class
from .statistics import WHOLE
from .text import bar, duration, markdown, percent

MAX_BYTES = 900 * 1024
_TABLE_BYTES = 700 * 1024
_MAX_COLUMNS = 14  # exercises; above that, a column is a chapter
_MAX_FAULTS = 20


def class_report(group: Class) -> str:
    """The whole report, at most `MAX_BYTES` long in UTF-8 whatever the size of the class."""
    head = [*_heading(group), *_faults(group)]
    tail = [*_items(group), *_odd(group), *_walls(group), *_again(group)]
    room = min(_TABLE_BYTES, MAX_BYTES - sum(len(line.encode()) + 1 for line in head + tail) - 4096)
    return "\n".join([*head, *_distribution(group), *_learners(group, room), *tail, ""])


def _heading(group: Class) -> list[str]:
    waiting = len(group.standings) - len(group.graded)
    lines = [MARK, "# Class report", ""]
    if group.state == "interrupted":
        lines += ["**Interrupted.** Run the same command again: those who are graded are kept.", ""]
    facts = [f"**{_count(len(group.standings), 'learner')}**"]
    if group.graded:
        facts += [f"mean **{group.mean_percent:g} %**", f"median **{group.median_percent:g} %**"]
    facts += [
        f"{_count(len(group.exercises), 'exercise')}, {_count(group.max_points, 'point')}",
        f"seed `{group.seed}`",
    ]
    if waiting:
        facts.append(f"{waiting} {WAITING}")
    return [*lines, " · ".join(facts), ""]


def _faults(group: Class) -> list[str]:
    if not group.faults:
        return []
    lines = ["## ⚠ The grader itself failed", "", "Not the learners' fault: run the same command again.", ""]
    for fault in group.faults[:_MAX_FAULTS]:
        where = " · ".join(part for part in (markdown(fault.learner), fault.exercise) if part)
        lines.append(f"- {where}: {markdown(fault.text, 300)}")
    if len(group.faults) > _MAX_FAULTS:
        lines.append(f"- and {len(group.faults) - _MAX_FAULTS} more")
    return [*lines, ""]


def _distribution(group: Class) -> list[str]:
    if len(group.graded) < 5:
        return []
    bins = [0] * 11
    for each in group.graded:
        bins[int(each.percent // 10)] += 1
    names = [f"{10 * number}–{10 * number + 9} %" for number in range(10)] + ["100 %"]
    width = max(len(name) for name in names)
    most = max(bins)
    rows = [
        f"{name:>{width}}  {'█' * max(1, round(30 * count / most)) if count else ''} {count or ''}".rstrip()
        for name, count in zip(reversed(names), reversed(bins), strict=True)
    ]
    return ["## Distribution", "", "```text", *rows, "```", ""]


def _learners(group: Class, room: int) -> list[str]:
    names = [each["id"] for each in group.exercises]
    by_chapter = len(names) > _MAX_COLUMNS
    worth = {each["id"]: each["points"] for each in group.exercises}
    columns = list(dict.fromkeys(name.partition(".")[0] for name in names)) if by_chapter else names
    lines = [
        "## Learners",
        "",
        f"| learner | points | % | {' | '.join(name.replace('.', '<br>') for name in columns)} |",
        f"|:--|--:|--:|{':-:|' * len(columns)}",
    ]
    used = 0
    for shown, each in enumerate(group.standings.values()):
        cells = [_chapter(each, name, worth) if by_chapter else _exercise(each, name, worth) for name in columns]
        total = f"{each.points} / {each.max_points} | {each.percent:g}" if each.status != WAITING else f"{WAITING} | "
        row = f"| {markdown(each.learner)} | {total} | {' | '.join(cells)} |"
        used += len(row.encode()) + 1
        if used > room:
            lines += ["", f"… and {len(group.standings) - shown} more: all of them stand in `scores.csv`."]
            break
        lines.append(row)
    key = "✓ all points · a number: so many of them · ✗ none · ○ not attempted"
    return [*lines, "", f"<sub>{key} · ⚠ the grader failed · … {WAITING}</sub>", ""]


def _exercise(each: Standing, name: str, worth: dict[str, int]) -> str:
    points, status = each.exercises[name]
    if status == "fail" and points:
        return f"{points}/{worth[name]}"
    return SIGNS[status]


def _chapter(each: Standing, stem: str, worth: dict[str, int]) -> str:
    mine = [name for name in each.exercises if name.partition(".")[0] == stem]
    return f"{sum(each.exercises[name][0] for name in mine)}/{sum(worth[name] for name in mine)}"


def _items(group: Class) -> list[str]:
    if not group.statistics:
        return []
    lines = [
        "## Exercises",
        "",
        "| exercise | worth | attempted | all points | mean | | commonest failure |",
        "|:--|--:|--:|--:|--:|:--|:--|",
    ]
    for row in group.statistics:
        share = row["mean_points"] / row["points"]
        lines.append(
            f"| {row['exercise']} · {markdown(row['title'])} | {row['points']} | {row['attempted']} | {row['passed']} "
            f"| {row['mean_points']:.1f} | {bar(share)}&nbsp;{percent(row['mean_points'], row['points']):.0f}&nbsp;% "
            f"| {_failure(row['commonest_failure'])} |"
        )
    return [*lines, ""]


def _failure(worst: Record | None) -> str:
    if worst is None:
        return ""
    where = "" if worst["check"] == WHOLE else f"*{markdown(worst['check'])}*: "
    return f"{where}{markdown(worst['mistake'])} ({worst['count']})"


def _odd(group: Class) -> list[str]:
    if not group.odd:
        return []
    lines = ["## Worth a look", "", "What these answers did earned nothing; it may be a mistake all the same.", ""]
    for learner, exercise, reason in group.odd:
        lines.append(f"- {markdown(learner)} · {exercise}: {markdown(reason.partition(': ')[2] or reason, 300)}")
    if group.num_odd > len(group.odd):
        lines.append(f"- and {group.num_odd - len(group.odd)} more")
    return [*lines, ""]


def _walls(group: Class) -> list[str]:
    if not group.walls:
        return []
    down = [name for name, reason in group.walls.items() if reason]
    verdict = "All of them stood." if not down else f"**{_count(len(down), 'wall')} did not stand.**"
    lines = ["## Walls around the submissions", "", verdict, "", "| | wall | what it does |", "|:-:|:--|:--|"]
    for name, reason in group.walls.items():
        told = MEANING.get(name, "")
        missing = f"; **it did not stand**: {markdown(reason, 300)}" if reason else ""
        lines.append(f"| {'✗' if reason else '✓'} | {markdown(name)} | {told}{missing} |")
    return [*lines, ""]


def _again(group: Class) -> list[str]:
    measured = group.measured
    facts = [f"`--seed {group.seed}` repeats the same cases"]
    if "seconds" in measured:
        facts.append(f"{duration(measured['seconds'])} with {_count(measured['jobs'], 'job')}")
    if group.kept:
        facts.append(f"{_count(group.kept, 'learner')} kept from an earlier run")
    if measured.get("peak_grader_bytes"):
        facts.append(f"the grader's own memory peaked at {measured['peak_grader_bytes'] / 2**20:.0f} MiB")
    slow = sorted(measured.get("exercise_seconds", {}).items(), key=lambda pair: -pair[1])[:3]
    lines = ["## This run", "", *(f"- {fact}" for fact in facts)]
    if slow and slow[0][1]:
        lines.append("- longest: " + ", ".join(f"{name} {duration(seconds)}" for name, seconds in slow))
    return [*lines, f"- dtlib {markdown(group.grader.get('version', ''))}", ""]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def summary_lines(group: Class, limit: int = 10) -> Sequence[str]:
    """The class in a few lines of plain text, for a terminal."""
    lines = [f"{_count(len(group.graded), 'learner')} graded, {group.kept} of them kept from an earlier run"]
    if group.graded:
        lines.append(f"mean {group.mean_percent:g} %, median {group.median_percent:g} %, seed {group.seed}")
    lines += [f"⚠ {each.learner} {each.exercise}: {each.text}" for each in group.faults[:limit]]
    return lines
