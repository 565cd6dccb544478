"""The shell of what a reader moves on a page without Python: a figure with its look, data and script inside."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

NO_SCRIPT = "<noscript><p>The choices need JavaScript; without it this is the first of them.</p></noscript>"
_serial = itertools.count(1)


def asset(name: str) -> str:
    """The text of a file that stands beside this module."""
    return files("dtlib.figures").joinpath(name).read_text("utf-8")


def identity_of(kind: str, told: str) -> str:
    """An ``id`` that no other figure of a page has."""
    return f"dtlib-{kind}-{hashlib.sha1(told.encode()).hexdigest()[:8]}-{next(_serial)}"


def figure(kind: str, body: str, data: Any, *, caption: str = "", identity: str | None = None, **numbers: float) -> str:
    """A figure that needs nothing else: `body`, the look in ``kind.css``, `data` as JSON, and ``kind.js``.

    The script finds its figure as ``root`` and the data as ``data``; ``@NAME@`` in it stands for a number of `numbers`.
    """
    told = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("</script", "<\\/script")
    identity = identity or identity_of(kind, told)
    script = asset("control.js").replace("@ID@", identity).replace("@SCRIPT@", asset(f"{kind}.js"))
    for name, number in numbers.items():
        script = script.replace(f"@{name.upper()}@", str(number))
    said = f"<figcaption><p>{escape(caption)}</p></figcaption>" if caption else ""
    return (
        f'<figure class="dtlib-{kind}" id="{identity}"><style>{asset(f"{kind}.css")}</style>{body}{said}'
        f'<script type="application/json">{told}</script><script>{script}</script></figure>'
    )


def select(name: str, label: str, options: Sequence[Any], chosen: Any) -> str:
    """A control to choose one of `options` with, once there is a script."""
    inside = "".join(_option(each, is_chosen=each == chosen) for each in options)
    return f'<label>{escape(label)} <select name="{escape(name)}" autocomplete="off" disabled>{inside}</select></label>'


def _option(value: Any, *, is_chosen: bool) -> str:
    words = f"{value:,}" if isinstance(value, int) else escape(str(value))
    return f'<option value="{escape(str(value))}"{" selected" * is_chosen}>{words}</option>'
