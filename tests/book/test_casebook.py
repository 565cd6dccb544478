"""The casebook: a page of cases, each as short as it must be, run, reported and found from its symptom."""

from __future__ import annotations

import re

import pytest

from .test_pattern import MOST_COLUMNS, MOST_LINES, ROOT, Chapter, cell, lines, source, tags, words

FEWEST_CASES, MOST_WORDS = 24, 3600
LABEL = re.compile(r"^\((case-[a-z0-9-]+)\)=$", re.MULTILINE)
REPORT = re.compile(r"[\w.-]+/[\w.-]+ \d+")


def faults(page: Chapter) -> list[str]:
    """What a page of cases lacks, or has too much of."""
    texts = [source(each) for each in page.of("markdown")]
    labels = [label for text in texts for label in LABEL.findall(text) if label != "case-here"]
    found = [] if len(labels) >= FEWEST_CASES else [f"cases: {len(labels)}, at least {FEWEST_CASES}"]
    total = sum(map(words, texts))
    found += [f"words: {total}, at most {MOST_WORDS}"] if total > MOST_WORDS else []
    told = "".join(texts)
    for label in labels:
        at = next(i for i, each in enumerate(page.cells) if f"({label})=" in source(each))
        code, after = page.cells[at + 1], source(page.cells[at + 2])
        if code["cell_type"] != "code" or tags(code) or "lab.run(" not in source(code) or "\ntell(" not in source(code):
            found.append(f"{label}: no code that runs on ranks and tells a number")
        if len(lines(code)) > MOST_LINES or max(map(len, lines(code))) > MOST_COLUMNS:
            found.append(f"{label}: more than {MOST_LINES} lines, or {MOST_COLUMNS} columns")
        case = after.partition("\n(")[0]
        if not REPORT.search(case):
            found.append(f"{label}: no report")
        found += [f"{label}: no {part}" for part in ("Gives it away", "Cheapest check") if part not in case]
        if told.count(f"{{ref}}`{label}`") < 2:
            found.append(f"{label}: not in both tables, of symptoms and of what became of it here")
    return found


def test_each_case_is_whole():
    page = Chapter.read(ROOT / "chapters" / "casebook.ipynb")
    assert faults(page) == []


GOOD = [
    cell("(case-a)=\n### A\n{ref}`case-a` {ref}`case-a`", kind="markdown"),
    cell("found = lab.run(f, 2)\ntell(1)"),
    cell("**Gives it away:** 2. **Cheapest check:** 1. **Report:** torch/torch 12.", kind="markdown"),
]


@pytest.mark.parametrize(
    ("at", "changed", "fault"),
    [
        (1, "found = f()\ntell(1)", "case-a: no code that runs"),
        (1, "found = lab.run(f, 2)", "case-a: no code that runs"),
        (1, "found = lab.run(f, 2)\ntell(1)" + "\nx = 1" * 14, "case-a: more than 15 lines"),
        (2, "**Gives it away:** 2. **Cheapest check:** 1. **Report:** torch, somewhere.", "case-a: no report"),
        (2, "**Gives it away:** 2. **Report:** torch/torch 12.", "case-a: no Cheapest check"),
        (0, "(case-a)=\n### A\n{ref}`case-a`", "case-a: not in both tables"),
        (0, "(case-a)=\n### A\n" + "word " * 3601, "words: "),
    ],
)
def test_each_fault_is_found(at, changed, fault):
    assert faults(Chapter(GOOD)) == [f"cases: 1, at least {FEWEST_CASES}"]
    cells = [dict(each) for each in GOOD]
    cells[at]["source"] = [changed]
    assert any(each.startswith(fault) for each in faults(Chapter(cells)))


def test_a_number_that_is_right_gives_nothing_away():
    page = Chapter.read(ROOT / "chapters" / "casebook.ipynb")
    names: dict = {}
    exec(next(source(each) for each in page.of("code") if "def tell(" in source(each)), names)
    names["tell"]("norm", 2.0, right=1.0, wrong=2.0)
    for found, right, wrong in ((1.0, 1.0, 1.0), (1.0, 1.0, None), (3.0, 1.0, 2.0)):
        with pytest.raises(AssertionError):
            names["tell"]("norm", found, right=right, wrong=wrong)
