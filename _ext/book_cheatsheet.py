"""Every formula of the book on one page, made from the registry and from the page on notation.

The directive ``{cheatsheet}`` becomes, for each chapter, a table of its formulas (what each one is, its equation, its
function) and a line with the letters that they use, as ``chapters/notation.md`` explains them. Thresholds come first.
A formula's title leads to where the chapter measures it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import book_ledger
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from dtlib import theory

CHAPTERS = {
    "memory": "memory", "collectives": "collectives", "dp": "data parallelism", "zero": "ZeRO",
    "activations": "activations", "tp": "tensor parallelism", "sp": "sequence parallelism",
    "cp": "context parallelism", "pp": "pipeline parallelism", "threed": "three dimensions",
}  # fmt: skip
"""What the page on notation calls the chapters, by stem, in the order of the book."""
_ROW = re.compile(r"^\* - (.+?)(?=^\* - |^```|\Z)", re.MULTILINE | re.DOTALL)


class CheatSheet(SphinxDirective):
    """``{cheatsheet}``: the formulas of all chapters, a section each."""

    def run(self) -> list[nodes.Node]:
        """Write the tables as MyST."""
        notation = Path(self.env.doc2path("chapters/notation"))
        self.env.note_dependency(str(notation))
        book_ledger.note(self.env)
        common, own = letters(notation.read_text("utf-8"))
        lines: list[str] = []
        for stem, title in CHAPTERS.items():
            known = dict(sorted(theory.formulas(stem).items(), key=lambda pair: not pair[1].threshold))
            lines += [f"## [{title[0].upper()}{title[1:]}]({stem}.ipynb)", ""]
            lines += [":::::{list-table}", ":class: cheatsheet", ":widths: 40 60", ""]
            for name, each in known.items():
                said = "**Threshold.** " if each.threshold else ""
                lines += [f"* - {said}{{ledger-title}}`{name}`", "", f"    `{name}`", f"  - $${each.equation}$$"]
            used = letters_of(" ".join(each.equation for each in known.values()))
            legend = [f"{letter} {meaning}" for letter, meaning in own.get(title, ())]
            taken = {each for letter, _ in own.get(title, ()) for each in letters_of(letter)}
            legend += [f"{letter} {meaning}" for letter, meaning in common if letters_of(letter) & used - taken]
            lines += [":::::", "", f"*Letters*: {'; '.join(legend)}.", ""]
        container = nodes.Element()
        self.state.nested_parse(StringList(lines, "cheatsheet"), self.content_offset, container, match_titles=True)
        return container.children


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
    greek = re.findall(r"\\(?:alpha|beta|Psi|Phi|rho|delta|varphi|nu|Omega)(?![a-z])", bare)
    return {*greek, *re.findall(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", " ", bare))}


def setup(app: Sphinx) -> dict[str, bool]:
    """Make the directive known."""
    app.add_directive("cheatsheet", CheatSheet)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
