"""A lesson, not a test bench: what a chapter may ask of its reader, in numbers."""

from __future__ import annotations

import ast
import json
import re
import runpy
import statistics
from dataclasses import dataclass
from pathlib import Path

import pytest

from dtlib import course

ROOT = Path(__file__).parents[2]
LESSONS = tuple(each.stem for each in course.CHAPTERS if each.is_lesson)
MOST = {"cells": 60, "words": 3500, "visible lines": 250, "lines in the median cell": 6}
FEWEST_FIGURES = 8
MOST_LINES, MOST_OF_THE_MECHANISM, MOST_COLUMNS = 15, 25, 95
PARTS = runpy.run_path(str(ROOT / "_ext" / "new_chapter.py"))["PARTS"]
HIDDEN = {"hide-input", "hide-cell", "remove-input", "remove-cell"}
FIGURES = re.compile(r"figures\.(?!style)\w+\(|plt\.subplots\(")
FORBIDDEN = re.compile(r"\bgetattr\(\w+, [\"']|[\w\])]\._[a-z]")


@dataclass
class Chapter:
    """The cells of a notebook: each its id, its kind, its source and its tags."""

    cells: list[dict]

    @classmethod
    def read(cls, path: Path) -> Chapter:
        return cls(json.loads(path.read_text("utf-8"))["cells"])

    def of(self, kind: str) -> list[dict]:
        return [cell for cell in self.cells if cell["cell_type"] == kind]

    @property
    def visible(self) -> list[dict]:
        return [cell for cell in self.of("code") if not HIDDEN & set(tags(cell))]

    @property
    def numbers(self) -> dict[str, float]:
        lengths = [len(lines(cell)) for cell in self.visible]
        return {
            "cells": len(self.cells),
            "words": sum(words(source(cell)) for cell in self.of("markdown")),
            "visible lines": sum(lengths),
            "lines in the median cell": statistics.median(lengths),
            "figures": sum(len(FIGURES.findall(source(cell))) for cell in self.of("code")),
        }


def source(cell: dict) -> str:
    return "".join(cell["source"])


def tags(cell: dict) -> list[str]:
    return cell["metadata"].get("tags", [])


def lines(cell: dict) -> list[str]:
    return source(cell).strip().splitlines()


def words(text: str) -> int:
    """Words that are read; formulas and what only the builder reads are none."""
    text = re.sub(r"\$\$.*?\$\$|\$[^$]*\$", " x ", text, flags=re.DOTALL)
    text = re.sub(r"^(```.*|:label:.*)$|\{[a-z:]+\}`[^`]*`", " ", text, flags=re.MULTILINE)
    return len(re.findall(r"[A-Za-z0-9][\w'’-]*", text))


def faults(chapter: Chapter) -> list[str]:
    """Where a chapter asks for more than a lesson may, or shows less than it should."""
    numbers = chapter.numbers
    found = [f"{name}: {numbers[name]:g}, at most {most}" for name, most in MOST.items() if numbers[name] > most]
    if numbers["figures"] < FEWEST_FIGURES:
        found.append(f"figures: {numbers['figures']}, at least {FEWEST_FIGURES}")
    for cell in chapter.visible:
        most = MOST_OF_THE_MECHANISM if "mechanism" in tags(cell) else MOST_LINES
        if len(lines(cell)) > most:
            found.append(f"{cell['id']}: {len(lines(cell))} lines, at most {most}")
    mechanisms = [cell["id"] for cell in chapter.visible if "mechanism" in tags(cell)]
    if len(mechanisms) > 1:
        found.append(f"{', '.join(mechanisms)}: cells of the mechanism, at most one")
    for cell in chapter.of("code"):
        wide = [line for line in lines(cell) if len(line) > MOST_COLUMNS]
        found += [f"{cell['id']}: more than {MOST_COLUMNS} columns in {line.strip()[:30]!r}" for line in wide]
        found += [f"{cell['id']}: reaches into {each!r}" for each in FORBIDDEN.findall(source(cell))]
        if "hide-input" in tags(cell) and not cell["metadata"].get("jupyter", {}).get("source_hidden"):
            found.append(f"{cell['id']}: folded in the book, and not in JupyterLab")
        if "hide-cell" in tags(cell) and cell["metadata"].get("mystnb", {}).get("code_prompt_show") != "Answer":
            found.append(f"{cell['id']}: a fold that does not say that it holds an answer")
        ast.parse(re.sub(r"^%", "#", source(cell), flags=re.MULTILINE))
    return found


@pytest.mark.parametrize("stem", LESSONS)
def test_a_chapter_is_a_lesson(stem):
    assert faults(Chapter.read(ROOT / "chapters" / f"{stem}.ipynb")) == []


@pytest.mark.parametrize("stem", LESSONS)
def test_the_mechanism_is_on_the_page(stem):
    chapter = Chapter.read(ROOT / "chapters" / f"{stem}.ipynb")
    assert any("mechanism" in tags(cell) for cell in chapter.visible)
    for part in PARTS:
        assert any(f"## {part}\n" in source(cell) + "\n" for cell in chapter.of("markdown")), part


def cell(text: str, *, kind: str = "code", name: str = "a", **metadata: object) -> dict:
    return {"cell_type": kind, "id": name, "metadata": metadata, "source": [text]}


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ([cell("x = 1")] * 61, "cells: 61, at most 60"),
        ([cell("x = 1"), cell("word " * 3501, kind="markdown")], "words: 3501, at most 3500"),
        ([cell("x = 1\n" * 16)], "a: 16 lines, at most 15"),
        ([cell("x = 1\n" * 26, tags=["mechanism"])], "a: 26 lines, at most 25"),
        ([cell("x = 1", name=name, tags=["mechanism"]) for name in "ab"], "a, b: cells of the mechanism, at most one"),
        ([cell("x = 1\n" * 7)], "lines in the median cell: 7, at most 6"),
        ([cell("x = 1\n" * 6)] * 42, "visible lines: 252, at most 250"),
        ([cell("figures.timeline(1)")] * 7, "figures: 7, at least 8"),
        ([cell("x = " + "1" * 92)], "more than 95 columns"),
        ([cell("model._params")], "reaches into"),
        ([cell('getattr(model, "params")')], "reaches into"),
        ([cell("x = 1"), cell("x = 1", tags=["hide-input"])], "not in JupyterLab"),
        ([cell("x = 1"), cell("x = 1", tags=["hide-cell"])], "does not say that it holds an answer"),
    ],
)
def test_each_fault_is_found(cells, message):
    assert any(message in fault for fault in faults(Chapter(cells))), faults(Chapter(cells))


def test_folded_cells_do_not_count():
    folded = cell("x = 1\n" * 40, tags=["hide-input"], jupyter={"source_hidden": True})
    drawn = [cell("figures.timeline(1)")] * FEWEST_FIGURES
    assert faults(Chapter([*drawn, folded])) == []
