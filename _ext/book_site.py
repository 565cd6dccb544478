"""What a page tells those who find it from outside: the version, and to search engines and previews what it is about.

The version of the package stands in the footer. Each page describes itself: a chapter by its opening, another by its
first paragraph. The address of the book is known only to whoever publishes it: the environment variable
``DTLIB_SITE_URL`` (set by the publishing workflow) adds canonical links and pictures for previews, which
sphinxext-opengraph draws. Without it a page names no address at all.
"""

from __future__ import annotations

import os
import re
from html import escape
from importlib import metadata
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.config import Config

CARD_MARK = "_static/mark.png"  #: the favicon; the pictures for previews take no SVG
MOST = 200  #: characters of a description
_NO_SENTENCE = (nodes.raw, nodes.footnote_reference)


def address() -> str:
    """Where the book is published, with a slash at its end; "" where nobody said."""
    told = os.environ.get("DTLIB_SITE_URL", "").strip()
    return f"{told.rstrip('/')}/" if told else ""


def configure(app: Sphinx, config: Config) -> None:
    """Tell Sphinx the version and, where it is known, the address."""
    config.version = config.release = metadata.version("dtlib-course")
    config.html_theme_options |= {"extra_footer": f"<p>Version {escape(config.release)}</p>"}
    if url := address():
        config.html_baseurl = config.ogp_site_url = url
        config.ogp_site_name = config.html_title
        config.ogp_social_cards = {"image_mini": CARD_MARK, "line_color": "#2a66ad"}


def description(document: nodes.document) -> str:
    """The first paragraphs of the opening, or of the page, up to `MOST` characters and a whole word."""
    openings = [each for each in document.findall(nodes.admonition) if "opening" in each.get("classes", ())]
    places = openings or [*document.findall(nodes.section)]
    said = ""
    for paragraph in (each for place in places for each in place.children if isinstance(each, nodes.paragraph)):
        copy = paragraph.deepcopy()
        for each in [*copy.findall(lambda node: isinstance(node, _NO_SENTENCE))]:
            each.parent.remove(each)
        for formula in [*copy.findall(nodes.math)]:
            formula.replace_self(nodes.Text(plain(formula.astext())))
        said = f"{said} {' '.join(copy.astext().split())}".strip()
        if len(said) >= MOST // 2:
            break
    return said if len(said) <= MOST else said[:MOST].rpartition(" ")[0].rstrip(",;:") + " …"


def plain(formula: str) -> str:
    """A short formula without LaTeX."""
    fractions = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"(\1)/\2 ", formula)
    return " ".join(re.sub(r"\\[a-zA-Z]+|[{}$\\]", "", fractions).split())


def describe(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """Add the description to the page's head, and to what a preview shows."""
    if doctree is None or not (said := description(doctree)):
        return
    context["metatags"] += f'\n<meta name="description" content="{escape(said)}">\n'
    own = {"og:description": escape(said), "ogp_description_length": "0"}  # what the extension finds is no sentence
    context["meta"] = {**(context["meta"] or {}), **own}


def setup(app: Sphinx) -> dict[str, bool]:
    """Describe each page before its preview is made."""
    app.connect("config-inited", configure, priority=400)
    app.connect("html-page-context", describe, priority=400)
    if address():
        app.setup_extension("sphinxext.opengraph")
    return {"parallel_read_safe": True, "parallel_write_safe": True}
