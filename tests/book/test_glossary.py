"""Terms of the glossary are links with a preview: once a page, in running text, to the entry that says the same."""

from __future__ import annotations

import importlib.util
from functools import cache

import pytest
from bs4 import BeautifulSoup

from .test_browser import luminance
from .test_pages import soup
from .test_pattern import LESSONS, ROOT

spec = importlib.util.spec_from_file_location("book_glossary", ROOT / "_ext" / "book_glossary.py")
glossary = importlib.util.module_from_spec(spec)
spec.loader.exec_module(glossary)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Each rank of an all-reduce waits.", ["rank", "all-reduce"]),
        ("Ranks enter two all-reduces.", ["Rank", "all-reduce"]),
        ("A low-rank update is all-reduced by rank0.", []),
        ("The ring attention of a ring", ["ring attention", "ring"]),
        ("α–β models, and β models", ["α–β model"]),
        ("The larger of an entry and zero, as ZeRO says", ["ZeRO"]),
    ],
)
def test_a_term_is_a_word_of_its_own(text, found):
    terms = ["rank", "all-reduce", "ring", "ring attention", "α–β model", "ZeRO"]
    assert [match[1] for match in glossary.pattern(terms).finditer(text)] == found


def test_a_formula_is_shown_without_commands():
    assert glossary.plain(r"\alpha + D/B, s \times s") == "α + D/B, s × s"


@cache
def said(page: BeautifulSoup) -> dict[str, str]:
    """What the glossary's page says up to its first formula, by the id of the term, without citations and spaces."""
    found = {}
    for term in page.select("dl.glossary dt"):
        entry = BeautifulSoup(str(term.find_next_sibling("dd")), "html.parser")
        for citation in entry.select(".bibtex-citation"):
            citation.decompose()
        for formula in entry.select(".math"):
            formula.replace_with("FORMULA")
        found[term["id"]] = "".join(entry.text.split("FORMULA")[0].split())
    return found


@pytest.mark.parametrize("stem", LESSONS)
def test_each_term_is_linked_once_where_it_is_running_text(html, stem):
    links = soup(html / "chapters" / f"{stem}.html").select("a.term")
    targets = [link["href"].removeprefix("glossary.html#") for link in links]
    assert len(links) >= 5
    assert len(set(targets)) == len(targets)
    entries = said(soup(html / "chapters" / "glossary.html"))
    for link, target in zip(links, targets, strict=True):
        assert not link.find_parents(["h1", "h2", "h3", "figcaption", "code", "a", "pre"])
        assert not link.find_parents(class_="opening")
        assert "".join(link["data-says"].split()).startswith(entries[target])
        assert "\\" not in link["data-says"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_preview_stands_out_where_the_focus_is(visit, html, scheme):
    with visit(width=390, scheme=scheme) as tab:
        page = tab.open(html / "chapters" / "memory.html")
        link = page.locator("a.term").first
        page.keyboard.press("Tab")  # so that a focus set by the script counts as one of the keyboard
        link.focus()
        style = "e => { const s = getComputedStyle(e, '::after'); return [s.content, s.color, s.backgroundColor]; }"
        content, ink, paper = link.evaluate(style)
        assert content.strip('"') == link.get_attribute("data-says")
        high, low = sorted((luminance(ink), luminance(paper)), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5  # WCAG 2.2, 1.4.3
        assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
        link.evaluate("e => e.blur()")
        assert link.evaluate(style)[0] in ("none", "normal")
        assert tab.left == []
