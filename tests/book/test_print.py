"""A chapter on paper: folds are open, no line is clipped, nothing scrolls; on the screen no line of code is clipped."""

from __future__ import annotations

import pytest

from .test_pattern import LESSONS

CLIPPED = """() => [...document.querySelectorAll("main pre")].filter(
  (each) => each.getClientRects().length && each.scrollWidth > each.clientWidth + 1
).map((each) => each.innerText.split("\\n").sort((a, b) => b.length - a.length)[0])"""
SCROLLING = """() => [...document.querySelectorAll("main .scroll, main .cell_output")].filter(
  (each) => ["auto", "scroll"].includes(getComputedStyle(each).overflowX)
).length"""
CLOSED = "() => document.querySelectorAll('main details:not([open])').length"


@pytest.mark.parametrize("stem", LESSONS)
def test_no_line_of_code_is_clipped_on_a_screen(visit, html, stem):
    with visit(width=1280) as tab:
        page = tab.open(html / "chapters" / f"{stem}.html")
        page.evaluate("() => document.querySelectorAll('main details').forEach((fold) => { fold.open = true })")
        assert page.evaluate(CLIPPED.replace("main pre", "main .cell_input pre")) == []


@pytest.mark.parametrize("stem", ["memory", "tp", "pp"])
def test_a_printed_chapter_shows_everything(visit, html, stem):
    with visit(width=720) as tab:  # the width of a sheet
        page = tab.open(html / "chapters" / f"{stem}.html")
        folded = page.evaluate(CLOSED)
        assert folded
        page.emulate_media(media="print")
        page.evaluate("() => window.dispatchEvent(new Event('beforeprint'))")
        assert page.evaluate(CLOSED) == 0
        assert page.evaluate(CLIPPED) == []
        assert page.evaluate(SCROLLING) == 0
        page.evaluate("() => window.dispatchEvent(new Event('afterprint'))")
        assert page.evaluate(CLOSED) == folded
        assert tab.complaints == []
