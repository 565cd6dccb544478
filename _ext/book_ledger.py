"""The ledger in the book: pages measure into a file of this build, and one page shows what they found.

- When a notebook is executed, ``DTLIB_LEDGER`` names the build's ledger and ``DTLIB_WHERE`` the page.
- ``DTLIB_STATIC`` tells the figures that there will be no kernel behind the page.
- When the library has changed since the last build, or the last build did not end well, every notebook is executed
  again and the ledger starts anew. (Sphinx alone would call a page with a failed cell up to date.)
- The directive ``{ledger}`` becomes a table when all notebooks have run; it leads to the first row of a formula on each
  page that measured it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform
from sphinx.util.docutils import SphinxDirective

from dtlib import course, theory
from dtlib.lab import ledger
from dtlib.lab.row import format_ratio

COLUMNS = ("title", "evidence", "where", "ratio")
FORMULA = re.compile(r'data-formula="([^"]+)"')


class mark(nodes.Inline, nodes.Element):
    """Where a formula's evidence will stand; attributes ``formula`` and ``column``."""


class total(nodes.General, nodes.Element):
    """Where the sentence of totals will stand."""


class Anchors(SphinxTransform):
    """The first comparison of each formula on a page can be linked to, and so can each formula in the ledger."""

    default_priority = 200

    def apply(self, **options: Any) -> None:
        """Give the rows their ids, and remember which ones there are."""
        found: set[str] = set()
        for raw in list(self.document.findall(nodes.raw)):
            for name in FORMULA.findall(raw.astext()):
                if name not in found:
                    found.add(name)
                    marked = f'id="{anchor(name)}" data-formula="{name}"'
                    raw[:] = [nodes.Text(raw.astext().replace(f'data-formula="{name}"', marked, 1))]
        for table in self.document.findall(lambda node: isinstance(node, nodes.table) and "ledger" in node["classes"]):
            for name in filter(lambda each: each.astext() in theory.formulas(), list(table.findall(nodes.literal))):
                place = f"formula-{dashed(name.astext())}"
                name.replace_self(nodes.reference("", "", name.deepcopy(), refid=place, ids=[place], internal=True))
        anchors = getattr(self.env, "book_ledger_anchors", {})
        self.env.book_ledger_anchors = anchors | {self.env.docname: found}


def anchor(formula: str) -> str:
    """The id of a formula's first comparison on a page."""
    return f"measured-{dashed(formula)}"


def dashed(formula: str) -> str:
    """The name of a formula as ids have it. Addresses elsewhere rest on it."""
    return formula.replace(".", "-").replace("_", "-")


class LedgerDirective(SphinxDirective):
    """``{ledger}``: the sentence of totals; ``{ledger} chapters``: the formulas and the evidence of this build.

    The name of a formula in this table is its permanent address: ``chapters/ledger.html#formula-zero-…``. What the
    registry knows is written now; what was found is filled in when all notebooks have run.
    """

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Write a section and a MyST list-table for each chapter, with marks for what is not known yet."""
        note(self.env)
        if not self.arguments:
            return [total()]
        if self.arguments != ["chapters"]:
            raise self.error(f"the argument must be 'chapters' or left out, not {self.arguments[0]!r}")
        lines = []
        for chapter in filter(lambda each: theory.formulas(each.stem), course.CHAPTERS):
            lines += [f"## {chapter.heading}", "", ":::::{list-table}", ":header-rows: 1", ":class: ledger"]
            lines += [":widths: 46 17 14 11 12", ""]
            lines += ["* - formula", "  - source", "  - evidence", "  - on", "  - worst ratio"]
            for name, known in theory.formulas(chapter.stem).items():
                lines += [f"* - {known.title}", "", f"    `{name}`"]
                lines += ["", f"    $${known.equation}$$"] if known.equation else []
                lines += ["", f"  - {cite(known.source)}"]
                lines += [f"  - {{ledger-{column}}}`{name}`" for column in COLUMNS[1:]]
            lines += [":::::", ""]
        container = nodes.Element()
        self.state.nested_parse(StringList(lines, "ledger"), self.content_offset, container, match_titles=True)
        return container.children


def note(env: BuildEnvironment) -> None:
    """Remember that the page being read shows what others measure: it is written again in every build."""
    env.book_ledger_pages = {*getattr(env, "book_ledger_pages", ()), env.docname}  # type: ignore[attr-defined]


def cite(source: str) -> str:
    """The source as MyST: citations for keys of the bibliography, else the words as they are."""
    if source == "derived here":
        return source
    return f"{{cite:t}}`{source}`"


def role(column: str) -> Any:
    """The role that marks one cell of the table."""

    def make(name: str, rawtext: str, text: str, *_: Any, **__: Any) -> tuple[list[nodes.Node], list[Any]]:
        return [mark(formula=text, column=column)], []

    return make


def path(app: Sphinx) -> Path:
    """The ledger of this build, beside the HTML."""
    return Path(app.outdir).parent / "ledger.jsonl"


def prepare(app: Sphinx) -> None:
    """Tell the kernels of this build where to write, and that their pages are static."""
    os.environ["DTLIB_LEDGER"] = str(path(app))
    os.environ["DTLIB_STATIC"] = "1"
    # A profile of this build's own: no start-up file of the reader's runs in the pages, and the kernel keeps its
    # remarks about transport encryption on one machine to itself.
    profile = path(app).parent / ".ipython" / "profile_default"
    profile.mkdir(parents=True, exist_ok=True)
    (profile / "ipython_kernel_config.py").write_text("c.IPKernelApp.log_level = 40\n", "utf-8")
    os.environ["IPYTHONDIR"] = str(profile.parent)


def unfinished(app: Sphinx) -> Path:
    """A file that is there from the start of a build until it ended without a warning."""
    return path(app).parent / "unfinished"


def finish(app: Sphinx, exception: Exception | None) -> None:
    """Forget that this build was unfinished, if it went well."""
    if exception is None and app._warncount == 0:
        unfinished(app).unlink(missing_ok=True)


def fingerprint(root: Path) -> str:
    """A hash of everything under ``dtlib/`` that a page can depend on."""
    digest = hashlib.sha256()
    for file in sorted((root / "dtlib").rglob("*")):
        if file.is_file() and file.suffix in {".py", ".js", ".css", ".txt"}:
            digest.update(file.relative_to(root).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()


def outdated(app: Sphinx, env: BuildEnvironment, added: set[str], changed: set[str], removed: set[str]) -> set[str]:
    """All pages, when the library is not the one that the last build ran."""
    now = fingerprint(Path(app.srcdir))
    same, env.book_library = getattr(env, "book_library", "") == now, now  # type: ignore[attr-defined]
    sound = path(app).exists() and not unfinished(app).exists()
    unfinished(app).touch()
    if same and sound:
        return set()
    path(app).unlink(missing_ok=True)
    return set(env.found_docs)


def forget(app: Sphinx, env: BuildEnvironment, docnames: list[str]) -> None:
    """Drop what older versions of these pages measured, and pages that are gone."""
    if not path(app).exists():
        return
    lines, still = path(app).read_text("utf-8").splitlines(keepends=True), set(env.found_docs).difference(docnames)
    path(app).write_text("".join(line for line in lines if json.loads(line)["where"] in still), "utf-8")


def announce(app: Sphinx, docname: str, source: list[str]) -> None:
    """Name the page for a kernel that myst-nb starts itself."""
    os.environ["DTLIB_WHERE"] = docname


def refresh(app: Sphinx, env: BuildEnvironment) -> Iterator[str]:
    """Write the ledger's page again in every build."""
    yield from getattr(env, "book_ledger_pages", ())


def fill(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Put what was found in the place of the marks."""
    marks, totals = list(doctree.findall(mark)), list(doctree.findall(total))
    if not marks and not totals:
        return
    coverage = ledger.coverage(path(app))
    entries = {entry.formula.name: entry for entry in coverage.entries}
    for each in marks:
        each.replace_self(cell(app, docname, entries[each["formula"]], each["column"]))
    for place in totals:
        place.replace_self(nodes.paragraph("", str(coverage)))


def cell(app: Sphinx, docname: str, entry: ledger.Entry, column: str) -> list[nodes.Node]:
    """One cell: the formula's title, the evidence and its methods, the pages, or the ratio furthest from one."""
    if column == "title":
        chapter = f"chapters/{entry.formula.chapter}"
        page = chapter if chapter in entry.where else next(iter(entry.where), None)
        text = nodes.Text(entry.formula.title)
        return [link(app, docname, page, entry, text) if page in app.env.found_docs else text]
    if column == "evidence":
        if entry.evidence is None:
            return [nodes.strong("", "none")]
        return [nodes.Text(f"{entry.evidence}: {', '.join(entry.by)}")]
    if column == "ratio":
        ratio = "–" if entry.worst_ratio is None else format_ratio(entry.worst_ratio)
        return [nodes.Text(ratio if entry.asserted or entry.worst_ratio is None else f"{ratio} (shown)")]
    if not entry.where:
        return [nodes.Text("–")]
    found: list[nodes.Node] = []
    for page in entry.where:
        if found:
            found.append(nodes.Text(", "))
        text = nodes.Text(page.rsplit("/", 1)[-1])
        found.append(link(app, docname, page, entry, text) if page in app.env.found_docs else nodes.Text(page))
    return found


def link(app: Sphinx, docname: str, page: str, entry: ledger.Entry, text: nodes.Text) -> nodes.Node:
    """A link to what the page says of the formula."""
    name = entry.formula.name
    shown = name in app.env.book_ledger_anchors.get(page, ())  # type: ignore[attr-defined]
    target = app.builder.get_relative_uri(docname, page) + (f"#{anchor(name)}" if shown else "")
    return nodes.reference("", "", text, refuri=target, internal=True)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the steps above."""
    app.add_transform(Anchors)
    app.add_node(mark)
    app.add_node(total)
    app.add_directive("ledger", LedgerDirective)
    for column in COLUMNS:
        app.add_role(f"ledger-{column}", role(column))
    app.connect("builder-inited", prepare)
    app.connect("env-get-outdated", outdated)
    app.connect("env-before-read-docs", forget, priority=400)  # pages are executed at 500
    app.connect("source-read", announce)
    app.connect("env-get-updated", refresh)
    app.connect("doctree-resolved", fill)
    app.connect("build-finished", finish)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
