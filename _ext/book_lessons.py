"""What a chapter has in the book beyond its cells: figures with numbers, and an opening that knows the page.

- A code cell with ``"mystnb": {"figure": {"caption": …, "label": …}}`` in its metadata has its pictures in one numbered
  figure, to which ``{numref}`` can point by the label. (MyST-NB puts *every* output of such a cell into a figure of its
  own, tables of checks too; a ``name`` would then be given out several times.)
- A quotation that begins with **In short.** becomes an admonition, and gets a line each: how long the page takes, its
  theorems and equations, its exercises. In JupyterLab it is the quotation alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util import logging
from sphinx_proof.nodes import corollary_node, proposition_node, theorem_node

from dtlib import theory

WORDS_A_MINUTE, LINES_A_MINUTE = 200, 10
"""Prose that is read, and visible code that is understood."""
OPENING = "In short."
STATEMENTS = (theorem_node, proposition_node, corollary_node)
FOLDED = {"hide-input", "hide-cell", "remove-input", "remove-cell"}
logger = logging.getLogger(__name__)


class Figures(SphinxTransform):
    """One numbered figure for each cell that has a caption, around its pictures and nothing else."""

    default_priority = 200  # before Sphinx counts figures, and collects labels

    def apply(self, **options: Any) -> None:
        """Mend the figures of each such cell."""
        for cell in list(self.document.findall(nodes.container)):
            metadata = cell.get("cell_metadata") or {}
            figure = metadata.get("mystnb", {}).get("figure", {})
            if "label" in figure and self.env.docname:
                self.mend(cell, figure["label"])

    def mend(self, cell: nodes.Element, label: str) -> None:
        """Take everything but pictures out of the cell's figures, and all pictures into the first."""
        pictures = []
        for figure in list(cell.findall(nodes.figure)):
            if any("dtlib-figure" in raw.astext() for raw in figure.findall(nodes.raw)):
                pictures.append(figure)
            else:
                figure.replace_self(shown(figure))
        if not pictures:
            logger.warning("the cell of figure %r shows no picture", label, location=cell)
            return
        first, *others = pictures
        for figure in others:
            for each in shown(figure):
                first.insert(len(shown(first)), each)
            figure.parent.remove(figure)
        first["names"].append(nodes.fully_normalize_name(label))
        self.document.note_explicit_target(first, first)


def shown(figure: nodes.figure) -> list[nodes.Node]:
    """What a figure shows: all but its caption."""
    return [each for each in figure.children if not isinstance(each, nodes.caption | nodes.legend)]


class Opening(SphinxTransform):
    """The first quotation of a page that begins with **In short.**, with what the page itself knows."""

    default_priority = 201

    def apply(self, **options: Any) -> None:
        """Replace the quotation."""
        for quote in list(self.document.findall(nodes.block_quote)):
            if quote.astext().startswith(OPENING):
                self.open(quote)
                return

    def open(self, quote: nodes.block_quote) -> None:
        """An admonition with the quotation's text, and a list of what is on the page."""
        strong = next(iter(quote.findall(nodes.strong)))
        following = strong.next_node(descend=False, siblings=True)
        strong.parent.remove(strong)
        if isinstance(following, nodes.Text):
            following.parent.replace(following, nodes.Text(following.lstrip()))
        box = nodes.admonition("", nodes.title("", OPENING.rstrip(".")), *quote.children, classes=["opening"])
        path = Path(self.env.doc2path(self.env.docname))
        items = [list(self.contents(path.stem)), list(self.exercises(path))]
        box += nodes.paragraph("", f"About {minutes(nbformat.read(path, as_version=4))} minutes to read.")
        box += nodes.bullet_list("", *(nodes.list_item("", nodes.paragraph("", "", *each)) for each in items if each))
        quote.replace_self(box)

    def contents(self, stem: str) -> Iterator[nodes.Node]:
        """Links to the theorems and equations of the page, and to the measurements of its formulas."""
        for theorem in self.document.findall(lambda node: isinstance(node, STATEMENTS) and node["title"]):
            yield nodes.reference("", "", *title_of(theorem), refid=theorem["ids"][0], internal=True)
            yield nodes.Text(" · ")
        labels = [each["label"] for each in self.document.findall(nodes.math_block) if each.get("label")]
        for number, label in enumerate(labels):
            yield nodes.Text("equations " if number == 0 else ", ")
            yield reference("math", "eq", label, f"({label})")
        known = theory.formulas(stem)
        if known:
            yield nodes.Text(f" · {len(known)} formulas in the " if labels else f"{len(known)} formulas in the ")
            yield reference("std", "doc", "/chapters/ledger", "ledger")

    def exercises(self, path: Path) -> Iterator[nodes.Node]:
        """The notebook of the chapter's exercises, and their titles, each at an address of its own that stays."""
        notebook = path.parents[1] / "exercises" / f"{path.stem}.ipynb"
        if not notebook.is_file():
            return
        yield addnodes.download_reference("", "Exercises", reftarget=f"/exercises/{notebook.name}", refexplicit=True)
        text = "\n".join(cell["source"] for cell in nbformat.read(notebook, as_version=4)["cells"])
        for first, (number, title) in enumerate(re.findall(r"^## (\d+)\. (.+)$", text, flags=re.MULTILINE)):
            yield nodes.Text(" · " if first else ": ")
            place = f"exercise-{path.stem}-{number}"
            yield nodes.reference("", title, refid=place, ids=[place], internal=True)


def title_of(theorem: nodes.Element) -> list[nodes.Node]:
    """The words and formulas of a theorem's title, without the brackets around them."""
    parts = [each.deepcopy() for each in theorem.next_node(nodes.title).children]
    for place, bare in (0, lambda text: text.lstrip().removeprefix("(")), (-1, lambda text: text.removesuffix(")")):
        parts[place] = nodes.Text(bare(parts[place].astext()))
    return parts


def reference(domain: str, kind: str, target: str, text: str) -> addnodes.pending_xref:
    """A link that Sphinx resolves when all pages are read."""
    link = addnodes.pending_xref("", refdomain=domain, reftype=kind, reftarget=target, refexplicit=True, refwarn=True)
    link += nodes.inline("", text)
    return link


def minutes(notebook: nbformat.NotebookNode) -> int:
    """Minutes to read a notebook: its words, and the lines of code that are not folded; in fives, five at least."""
    words = lines = 0
    for cell in notebook["cells"]:
        text = cell["source"]
        if cell["cell_type"] == "markdown":
            words += len(
                re.findall(r"[A-Za-z0-9][\w'’-]*", re.sub(r"\$\$.*?\$\$|\$[^$]*\$", "x", text, flags=re.DOTALL))
            )
        elif not FOLDED & set(cell["metadata"].get("tags", [])):
            lines += len(text.splitlines())
    return max(5, 5 * round((words / WORDS_A_MINUTE + lines / LINES_A_MINUTE) / 5))


def setup(app: Sphinx) -> dict[str, bool]:
    """Mend each page as it is read."""
    app.add_transform(Figures)
    app.add_transform(Opening)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
