"""Every formula of the book on one page, made from the registry and from the page on notation.

The directive ``{cheatsheet}`` becomes a first page of the formulas that decide something, each with what it decides,
and then for each chapter a table of its other formulas (what each one is, its equation, its function and where it is
derived) and a line with the letters of both, as ``chapters/notation.md`` explains them. A title leads to the
measurement.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import book_ledger
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from dtlib import course, theory

TABLE = [":::::{list-table}", ":class: cheatsheet", ":widths: 45 55", ""]
Letters = list[tuple[str, str]]
_ROW = re.compile(r"^\* - (.+?)(?=^\* - |^```|\Z)", re.MULTILINE | re.DOTALL)


class CheatSheet(SphinxDirective):
    """``{cheatsheet}``: the formulas of all chapters, a section each."""

    def run(self) -> list[nodes.Node]:
        """Write the tables as MyST."""
        notation = Path(self.env.doc2path("chapters/notation"))
        self.env.note_dependency(str(notation))
        book_ledger.note(self.env)
        common, own = letters(notation.read_text("utf-8"))
        known = [each for stem in course.stems() for each in theory.formulas(stem).values()]
        lines = ["## What decides", "", *TABLE]
        for each in filter(lambda each: each.use, known):
            lines += [*row(each), "", f"    {each.use}"]
        lines += [":::::", ""]
        for chapter in course.CHAPTERS:
            here = [each for each in known if each.chapter == chapter.stem]
            if not here:
                continue
            lines += [f"## [{chapter.heading}]({chapter.stem}.ipynb)", "", *TABLE]
            lines += [line for each in here if not each.use for line in row(each)]
            lines += [":::::", "", f"*Letters*: {legend(here, chapter.title, common, own)}", ""]
        container = nodes.Element()
        self.state.nested_parse(StringList(lines, "cheatsheet"), self.content_offset, container, match_titles=True)
        return container.children


def row(each: theory.Formula) -> list[str]:
    """A formula as a row of MyST's list-table: title, function and derivation beside the equation."""
    named = [f"* - {{ledger-title}}`{each.name}`", "", f"    `{each.name}` · {derivation(each)}"]
    return [*named, f"  - $${each.equation}$$"]


def legend(known: Iterable[theory.Formula], title: str, common: Letters, own: dict[str, Letters]) -> str:
    """The letters of some formulas of one chapter with their meanings, its own first."""
    used = letters_of(" ".join(each.equation for each in known))
    here = [(letter, meaning) for letter, meaning in own.get(title, ()) if letters_of(letter) & used]
    taken = {each for letter, _ in own.get(title, ()) for each in letters_of(letter)}
    here += [(letter, meaning) for letter, meaning in common if letters_of(letter) & used - taken]
    return "; ".join(f"{letter} {meaning}" for letter, meaning in here) + "."


def derivation(each: theory.Formula) -> str:
    """A link to where the formula is derived, as MyST: a theorem, an equation, or a section of its chapter."""
    if each.label.startswith("eq-"):
        return f"eq. {{eq}}`{each.label}`"
    if each.label.startswith(("thm-", "prop-", "cor-")):
        return f"{{prf:ref}}`{each.label}`"
    return f"[]({each.chapter}.ipynb#{each.label or 'the-derivation'})"


def letters(page: str) -> tuple[list[tuple[str, str]], dict[str, list[tuple[str, str]]]]:
    """The letters of the whole book, and those of single chapters by the chapter's name, each with its meaning."""
    general, chapters = page.split("## Letters of one chapter")
    common = [(cells[0], cells[1]) for cells in rows(general) if cells[0].startswith("$")]
    own: dict[str, list[tuple[str, str]]] = {}
    for chapter, letter, meaning in (cells for cells in rows(chapters.split("\n## ")[0]) if len(cells) == 3):
        own.setdefault(chapter, []).append((letter, meaning))
    return common, own


def rows(text: str) -> Iterator[list[str]]:
    """The cells of each row of the list-tables in a text, without line breaks."""
    for row in _ROW.findall(text):
        yield [" ".join(cell.split()) for cell in re.split(r"^  - ", row, flags=re.MULTILINE)]


def letters_of(formula: str) -> set[str]:
    """The letters in LaTeX, commands for Greek ones among them; words and names of functions are none."""
    bare = re.sub(r"\\(?:text|mathrm|operatorname)\{[^}]*\}|\\(?:begin|end)\{[^}]*\}", " ", formula)
    greek = re.findall(r"\\(?:alpha|beta|Psi|Phi|rho|delta|varphi|lambda|nu|Omega)(?![a-z])", bare)
    return {*greek, *re.findall(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", " ", bare))}


def setup(app: Sphinx) -> dict[str, bool]:
    """Make the directive known."""
    app.add_directive("cheatsheet", CheatSheet)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
