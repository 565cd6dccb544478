"""Each figure of a chapter has a number and a caption that says what to see."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .test_pattern import FIGURES, LESSONS, ROOT, Chapter, cell, source

DRAWS = re.compile(FIGURES.pattern.replace("style", "style|slider|pipeline|planner|calculator") + r"|\.draw\(")
"""A call that draws; sliders and playgrounds have captions of their own."""


def captions(chapter: Chapter) -> dict[str, dict[str, str]]:
    """What stands under the figures, by the cell that draws them."""
    found = {each["id"]: each["metadata"].get("mystnb", {}).get("figure") for each in chapter.of("code")}
    return {name: figure for name, figure in found.items() if figure}


def draws(code: str, chapter: Chapter) -> bool:
    """Whether a cell draws, or calls a function of the page that does."""
    sources = map(source, chapter.of("code"))
    own = [name for each in sources if DRAWS.search(each) for name in re.findall(r"^def (\w+)", each, re.MULTILINE)]
    called = re.compile(rf"^(?:{'|'.join(own)})\(", re.MULTILINE) if own else None
    return bool(DRAWS.search(code) or (called and called.search(code)))


def faults(chapter: Chapter) -> list[str]:
    """Cells that draw without a caption, captions without a picture, labels that are not the cell's."""
    known = captions(chapter)
    drawing = {each["id"] for each in chapter.of("code") if draws(source(each), chapter)}
    found = [f"{name}: draws, and has no caption" for name in sorted(drawing - set(known))]
    found += [f"{name}: has a caption, and draws nothing" for name in sorted(set(known) - drawing)]
    for name, figure in known.items():
        if figure.get("label") != f"fig-{name}":
            found.append(f"{name}: the label must be fig-{name}")
        if len(figure.get("caption", "").split()) < 8:
            found.append(f"{name}: a caption that does not say what to see")
    for each in chapter.of("code"):
        if ".barh(" in source(each) and "invert_yaxis()" not in source(each):
            found.append(f"{each['id']}: its first bar is at the bottom")
    return found


@pytest.mark.parametrize("stem", LESSONS)
def test_each_cell_that_draws_has_a_caption(stem):
    assert faults(Chapter.read(ROOT / "chapters" / f"{stem}.ipynb")) == []


SAYS = {"label": "fig-a", "caption": "One line is theory, the marks are what was measured."}


@pytest.mark.parametrize(
    ("code", "figure", "fault"),
    [
        ("figures.timeline(rows)", None, "draws, and has no caption"),
        ("run.draw()", None, "draws, and has no caption"),
        ("x = 1", SAYS, "draws nothing"),
        ("plt.subplots()", {**SAYS, "label": "fig-b"}, "the label must be fig-a"),
        ("plt.subplots()", {**SAYS, "caption": "A figure."}, "does not say what to see"),
        ("plt.subplots()[1].barh(names, sizes)", SAYS, "its first bar is at the bottom"),
    ],
)
def test_each_fault_of_a_figure_is_found(code, figure, fault):
    chapter = Chapter([cell(code, mystnb={"figure": figure} if figure else {})])
    assert [fault in each for each in faults(chapter)] == [True]


def test_a_call_of_a_function_that_draws_is_found():
    cells = [cell("def grid():\n    plt.subplots()", name="b", mystnb={"figure": {**SAYS, "label": "fig-b"}})]
    assert faults(Chapter([*cells, cell("grid()")])) == ["a: draws, and has no caption"]


@pytest.mark.parametrize("code", ["figures.slider(f)", "figures.pipeline(p)", "figures.style.use()"])
def test_what_has_a_caption_of_its_own_needs_no_other(code):
    assert faults(Chapter([cell(code)])) == []


@pytest.mark.parametrize("stem", LESSONS)
def test_each_figure_of_the_built_book_has_a_number_and_its_caption(html, stem):
    page = (html / "chapters" / f"{stem}.html").read_text("utf-8")
    known = captions(Chapter.read(Path(ROOT / "chapters" / f"{stem}.ipynb")))
    figures = dict(re.findall(r'<figure [^>]*id="(fig-[^"]+)">(.*?)</figure>', page, flags=re.DOTALL))
    assert list(figures) == [figure["label"] for figure in known.values()]
    for name, shown in figures.items():
        for said in re.findall(r'aria-label="([^"]*)"', shown):
            assert len(re.findall(r"\d[\d.,]*", said)) >= 2, f"{name}: its alternative text has no numbers: {said}"
        assert re.search(r'<svg class="[^"]*\bdtlib-figure\b', shown)
        assert re.search(r'class="caption-number">Figure [\d.]+ <', shown)
    assert "dtlib-figure" not in re.sub(r"<figure.*?</figure>|<style.*?</style>", "", page, flags=re.DOTALL)
