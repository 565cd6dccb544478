"""What people read: for each learner a report in Markdown, for the instructor one of the class, also as an HTML page.

The words stand in the templates beside this module. Every value that a template shows is written so that Markdown finds
no structure in it, unless it is `Markdown` already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from dtlib.grading.exercises.result import SIGNS, is_told_of, once
from dtlib.grading.sandbox.walls import MEANING
from dtlib.theory.units import format_count

from .folder import FEEDBACK
from .record import ABSENT, WAITING, WHOLE, Record, digest_of, has_late
from .text import MAX_NAME, Markdown, bar, duration, fenced, markdown, one_line, percent, prose

if TYPE_CHECKING:
    from dtlib.grading.exercises.exercise import Exercise

MARK = "<!-- dtlib-grade-report/2 -->"  # also good for the summary of a job on GitHub, which allows 1024 KiB
MAX_BYTES = 900 * 1024
_MOST_ROWS = 1000
_MOST_LISTED = 30
_MOST_SEEDS = 5
_MAX_COLUMNS = 14  # exercises; above that, a column is a chapter
_SLOW_SECONDS = 10  # that all ranks waited for a processor, if it is longer than they computed
_SHOWN_SIGNS = {**SIGNS, "error": "⚠", WAITING: "…", ABSENT: "–"}
_OUR_FAULT = "The grader itself failed here, which is not your fault. Your instructor has been told."


def learner_report(record: Record) -> str:
    """The whole report of one learner. Of a check that learners do not see it shows the name and the points alone."""
    return _filled("learner.md", record=record, told=told, reason_of=reason_of, digest=digest_of(record["seed"]))


def feedback_page(said: str) -> str:
    """A learner's report, as `learner_report` makes it, as a page that needs nothing else."""
    return _filled("class.html", title="Feedback", body=Markdown(_renderer().render(said)))


def class_reports(group: Record, exercises: Sequence[Exercise], odd: Sequence[Record] = ()) -> dict[str, str]:
    """The report of the class by file: in Markdown, at most `MAX_BYTES` long in UTF-8, and as a page that needs nothing
    else, with the distribution of each exercise's points, and names that are links to their feedback. `odd` lists what
    is worth a look.
    """
    files = {each["learner"]: each["file"] for each in group["learners"]}
    page = _class(group, exercises, odd, _distribution, partial(_linked, files))
    said = _class(group, exercises, odd, lambda row: bar(row["mean_percent"] / 100), markdown)
    body = Markdown(_renderer().render(page))
    return {"report.md": said, "report.html": _filled("class.html", title="Class report", body=body)}


@cache
def _renderer() -> Any:
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark", {"html": True}).enable("table")


def _linked(files: Mapping[str, str], learner: str) -> Markdown:
    """A learner's name as a link to the learner's feedback."""
    file = files.get(one_line(learner, MAX_NAME))
    said = markdown(learner)
    return Markdown(f'<a href="{FEEDBACK}/{quote(file)}.html">{said}</a>') if file else said


def told(entry: Record) -> list[tuple[Record, str]]:
    """The checks of an exercise that a learner is told of, with what is told; of what is hidden, nothing."""
    shown = [each for each in entry["checks"] if is_told_of(each["max_points"], each["verdict"])]
    return list(zip(shown, once(each["message"] if each["visible"] else "" for each in shown), strict=True))


def reason_of(entry: Record) -> str:
    """What stands for the exercise as a whole, "" where its checks say everything."""
    return _OUR_FAULT if entry["status"] == "error" else str(entry["reason"])


def summary_lines(group: Record, limit: int = 10) -> list[str]:
    """The class in a few lines of plain text, for a terminal."""
    of_all, kept = group["class"], group["measured"]["kept"]
    middle = f"mean {of_all['mean_percent']:g} %, median {of_all['median_percent']:g} %"
    earlier = f", {kept} of them kept from an earlier run" if kept else ""
    lines = [f"{_count(of_all['graded'], 'learner')} graded{earlier}"]
    if of_all["graded"]:
        told = "" if "shard" in group else f"{middle}, "  # a share has no learner's points whole
        lines.append(f"{told}seed {', '.join(_seeds(group))}")
    if group["not_kept"]:
        lines.append(f"the next run grades everybody again, since no record is kept: {group['not_kept']}")
    lines += [f"these names look alike: {', '.join(names)}" for names in group["alike"][:limit]]
    return lines + [f"⚠ {' '.join(each.values())}" for each in group["faults"][:limit]]


def _seeds(group: Record) -> list[str]:
    """The seeds of the learners' cases, that of most learners first; of many the first few."""
    counts = Counter(each["seed"] for each in group["learners"] if each["status"] not in (WAITING, ABSENT))
    seeds = [str(seed) for seed, _ in counts.most_common()] or [str(group["seed"])]
    return seeds[:_MOST_SEEDS] + (["…"] if len(seeds) > _MOST_SEEDS else [])


def _distribution(row: Record) -> Markdown:
    """How many learners have how many points in an exercise, as a small picture."""
    counts = row["distribution"]
    said = ", ".join(f"{format_count(points, 'point')}: {count}" for points, count in enumerate(counts) if count)
    return Markdown(_filled("distribution.svg", counts=counts, most_learners=max(1, *counts), said=said or "nobody"))


def _class(
    group: Record,
    exercises: Sequence[Exercise],
    odd: Sequence[Record],
    draw: Callable[[Record], str],
    who: Callable[[str], Markdown],
) -> str:
    worth = {each.id: each.points for each in exercises}
    columns = list(worth)
    if len(columns) > _MAX_COLUMNS:
        columns = list(dict.fromkeys(name.partition(".")[0] for name in columns))
    computed, waited = (group["measured"].get(name, 0.0) for name in ("cpu_seconds", "starved_seconds"))
    return _filled(
        "class.md",
        **{"unlisted": [], **group},
        of_all=group["class"],
        seeds=_seeds(group),
        columns=columns,
        worth=worth,
        odd=odd,
        is_slow=waited > max(computed, _SLOW_SECONDS),
        waited=f"the learners' processes computed {duration(computed)} and waited {duration(waited)} for a processor",
        draw=draw,
        who=who,
        absent=[each["learner"] for each in group["learners"] if each["status"] == ABSENT],
        has_late=has_late(group),
    )


def _column(each: Record, column: str, worth: dict[str, int]) -> str:
    """The cell of an exercise, or of a chapter."""
    found = each["exercises"]
    if column in worth:
        points, status = found[column]["points"], found[column]["status"]
        return f"{points}/{worth[column]}" if status == "partly right" else _SHOWN_SIGNS[status]
    mine = [name for name in found if name.partition(".")[0] == column]
    return f"{sum(found[name]['points'] for name in mine)}/{sum(worth[name] for name in mine)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _filled(template: str, **values: Any) -> str:
    return str(_environment().get_template(f"{template}.jinja").render(**values))


@cache
def _environment() -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__, "."),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # what is shown goes through `markdown`: HTML is made of Markdown alone
        finalize=lambda value: markdown(value) if isinstance(value, str) and not isinstance(value, Markdown) else value,
    )
    filters = {"prose": prose, "fenced": fenced, "bar": bar, "duration": duration, "markup": Markdown}
    environment.filters.update(filters, general="{:.4g}".format, short=lambda text: markdown(text, 300))
    environment.globals.update(signs=_SHOWN_SIGNS, count=_count, percent=percent, meaning=MEANING, whole=WHOLE)
    environment.globals.update(mark=Markdown(MARK), most=_MOST_LISTED, waiting=WAITING)
    environment.globals.update(most_rows=_MOST_ROWS, column=_column)
    return environment
