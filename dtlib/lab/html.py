"""Small tables for the page."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


def table_html(head: Iterable[str], rows: Iterable[Iterable[str]], *, caption: str = "") -> str:
    """An HTML table of plain texts, numbers to the right, below a `caption` if there is one."""
    body = "".join(_row(cells, "td") for cells in rows)
    above = f'<caption style="caption-side:top;text-align:left">{escape(caption)}</caption>' if caption else ""
    return f'<table class="dataframe">{above}<thead>{_row(head, "th")}</thead><tbody>{body}</tbody></table>'


def _row(cells: Iterable[str], tag: str) -> str:
    style = "padding:.1rem .7rem;text-align:right"
    opened = f'<{tag} scope="col" style="{style}">' if tag == "th" else f'<{tag} style="{style}">'
    return "<tr>" + "".join(f"{opened}{escape(cell)}</{tag}>" for cell in cells) + "</tr>"
