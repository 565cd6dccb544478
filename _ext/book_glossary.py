"""The first mention of a glossary's term on a page leads to its entry, and shows it to whoever points at it.

Mentions count in running text: not in headings, captions, code, formulas, links, or the opening of a page. Words that
everyday speech has too (`EVERYDAY`) are not taken for terms. The preview is part of the page: it needs no script.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

GLOSSARY = "chapters/glossary"
WITHOUT = {GLOSSARY, "chapters/notation", "chapters/cheatsheet", "chapters/ledger", "chapters/bibliography"}
"""Pages that are tables or lists, where each mention would be the first."""
EVERYDAY = {"reduce", "unit", "group", "phase", "flush", "ledger", "schedule"}
SIGNS = {r"\times": "×", r"\alpha": "α", r"\beta": "β", r"\dots": "…"}
_NO_TEXT = (nodes.reference, nodes.literal, nodes.math, nodes.caption, nodes.title, nodes.raw, addnodes.pending_xref)


def entries(env: BuildEnvironment) -> dict[str, str]:
    """What the glossary says of each term, as plain text."""
    found = {}
    for item in env.get_doctree(GLOSSARY).findall(nodes.definition_list_item):
        said = item.next_node(nodes.definition).deepcopy()
        for citation in list(said.findall(addnodes.pending_xref)):
            citation.parent.remove(citation)
        for formula in list(said.findall(nodes.math)):
            formula.replace_self(nodes.Text(plain(formula.astext())))
        text = re.sub(r"\s+([.,;:])", r"\1", " ".join(said.astext().split()))
        found[item.next_node(nodes.term).astext()] = text
    return found


def plain(formula: str) -> str:
    """A short formula without LaTeX: signs for commands, no braces."""
    for command, sign in SIGNS.items():
        formula = formula.replace(command, sign)
    return re.sub(r"[{}$]", "", formula)


def mentions(document: nodes.document) -> Iterator[nodes.Text]:
    """The pieces of running text of a page, in order."""
    for paragraph in document.findall(nodes.paragraph):
        outside, inside = paragraph.parent, False
        while outside is not None and not inside:
            inside = "opening" in outside.get("classes", ())
            outside = outside.parent
        if inside:
            continue
        for text in paragraph.findall(nodes.Text):
            around = text.parent
            while around is not paragraph and not isinstance(around, _NO_TEXT):
                around = around.parent
            if around is paragraph:
                yield text


def pattern(terms: list[str]) -> re.Pattern[str]:
    """Any of the terms as a word of its own, with a plural's s; the longest that fits.

    A sentence may begin with a term. A name that has capitals of its own (ZeRO) is meant only where it is so written:
    *zero* is a number.
    """
    longest_first = sorted(terms, key=len, reverse=True)
    any_case = [re.escape(term) if term != term.lower() else f"(?i:{re.escape(term)})" for term in longest_first]
    return re.compile(rf"(?<![\w–-])({'|'.join(any_case)})(?:s|es)?(?![\w–-])")


def link(app: Sphinx, document: nodes.document, docname: str) -> None:
    """Make links of the first mentions on a page."""
    places = {
        name.lower(): place for (kind, name), place in app.env.domaindata["std"]["objects"].items() if kind == "term"
    }
    if docname in WITHOUT or GLOSSARY not in app.env.found_docs:
        return
    said = entries(app.env)
    written = {term.lower(): term for term in said}
    open_terms = {term for term in said if term.lower() in places and term not in EVERYDAY}
    for text in list(mentions(document)):
        if not open_terms:
            return
        kept, at = [], 0
        for match in pattern(sorted(open_terms)).finditer(text):
            term = written[match[1].lower()]
            if term not in open_terms:
                continue  # twice in one piece
            open_terms.remove(term)
            page, target = places[term.lower()]
            uri = f"{app.builder.get_relative_uri(docname, page)}#{target}"
            opening = f'<a class="term" href="{uri}" data-says="{html.escape(said[term])}">'
            kept += [nodes.Text(text[at : match.start()]), nodes.raw("", opening, format="html")]
            kept += [nodes.Text(match[0]), nodes.raw("", "</a>", format="html")]
            at = match.end()
        if kept:
            text.parent.replace(text, [*kept, nodes.Text(text[at:])])


def setup(app: Sphinx) -> dict[str, bool]:
    """Link each page when the references of others have been resolved."""
    app.connect("doctree-resolved", link, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
