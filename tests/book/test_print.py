"""A chapter on paper: folds are open, no line is clipped, nothing scrolls; on the screen no line of code is clipped."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
from pypdf import PdfReader

from .test_pattern import LESSONS, ROOT

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


BOOK_PDF = runpy.run_path(str(ROOT / "_ext" / "book_pdf.py"))
JOINED = ("intro", "pp", "cheatsheet")
CODE = "() => [...document.querySelectorAll('main .cell_input pre')].flatMap((each) => each.textContent.split('\\n'))"


def told(file: Path, *options: str) -> str:
    """The text of a PDF."""
    return subprocess.run(["pdftotext", *options, file, "-"], capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def joined(browser, html, tmp_path_factory, lacking) -> Path:
    """Three pages of the book in one PDF, as ``make pdf`` joins all of them."""
    if shutil.which("pdftotext") is None:
        lacking("pdftotext is not installed (apt-get install poppler-utils)")
    file = tmp_path_factory.mktemp("pdf") / "book.pdf"
    BOOK_PDF["join"](browser, [html / "chapters" / f"{stem}.html" for stem in JOINED]).write(file)
    return file


def test_the_whole_book_is_printed_in_its_order(html):
    rows = (ROOT / "_toc.yml").read_text("utf-8")
    wanted = re.findall(r"(?:root|file): (\S+)", rows)
    assert [page.relative_to(html).with_suffix("").as_posix() for page in BOOK_PDF["contents"](html)] == wanted


def test_the_text_of_every_fold_is_on_paper(visit, html, joined):
    """Open is not yet painted: a fold that fades in is printed empty. So the PDF itself is read."""
    with visit() as tab:
        folds = tab.open(html / "chapters" / "pp.html").evaluate(FOLDED)
    printed = set(re.findall("[a-z_]{7,}", re.sub(r"-\n", "", told(joined))))
    assert len(folds) > 20
    lost = [words for words in folds if len(printed.intersection(words)) < len(set(words)) / 2]
    assert lost == [], "folds whose words are not on paper"


def test_no_line_of_code_is_broken_and_nothing_leaves_the_sheet(visit, html, joined):
    with visit() as tab:
        lines = tab.open(html / "chapters" / "pp.html").evaluate(CODE)
    long = [line.split() for line in lines if len(line) > 85]
    printed = "\n".join(" ".join(line.split()) for line in told(joined, "-layout").splitlines())
    assert len(long) > 10
    assert [line for line in long if " ".join(line) not in printed] == []
    for page in told(joined, "-bbox").split("<page ")[1:]:
        width = float(re.search(r'width="([\d.]+)"', page)[1])
        ends = [float(end) for end in re.findall(r'xMax="([\d.]+)"', page)]
        assert max(ends) < width - 20, "points: half of the margin"


def test_pages_are_numbered_and_headings_are_bookmarks(html, joined):
    book, sheets = PdfReader(joined), told(joined, "-raw").split("\f")[:-1]  # in the order of drawing
    assert [sheet.split()[-1] for sheet in sheets] == [str(number + 1) for number in range(len(book.pages))]
    chapters = [each for each in book.outline if not isinstance(each, list)]
    assert len(chapters) == len(JOINED)
    parts = [each for group in book.outline if isinstance(group, list) for each in group if not isinstance(each, list)]
    assert len(parts) > 15
    for mark in (*chapters, *parts):
        words = re.findall(r"\w{3,}", mark.title)
        assert all(word in sheets[book.get_destination_page_number(mark)] for word in words), mark.title


def test_links_between_pages_stay_inside(joined):
    book = PdfReader(joined)
    links = [each.get_object() for page in book.pages for each in page.get("/Annots", ())]
    assert [link for link in links if str(link.get("/A", {}).get("/URI", "")).startswith("file:")] == []
    first = [page.indirect_reference.idnum for page in book.pages]
    targets = [first.index(link["/Dest"][0].idnum) for link in links if "/Dest" in link]
    assert len(targets) > 20
    starts = [book.get_destination_page_number(each) for each in book.outline if not isinstance(each, list)]
    within = {sum(target >= start for start in starts) for target in targets}
    assert within == {1, 2, 3}  # the intro leads to pp, pp to the cheat sheet or itself
