"""From the bytes of a notebook to its code cells, whatever the bytes are. Nothing of them is evaluated, only read.

Everything but code is dropped while the JSON is read, so outputs of megabytes do not stay in memory.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

MAX_CELLS = 10_000
MAX_CELL_CHARS = 2**20
_MAX_BRACKETS = 1_000_000  # each becomes an object of Python's: 20 MiB of brackets would take half a gigabyte
_KEPT = {
    "cells",
    "worksheets",  # where nbformat 2 and 3 keep the cells
    "cell_type",
    "id",
    "source",
    "input",  # nbformat 2 and 3
    "metadata",
    "nbgrader",
    "grade_id",
}
_NOTHING: dict[str, Any] = {}
_OTHER_FORMATS = {
    b"PK\x03\x04": "a zip archive",
    b"\x1f\x8b": "a compressed file",
    b"%PDF": "a PDF",
    b"<!doctype html": "a web page, perhaps a preview of the notebook",
    b"<html": "a web page, perhaps a preview of the notebook",
    b"version https://git-lfs": "a pointer of Git LFS",
}
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_GIVEN_ID = re.compile(r"setup|[a-z_]+-\d+(?:-check|-task)?")
_KINDS = {dict: "an object", list: "a list", str: "a text", int: "a number", float: "a number", bool: "true or false"}


class NotANotebook(ValueError):
    """The bytes are no notebook; the text goes on after the name of the file, as in "is empty"."""


@dataclass(frozen=True)
class Cell:
    """A code cell: its id, "" where it has none, and its source with ``\\n`` at line ends."""

    id: str
    source: str


@dataclass(frozen=True)
class Content:
    """What a notebook holds: code cells in order, ids of its other cells, and what a reader should be told."""

    cells: tuple[Cell, ...]
    other_ids: frozenset[str]
    notes: tuple[str, ...]


def parse(data: bytes) -> Content:
    """The content of the notebook that `data` are, in nbformat 2 to 4. Raises `NotANotebook` with the reason.

    A cell without an id of the course takes nbgrader's, where no other cell has that one: old formats have no ids, and
    some programs give new ones.
    """
    notes: list[str] = []
    cells = _list_of_cells(_load(data, notes))
    if len(cells) > MAX_CELLS:
        raise NotANotebook(f"holds {len(cells)} cells, and at most {MAX_CELLS} are read")
    ids = _ids(cells)
    code: list[Cell] = []
    other_ids: set[str] = set()
    for number, (cell, id) in enumerate(zip(cells, ids, strict=True), 1):
        if not isinstance(cell, dict):
            notes.append(f"cell {number} is no cell but {_kind(cell)}")
        elif cell.get("cell_type") == "code":
            code.append(Cell(id, _source(cell, number, notes)))
        elif id:
            other_ids.add(id)
    return Content(tuple(code), frozenset(other_ids), tuple(notes))


def _load(data: bytes, notes: list[str]) -> Any:
    if not data.strip():
        raise NotANotebook("is empty")
    start = data[:64].lstrip().lower()
    for mark, name in _OTHER_FORMATS.items():
        if start.startswith(mark.lower()):
            raise NotANotebook(f"is {name}, not a notebook")
    if data.count(b"[") + data.count(b"{") > _MAX_BRACKETS:
        raise NotANotebook(f"holds more than {_MAX_BRACKETS} lists and objects, which no notebook needs")
    try:
        return json.loads(
            _text(data, notes),
            object_pairs_hook=_keep,
            parse_int=_zero,
            parse_float=_zero,
            parse_constant=_zero,
            strict=False,
        )
    except RecursionError:
        raise NotANotebook("is no notebook: its JSON is nested too deeply") from None
    except json.JSONDecodeError as error:
        if b"<<<<<<<" in data and b">>>>>>>" in data:
            raise NotANotebook("holds marks of a merge conflict that is not resolved") from None
        where = f"line {error.lineno}, column {error.colno}"
        raise NotANotebook(
            f"is no valid JSON ({error.msg}, at {where}), so it cannot be opened as a notebook"
        ) from None


def _text(data: bytes, notes: list[str]) -> str:
    encoding = json.detect_encoding(data)
    try:
        return data.decode(encoding)
    except UnicodeDecodeError:
        if not encoding.startswith("utf-8"):
            raise NotANotebook("is no text in any encoding that is known here") from None
        notes.append("it is not in UTF-8, and was read as Latin-1")
        return data.decode("latin-1")


def _keep(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value for key, value in pairs if key in _KEPT} or _NOTHING


def _zero(_: str) -> int:
    return 0  # no number matters here, and a long one would take long


def _list_of_cells(notebook: Any) -> list[Any]:
    if not isinstance(notebook, dict):
        raise NotANotebook(f"is JSON, but no notebook: {_kind(notebook)} where an object should be")
    cells = notebook.get("cells")
    if cells is None and isinstance(notebook.get("worksheets"), list):
        sheets = [sheet.get("cells") for sheet in notebook["worksheets"] if isinstance(sheet, dict)]
        cells = [cell for sheet in sheets if isinstance(sheet, list) for cell in sheet]
    if not isinstance(cells, list):
        raise NotANotebook("is JSON, but no notebook: it has no list of cells")
    return cells


def _ids(cells: list[Any]) -> list[str]:
    """The id of each cell, "" for none."""
    own = [_id(cell.get("id")) if isinstance(cell, dict) else "" for cell in cells]
    given = {id for id in own if _GIVEN_ID.fullmatch(id)}
    ids = []
    for cell, id in zip(cells, own, strict=True):
        instead = "" if id in given else _id_of_metadata(cell)
        ids.append(instead if instead and instead not in given else id)
    return ids


def _id_of_metadata(cell: Any) -> str:
    metadata = cell.get("metadata") if isinstance(cell, dict) else None
    if not isinstance(metadata, dict):
        return ""
    nbgrader = metadata.get("nbgrader")
    candidates = (nbgrader.get("grade_id") if isinstance(nbgrader, dict) else None, metadata.get("id"))
    return next((id for id in map(_id, candidates) if _GIVEN_ID.fullmatch(id)), "")


def _id(value: Any) -> str:
    return value if isinstance(value, str) and _ID.fullmatch(value) else ""


def _source(cell: dict[str, Any], number: int, notes: list[str]) -> str:
    value = cell.get("source", cell.get("input", ""))
    lines = value if isinstance(value, list) else [value]
    if not all(isinstance(line, str) for line in lines):
        notes.append(f"the source of cell {number} is no text, so it counts as empty")
        return ""
    source = "".join(lines)
    if len(source) > MAX_CELL_CHARS:
        notes.append(f"cell {number} holds {len(source)} characters of code; more than {MAX_CELL_CHARS} are not read")
        return ""
    source = source.replace("\r\n", "\n").replace("\r", "\n")
    return source.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # lone surrogates cannot be written


def _kind(value: Any) -> str:
    return "null" if value is None else _KINDS.get(type(value), "something else")
