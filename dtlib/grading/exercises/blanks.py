"""Exercises that nobody has begun, told from the text of a notebook alone: nothing has to run to know their verdict."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from . import bank

HANDED_OUT = bank.HERE / "handed_out.json"
_DEFINED = re.compile(r"^(?:async )?(?:def|class) (\w+)", re.M)


def told(notebooks: Iterable[str]) -> str:
    """The text of `HANDED_OUT`: by exercise the digest of its cell, in the `notebooks` that are handed out (JSON)."""
    cells = [cell for notebook in notebooks for cell in json.loads(notebook)["cells"] if cell["cell_type"] == "code"]
    own = (cell for cell in cells if re.fullmatch(r"[a-z_]+-\d+", cell["id"]))
    digests = {cell["id"].replace("-", "."): _digest("".join(cell["source"])) for cell in own}
    return json.dumps(digests) + "\n"


def is_untouched(exercise: str, cells: Sequence[tuple[str, str]]) -> bool:
    """Whether nobody has begun the exercise in a notebook of these code `cells`, (id, source) each.

    Then each cell with its id is as `dtlib release` made it, and no other cell holds a name that it defines: whoever
    answered in a cell of their own, or gave the function another value, has begun, and has to be run.
    """
    id = exercise.replace(".", "-")
    own = [source for each, source in cells if each == id]
    if not own or any(_digest(source) != _handed_out().get(exercise) for source in own):
        return False
    names = _DEFINED.findall(own[0])
    others = (_as_python_reads(source) for each, source in cells if each != id)
    return not any(name in source for source in others for name in names)


def is_handed_out(source: str) -> bool:
    """Whether a cell is that of some exercise as `dtlib release` made it."""
    return _digest(source) in _handed_out().values()


def _as_python_reads(source: str) -> str:
    """Other forms of letters as the plain ones that names get. One by one: of long texts the whole takes for ever."""
    return source if source.isascii() else "".join(unicodedata.normalize("NFKC", each) for each in source)


def _digest(source: str) -> str:
    """The same for what editors change unasked: blanks at the ends of lines, and empty lines around the text."""
    lines = "\n".join(line.rstrip() for line in source.split("\n")).strip("\n")
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


@cache
def _handed_out() -> Mapping[str, str]:
    found: Mapping[str, str] = json.loads(HANDED_OUT.read_text("utf-8"))
    return found
