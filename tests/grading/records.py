"""Records of learners made up for tests of reports, and texts that would like to be structure."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

from dtlib.grading.classroom.report import exports, record
from dtlib.grading.exercises.catalogue import all_exercises
from dtlib.grading.sandbox.walls import WALLS

from .classroom import SEED

EVIL = (
    "</p><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<!-- ",
    "# a heading",
    "[a link](https://evil.example)",
    "![a picture](https://evil.example/x.png)",
    "[ref]: https://evil.example",
    "[ref][ref] [^1]",
    "https://evil.example www.evil.example ftp://evil.example a@evil.example",
    "`code` ``more`` ```",
    "```\n# out of the fence\n```",
    "~~~\n# out of the fence\n~~~",
    "| a | b |\n|---|---|\n| c | d |",
    "**bold** __bold__ *it* _it_ ~~no~~",
    "$x$ $$y$$ \\(z\\)",
    "@somebody #1 :tada:",
    "&lt;b&gt; &#60;b&#62;",
    "\\`not code\\`",
    "line\nbreak\r\nand\rmore\u2028lines",
    "\x00\x07\x1b[31mred\x1b[0m\x1b]0;title\x07 \ud800 \ufffe \u202eback",
    "a`b<b>c</b>`d`",
    "x" * 100_000,
)


def exercise(hidden=()):
    """collectives.6 with some of its checks hidden."""
    found = all_exercises()["collectives.6"]
    return replace(found, checks=tuple(replace(each, visible=each.name not in hidden) for each in found.checks))


def graded(definition, message="Saw this; expected that.", mistake="", printed="", **more):
    """A verdict in which the last check of an exercise fails."""
    checks = [each.result("pass") for each in definition.checks]
    checks[-1] = definition.checks[-1].result("fail", message=message, mistake=mistake)
    measured = {"printed": printed, "seconds": 1.5, "peak_bytes": 2**20}
    return record.entry_of(definition, "partly right", checks, measured=measured, **more)


def learner(name="anna", message="Saw this; expected that.", printed="", notes=(), hidden=(), **options):
    entries = [graded(exercise(hidden), message, printed=printed, **options)]
    return record.learner_record(name, entries, notes, seed=SEED, walls=dict.fromkeys(WALLS, ""))


def junit_of(records):
    document = exports.JUNIT[0] + "".join(map(exports.suite, records)) + exports.JUNIT[1]
    return ElementTree.fromstring(document.encode("utf-8"))
