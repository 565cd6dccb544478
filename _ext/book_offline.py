"""Make the finished pages light and self-contained.

The theme ships 1.5 MB of icons as a script, although its style sheet has the same icons as a web font; it loads the
search index on every page, although only the search page searches; and its style sheet is mostly rules for things
that no page has. When the HTML is written, this extension takes those out. What a page may load and how much it may
weigh is asserted in ``tests/book``.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterator
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import Any

import tinycss2
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

LARGE_SHEETS = ("styles/pydata-sphinx-theme.css", "sphinx-design.min.css", "mystnb.*.css")
UNUSED_FILES = (
    "scripts/fontawesome.js", "scripts/*.map", "styles/*.map", "vendor/fontawesome/webfonts/*.ttf",
    "locales", "images", "*webpack-macros.html",
)  # fmt: skip
SOURCE_MAP = re.compile(r"/[/*]# sourceMappingURL=\S+?(?:\s*\*/|$)", re.MULTILINE)
_SCRIPT = r'\s*<(?:script|link)\b[^>]*\b(?:src|href)="[^"]*{name}[^"]*"[^>]*>(?:</script>)?'
ICONS = re.compile(_SCRIPT.format(name=r"scripts/fontawesome\.js"))
TABS = re.compile(_SCRIPT.format(name=r"design-tabs\.js"))
MISNAMED = re.compile(
    r'(<summary) aria-label="Toggle hidden content"|(search-button-field[^>]*?) aria-label="Search"'
    r'|(<div) role="list"(?= class="citation-list")|(<div class="citation" id="\w+") role="doc-biblioentry"'
)
"""Names and roles of the theme that hide what stands there from who hears the page: the words of a fold and a button,
and the entries of the bibliography."""
SEARCH = re.compile(_SCRIPT.format(name=r"(?:searchtools|language_data|searchindex)\.js"))
CLASSES = re.compile(r'\bclass="([^"]*)"')
BASE_COLOR = re.compile(r'html\[data-theme="(\w+)"\] \.highlight \{[^}]*\bcolor: (#\w+)')
TOKEN_RULE = re.compile(r'html\[data-theme="(\w+)"\] \.highlight \.(\w+) \{([^}]*)\}')
STYLE = re.compile(r'\bstyle="([^"]*)"')
TAG = re.compile(r"<[a-zA-Z][^<>]*>")
TOKEN = re.compile(r'<span class="(\w{1,3})">([^<]*)</span>')
WORD = re.compile(r"-?[A-Za-z_][\w-]*")


def slim(app: Sphinx, exception: Exception | None) -> None:
    """Rewrite the pages and the style sheets of a finished HTML build."""
    if exception is not None or app.builder.format != "html":
        return
    out = Path(app.outdir)
    static = out / "_static"
    for pattern in UNUSED_FILES:
        for file in static.glob(pattern):
            shutil.rmtree(file) if file.is_dir() else file.unlink()
    colored = token_colors((static / "pygments.css").read_text("utf-8"))
    used: set[str] = set()
    for page in out.rglob("*.html"):
        html = page.read_text("utf-8")
        lighter = share_styles(plain(named(ICONS.sub("", html)), colored))
        if "sd-tab-set" not in html:
            lighter = TABS.sub("", lighter)
        if page != out / "search.html":
            lighter = SEARCH.sub("", lighter)
        if lighter != html:
            page.write_text(lighter, "utf-8")
        used.update(name for classes in CLASSES.findall(lighter) for name in classes.split())
    for file in [*static.rglob("*.js"), *static.rglob("*.css")]:
        text = file.read_text("utf-8")
        if SOURCE_MAP.search(text):
            file.write_text(SOURCE_MAP.sub("", text), "utf-8")
        if file.suffix == ".js":
            used.update(WORD.findall(text))
    for pattern in LARGE_SHEETS:
        for sheet in static.glob(pattern):
            sheet.write_text(purge(sheet.read_text("utf-8"), used), "utf-8")


def token_colors(css: str) -> set[str]:
    """The classes of code tokens that some theme shows in another way than the code around them."""
    usual = dict(BASE_COLOR.findall(css))
    if not usual:
        raise ExtensionError("pygments.css has no colours for the theme's light and dark modes")
    return {name for theme, name, rule in TOKEN_RULE.findall(css) if rule.strip() != f"color: {usual[theme]}"}


def named(html: str) -> str:
    """`html` without the names and roles that are wrong."""
    return MISNAMED.sub(lambda found: found[found.lastindex or 0], html)


def plain(html: str, colored: set[str]) -> str:
    """`html` without the spans around tokens of code that look like the code around them anyway."""
    return TOKEN.sub(lambda span: span[0] if span[1] in colored else span[2], html)


def share_styles(html: str) -> str:
    """`html` with style attributes that recur often written once, as classes."""
    counts = Counter(style for style in STYLE.findall(html) if len(style) > 24)
    names = {style: f"z{number}" for number, (style, count) in enumerate(counts.most_common(60)) if count > 4}
    if not names:
        return html

    def rename(tag: re.Match[str]) -> str:
        found = STYLE.search(tag[0])
        if found is None or found[1] not in names:
            return tag[0]
        name, rest = names[found[1]], tag[0].replace(f" {found[0]}", "", 1)
        if ' class="' in rest:
            return rest.replace(' class="', f' class="{name} ', 1)
        return re.sub(r"^<[\w:-]+", lambda start: f'{start[0]} class="{name}"', rest)

    rules = "".join(f".{name}{{{important(style)}}}" for style, name in names.items())
    return TAG.sub(rename, html).replace("</head>", f"<style>{rules}</style></head>", 1)


def important(style: str) -> str:
    """The declarations of a style attribute with the weight that an attribute has over a style sheet."""
    declarations = [part.strip() for part in unescape(style).split(";") if part.strip()]
    return ";".join(f"{part}!important" for part in declarations)


def purge(css: str, used: set[str]) -> str:
    """`css` without the rules whose every selector names a class that is not in `used`."""
    rules = tinycss2.parse_stylesheet(css, skip_comments=True, skip_whitespace=True)
    return tinycss2.serialize(list(_kept(rules, used)))


def _kept(rules: list[Any], used: set[str]) -> Iterator[Any]:
    for rule in rules:
        if rule.type == "qualified-rule":
            selectors = [part for part in _split(rule.prelude) if _classes(part) <= used]
            if not selectors:
                continue
            rule.prelude = _join(selectors)
        elif rule.type == "at-rule" and rule.content is not None and rule.at_keyword in ("media", "supports"):
            inside = tinycss2.parse_rule_list(rule.content, skip_comments=True, skip_whitespace=True)
            rule.content = list(_kept(inside, used))
            if not rule.content:
                continue
        yield rule


def _split(prelude: list[Any]) -> list[list[Any]]:
    """The selectors of a rule: the prelude cut at its commas."""
    parts: list[list[Any]] = [[]]
    for token in prelude:
        if token.type == "literal" and token.value == ",":
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _join(parts: list[list[Any]]) -> list[Any]:
    comma = tinycss2.parse_component_value_list(",")
    return [token for index, part in enumerate(parts) for token in [*(comma if index else []), *part]]


def _classes(selector: list[Any]) -> set[str]:
    """The classes that an element must have to match; what stands inside ``:not(...)`` and its like is left out."""
    return {
        after.value
        for dot, after in pairwise(selector)
        if dot.type == "literal" and dot.value == "." and after.type == "ident"
    }  # fmt: skip


def setup(app: Sphinx) -> dict[str, bool]:
    """Run when everything is written; accept a value that Jupyter Book sets for an extension we do not load."""
    app.add_config_value("comments_config", {}, "html")
    app.connect("build-finished", slim, priority=900)  # the theme writes its colours of code at 500
    return {"parallel_read_safe": True, "parallel_write_safe": True}
