"""Words of learners in files of others: every text is bounded and made harmless for the format that it goes into.

Nothing that a learner chose (a name, an exception, what was printed) may become a heading, a link, an image, a tag, a
formula of a spreadsheet, an escape sequence of a terminal or a command to the CI system that reads the log.
"""

from __future__ import annotations

import re

MAX_NAME = 80  # characters of a learner's name that are shown
MAX_MESSAGE = 2000  # characters of one message
MAX_PRINTED = 4000  # characters of what a function printed

_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?)")
# Controls (but tab and line end), halves of characters, what is no character, and marks that turn text around.
_HARMFUL = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff"
    "\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff]"
)
# What Markdown could take for structure, wherever it stands in a line: entities, tags, code, emphasis (an underscore
# inside of a word is none), links and footnotes (by the bracket that closes their text), headings, cells, mathematics,
# people, addresses.
_STRUCTURE = re.compile(
    r"[&<>`*#|~\\$@]|(?<![^\W_])_|_(?![^\W_])|\](?=\s*[\[(:])|\[(?=\^)|:(?=/)|(?<=\bwww)\.", re.IGNORECASE
)
# How a log talks to the CI system that keeps it: `::error title=…::` at the start of a line (GitHub), `##[group]` and
# `##vso[…]` anywhere in one (GitHub, Azure), `##teamcity[…]`.
_COMMAND = re.compile(r"^(\s*:)(?=:)|(#)(?=#)", re.MULTILINE)
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


class Markdown(str):
    """Text that is Markdown already, in which everything that a learner chose is harmless."""


def clean(text: str, limit: int = MAX_MESSAGE) -> str:
    """`text` without control characters and the like, lines ended by ``\\n``, cut to `limit` characters."""
    text = _ANSI.sub("", text[: 4 * limit]).replace("\r\n", "\n").replace("\r", "\n")
    text = _HARMFUL.sub("�", text)
    return text if len(text) <= limit else text[:limit] + "…"


def one_line(text: str, limit: int = MAX_MESSAGE) -> str:
    """`text` cleaned, in a single line."""
    return " ".join(clean(text, limit).split())


def log_lines(text: str, limit: int = 20 * MAX_MESSAGE) -> str:
    """`text` for a terminal or the log of a CI system, line by line: no line of it is a command to that system."""
    return _COMMAND.sub(lambda found: f"{found[0]} ", clean(text, limit))


def markdown(text: str, limit: int = MAX_MESSAGE) -> Markdown:
    """`text` as one line of Markdown in which nothing has a meaning: what could have one is written as an entity."""
    return _escaped(one_line(text, limit))


def prose(text: str) -> Markdown:
    """`text` as one line of Markdown in which only what stands between two backquotes is set, as code.

    For running text, not for the cells of a table, where a ``|`` inside of code would end the cell.
    """
    text = one_line(text)
    parts = text.split("`")
    if len(parts) % 2 == 0 or "" in parts[1:-1]:  # backquotes without a partner, or side by side
        return _escaped(text)
    return Markdown("".join(f"`{part}`" if index % 2 else _escaped(part) for index, part in enumerate(parts)))


def _escaped(text: str) -> Markdown:
    return Markdown(_STRUCTURE.sub(lambda found: f"&#{ord(found[0])};", text))


def fenced(text: str) -> Markdown:
    """`text` as a fenced block, the fence longer than every row of backquotes in it."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return Markdown(f"{fence}text\n{text}\n{fence}")


def cell(text: str) -> str:
    """`text` as a cell of a CSV file that no spreadsheet takes for a formula."""
    text = one_line(text)
    return f"'{text}" if text.startswith(_FORMULA) else text


def bar(share: float, width: int = 10) -> str:
    """A share from 0 to 1 as a bar of `width` blocks; full and empty only where it is exactly that."""
    blocks = min(max(round(share * width), share > 0), width - (share < 1))
    return "█" * blocks + "░" * (width - blocks)


def percent(points: float, max_points: float) -> float:
    """Points in percent, rounded down to a tenth: 100 means every point."""
    return int(1000 * points / max_points) / 10 if max_points else 0.0


def duration(seconds: float) -> str:
    """Seconds in words: ``"0.4 s"``, ``"12 s"``, ``"3 min 20 s"``, ``"1 h 5 min"``."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"
