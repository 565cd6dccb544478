"""Formulas as KaTeX, vendored: a math renderer for Sphinx that needs no network and a quarter of MathJax's weight.

Sphinx numbers the equations and resolves references to them; the page carries the LaTeX, and ``katex_page.js``
typesets it when the page opens. Without JavaScript the reader sees the LaTeX.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.math import get_node_equation_number

ASSETS = Path(__file__).parent.parent / "_assets"


def visit_inline(translator: Any, node: nodes.math) -> None:
    """Write ``$...$``."""
    text = translator.encode(node.astext())
    translator.body.append(translator.starttag(node, "span", "", CLASS="math inline notranslate nohighlight"))
    translator.body.append(rf"\({text}\)</span>")
    raise nodes.SkipNode


def visit_block(translator: Any, node: nodes.math_block) -> None:
    """Write ``$$...$$`` with its number, if it has one."""
    number = get_node_equation_number(translator, node) if node["number"] else ""
    translator.body.append(translator.starttag(node, "div", CLASS="math block notranslate nohighlight"))
    if number:
        translator.body.append(f'<span class="eqno">({number})')
        translator.add_permalink_ref(node, "Link to this equation")
        translator.body.append("</span>")
    translator.body.append(rf'<div class="tex">\[{translator.encode(display(node.astext()))}\]</div></div>')
    raise nodes.SkipNode


def display(latex: str) -> str:
    """`latex` as one display: Sphinx gives the number, so environments that would number by themselves do not."""
    latex = re.sub(r"(\\(?:begin|end)\{(?:align|gather|equation|alignat|multline))\}", r"\1*}", latex.strip())
    if r"\\" in latex and r"\begin" not in latex:
        return rf"\begin{{split}}{latex}\end{{split}}"
    return latex


def install(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """Add KaTeX to a page that has formulas, and to no other."""
    body = str(context.get("body", "")) + str(context.get("title", ""))
    if 'class="math ' not in body:
        return
    app.add_css_file("katex/katex.min.css")
    app.add_js_file(None, body=f"const katexMacros = {json.dumps(app.config.katex_macros)};")
    app.add_js_file("katex/katex.min.js", loading_method="defer")
    app.add_js_file("katex_page.js", loading_method="defer")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the renderer under the name ``katex``."""
    app.add_config_value("katex_macros", {}, "html")
    app.add_html_math_renderer("katex", (visit_inline, None), (visit_block, None))
    app.connect("builder-inited", lambda app: app.config.html_static_path.append(str(ASSETS)))
    app.connect("html-page-context", install)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
