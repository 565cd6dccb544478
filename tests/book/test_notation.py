"""The page on notation: each letter of a lesson is explained, and each explanation is used."""

from __future__ import annotations

import json
import re

import pytest

from dtlib import course, theory

from .test_cheatsheet import sheet
from .test_pattern import ROOT

COMMON, OWN = sheet.letters((ROOT / "chapters" / "notation.md").read_text("utf-8"))


def formulas(stem: str) -> list[str]:
    """The LaTeX of a chapter: displays, formulas in its text, and the registered equations."""
    cells = json.loads((ROOT / "chapters" / f"{stem}.ipynb").read_text("utf-8"))["cells"]
    text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    text = re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*$", "", text, flags=re.MULTILINE))
    displays = re.findall(r"\$\$(.+?)\$\$", text, re.DOTALL)
    inline = re.findall(r"\$([^$]+)\$", re.sub(r"\$\$.+?\$\$", "", text, flags=re.DOTALL))
    return [*displays, *inline, *(known.equation for known in theory.formulas(stem).values())]


def letters(rows: list[tuple[str, str]]) -> set[str]:
    return {each for letter, _ in rows for each in sheet.letters_of(letter)}


@pytest.mark.parametrize("stem", course.stems())
def test_letters_are_explained_and_explanations_used(stem):
    used = {each for formula in formulas(stem) for each in sheet.letters_of(formula)}
    own = letters(OWN[course.title(stem)])
    assert used - own - letters(COMMON) == set(), "not explained"
    assert own - used == set(), "explained and not used"
