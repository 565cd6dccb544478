"""The cheat sheet has every formula once, rendered, and no letter that nobody explains."""

from __future__ import annotations

import importlib.util
import re
import sys

import pytest
from bs4 import BeautifulSoup

from dtlib import course, theory

from .test_pattern import ROOT

sys.path.append(str(ROOT / "_ext"))  # extensions import each other
spec = importlib.util.spec_from_file_location("book_cheatsheet", ROOT / "_ext" / "book_cheatsheet.py")
sheet = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sheet)


@pytest.mark.parametrize("stem", course.stems())
def test_every_letter_of_a_chapter_is_explained(stem):
    common, own = sheet.letters((ROOT / "chapters" / "notation.md").read_text("utf-8"))
    explained = {each for letter, _ in (*common, *own[course.title(stem)]) for each in sheet.letters_of(letter)}
    used = {each for known in theory.formulas(stem).values() for each in sheet.letters_of(known.equation)}
    assert used <= explained


def test_every_chapter_that_has_formulas_is_there():
    assert {known.chapter for known in theory.formulas().values()} == set(course.stems("theory"))


def test_words_are_no_letters():
    found = sheet.letters_of(r"\frac{p-1}{v\,m} + \text{rows} \cdot \mathrm{round}(x) \le \alpha B_{\text{slow}}")
    assert found == {"p", "v", "m", "x", r"\alpha", "B"}


def test_every_formula_is_on_the_page_once(html):
    page = (html / "chapters" / "cheatsheet.html").read_text("utf-8")
    names = re.findall(r"<code[^>]*>(?:<span[^>]*>)?([a-z_]+\.[a-z0-9_]+)<", page)
    assert sorted(names) == sorted(theory.formulas())
    assert page.count('<div class="math block') == len(names)  # the reader's browser sets them
    assert "$$" not in page
    assert "*Letters*" not in page


def test_every_formula_leads_to_its_measurement_and_to_where_it_is_derived(html):
    """Each link has its place on the page to which it leads; those that decide something have the first table."""
    page = BeautifulSoup((html / "chapters" / "cheatsheet.html").read_text("utf-8"), "html.parser")
    for number, table in enumerate(page.select("table.cheatsheet")):
        names = [row.select_one("code").text for row in table.select("tr")]
        assert {bool(theory.formulas()[name].use) for name in names} == {number == 0}
        for row, name in zip(table.select("tr"), names, strict=True):
            measured, derived = row.select("a")
            for link in (measured, derived):
                file, _, target = link["href"].partition("#")
                assert f'id="{target}"' in (html / "chapters" / file).read_text("utf-8"), (name, target)
            there = theory.formulas()[name].label or "the-derivation"
            assert derived["href"].partition("#")[2] in (there, f"equation-{there}"), name


def test_a_threshold_says_what_it_decides(html):
    page = " ".join((html / "chapters" / "cheatsheet.html").read_text("utf-8").split()).replace("’", "'")
    uses = [known.use for known in theory.formulas().values() if known.use and "$" not in known.use]
    assert len(uses) >= 10
    assert [use for use in uses if use not in page] == []
