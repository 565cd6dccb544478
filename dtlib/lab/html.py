"""Small tables for the page."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


def table_html(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """An HTML table of plain texts, numbers to the right."""
    body = "".join(_row(cells, "td") for cells in rows)
    return f'<table class="dataframe"><thead>{_row(head, "th")}</thead><tbody>{body}</tbody></table>'


def _row(cells: Iterable[str], tag: str) -> str:
    style = "padding:.1rem .7rem;text-align:right"
    return "<tr>" + "".join(f'<{tag} style="{style}">{escape(cell)}</{tag}>' for cell in cells) + "</tr>"
