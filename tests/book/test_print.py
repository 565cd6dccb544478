"""A chapter on paper: folds are open, no line is clipped, nothing scrolls; on the screen no line of code is clipped."""

from __future__ import annotations

import re
import shutil
import subprocess

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


@pytest.mark.parametrize("stem", ["memory", "tp", "pp", "interview"])
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


FOLDED = """() => [...document.querySelectorAll("main details")].map((fold) => {
  const hidden = [...fold.children].filter((each) => each.tagName !== "SUMMARY").map((each) => each.textContent);
  return (hidden.join(" ").match(/[a-z_]{7,}/g) || []).slice(0, 8);
}).filter((words) => words.length)"""


@pytest.mark.parametrize("stem", ["pp"])
def test_the_text_of_every_fold_is_on_paper(browser, html, tmp_path, lacking, stem):
    """Open is not yet painted: a fold that fades in is printed empty. So the PDF itself is read."""
    if shutil.which("pdftotext") is None:
        lacking("pdftotext is not installed (apt-get install poppler-utils)")
    page = browser.new_page()
    page.goto((html / "chapters" / f"{stem}.html").as_uri())
    folds = page.evaluate(FOLDED)
    page.pdf(path=tmp_path / "chapter.pdf")
    page.close()
    command = ["pdftotext", tmp_path / "chapter.pdf", "-"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    printed = set(re.findall("[a-z_]{7,}", re.sub(r"-\n", "", told)))
    assert len(folds) > 20
    lost = [words for words in folds if len(printed.intersection(words)) < len(set(words)) / 2]
    assert lost == [], "folds whose words are not on paper"
