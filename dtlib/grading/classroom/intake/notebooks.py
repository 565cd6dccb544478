"""From the bytes of a notebook to its code cells and chapters, whatever the bytes are. Nothing of them is evaluated.

Everything but code is dropped while the JSON is read, and what may take long is counted before it is begun.

A notebook belongs to each chapter of which it has an exercise's cell, by id; without one, to each chapter of which it
defines a function; without one, to the chapter in its file name, if only to say what is wrong with it. A cell that
defines an exercise's function gets the exercise's id where no cell of the notebook has that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from dtlib.grading.exercises import catalogue
from dtlib.grading.exercises.blanks import is_handed_out
from dtlib.grading.sandbox.runner import Cell

from .folders import Refused
from .names import NOTEBOOK_SUFFIX

MAX_CODE_CHARS = 2 * 2**20  # of all cells
MAX_VALUES = 1_000_000  # each becomes an object of Python's: 20 MiB of them would take half a gigabyte
_KEPT = {"cells", "cell_type", "id", "source", "metadata", "nbgrader", "grade_id"}
_KEPT |= {"worksheets", "input"}  # of nbformat 2 and 3
_OTHER_FORMATS = {
    b"pk\x03\x04": "a zip archive",
    b"\x1f\x8b": "a compressed file",
    b"%pdf": "a PDF",
    b"<": "a web page, perhaps a preview of the notebook",
    b"version https://git-lfs": "a pointer of Git LFS",
}
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_GIVEN_ID = re.compile(r"setup|[a-z_]+-\d+(?:-check|-task)?")


class Content(NamedTuple):
    """What a notebook holds: code cells in order, ids of its other cells, and what a reader should be told."""

    cells: list[Cell]
    other_ids: set[str]
    notes: list[str]


def parse(data: bytes) -> Content:
    """The content of the notebook that `data` are, in nbformat 2 to 4. Raises `Refused` with the reason.

    A cell without an id of the course takes nbgrader's, where no other cell has that one: old formats have no ids, and
    some programs give new ones.
    """
    found = Content([], set(), [])
    cells = [cell for cell in _list_of_cells(_load(data)) if isinstance(cell, dict)]
    given = {id for id in map(_own_id, cells) if _GIVEN_ID.fullmatch(id)}
    for number, cell in enumerate(cells, 1):
        own, other = _own_id(cell), _id_of_metadata(cell)
        id = other if other not in given and own not in given and other else own
        if cell.get("cell_type") == "code":
            found.cells.append(Cell(id, _source(cell, number, found.notes)))
        elif id:
            found.other_ids.add(id)
    if sum(len(cell.source) for cell in found.cells) > MAX_CODE_CHARS:
        raise Refused(f"holds more than {MAX_CODE_CHARS} characters of code, which no exercise needs")
    return found


@cache
def known() -> dict[str, dict[str, str]]:
    """For each chapter the function of each exercise's cell, by the cell's id."""
    found: dict[str, dict[str, str]] = {}
    for exercise in catalogue.all_exercises().values():
        found.setdefault(exercise.id.partition(".")[0], {})[exercise.id.replace(".", "-")] = exercise.function
    return found


def stem_of_name(name: str) -> str:
    """The chapter in the name of a file, "" for none."""
    words = re.split(r"[\W_]+", NOTEBOOK_SUFFIX.sub("", name).casefold())
    return next((stem for stem in known() if stem in words), "")


class Chapter(NamedTuple):
    """What a notebook holds of a chapter: its cells, `answers` of which define a function that answers an exercise."""

    stem: str
    answers: int
    cells: list[Cell]


def chapters_of(content: Content, notes: list[str]) -> list[Chapter]:
    """The chapters that a notebook stands for; `Refused` for none. `notes` tells what is odd.

    An answer is a function that returns something, or in a cell without ``NotImplementedError``.
    """
    ids = [cell.id for cell in content.cells]
    pairs = [(cell, _bound(cell.source)) for cell in content.cells]
    anywhere = {name for _, names in pairs for name in names}
    answered = {name for cell, names in pairs for name in names if not _is_stub(cell.source, name)}
    stems = [stem for stem, exercises in known().items() if exercises.keys() & set(ids)]
    stems = stems or [stem for stem, exercises in known().items() if anywhere & set(exercises.values())]
    if not stems:
        what = "is of another course" if any(cell.source.strip() for cell in content.cells) else "holds no code"
        firsts = [next(iter(exercises.items())) for exercises in known().values()]
        such = " or ".join(f"`{id}` with `{function}`" for id, function in firsts[:2])
        raise Refused(f"{what}: it has no exercise of this one, such as {such}")
    found = []
    for stem in stems:
        exercises = known()[stem]
        for id in exercises:
            if ids.count(id) > 1:
                notes.append(f"{ids.count(id)} cells have the id `{id}`, and the last that answers counts")
            if id in content.other_ids and id not in ids:
                notes.append(f"cell `{id}` is no code cell, so what it holds does not count")
        # So the exercises of a notebook without ids, too, are kept from each other when they run.
        lacking = {function: id for id, function in exercises.items() if id not in ids}
        cells = []
        for cell, names in pairs:
            new = [lacking[name] for name, is_def in names.items() if is_def and name in lacking]
            cells.append(Cell(new[0], cell.source) if new and cell.id not in exercises else cell)
        found.append(Chapter(stem, len(answered & set(exercises.values())), cells))
    return found


@cache
def _binds() -> re.Pattern[str]:
    names = "|".join(function for exercises in known().values() for function in exercises.values())
    defined = rf"(?:async[ \t]++)?def[ \t]++(?P<defined>{names})\b"
    return re.compile(rf"^[ \t]*+(?:{defined}|(?P<assigned>{names})[ \t]*+=(?!=))", re.M)


def _is_stub(source: str, name: str) -> bool:
    """Whether nothing is returned where a cell still raises: many leave the line that raises below their answer."""
    if "NotImplementedError" not in source:
        return False
    if is_handed_out(source):
        return True
    head = re.search(rf"^[ \t]*+(?:async )?def {name}\b", source, re.M)
    body = re.split(r"\n(?=[^\s)#])", source[head.end() :], maxsplit=1)[0] if head else ""
    return not re.search(r"^[ \t]++(?:return|yield)\b", body, re.M)


def _bound(source: str) -> Mapping[str, bool]:
    """The functions of exercises that a cell binds, and whether it is with ``def``."""
    bound: dict[str, bool] = {}
    for match in _binds().finditer(source):
        name = match["defined"] or match["assigned"]
        bound[name] = bound.get(name, False) or bool(match["defined"])
    return bound


def _load(data: bytes) -> Any:
    start = data[:64].lstrip().lower()
    if not start and not data.strip():
        raise Refused("is empty")
    for mark, name in _OTHER_FORMATS.items():
        if start.startswith(mark):
            raise Refused(f"is {name}, not a notebook")
    if sum(map(data.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise Refused(f"holds more than {MAX_VALUES} values, which no notebook needs: clear its outputs")
    try:
        text = data.decode(json.detect_encoding(data))
    except UnicodeDecodeError:
        text = data.decode("latin-1")  # of an old editor's: that reads everything
    try:
        # No number matters, and a long one would take long.
        return json.loads(
            text, object_pairs_hook=_keep, parse_int=len, parse_float=len, parse_constant=len, strict=False
        )
    except RecursionError:
        raise Refused("is no notebook: its JSON is nested too deeply") from None
    except json.JSONDecodeError as error:
        if b"<<<<<<<" in data and b">>>>>>>" in data:
            raise Refused("holds marks of a merge conflict that is not resolved") from None
        why = f"{error.msg}, at line {error.lineno}, column {error.colno}"
        raise Refused(f"is no valid JSON ({why}), so it cannot be opened as a notebook") from None


def _keep(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value for key, value in pairs if key in _KEPT}


def _list_of_cells(notebook: Any) -> list[Any]:
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    if cells is None and isinstance(notebook, dict) and isinstance(notebook.get("worksheets"), list):
        sheets = [sheet.get("cells") for sheet in notebook["worksheets"] if isinstance(sheet, dict)]
        cells = [cell for sheet in sheets if isinstance(sheet, list) for cell in sheet]
    if not isinstance(cells, list):
        raise Refused("is JSON, but no notebook: it has no list of cells")
    return cells


def _own_id(cell: dict[str, Any]) -> str:
    value = cell.get("id")
    return value if isinstance(value, str) and _ID.fullmatch(value) else ""


def _id_of_metadata(cell: dict[str, Any]) -> str:
    if not isinstance(metadata := cell.get("metadata"), dict):
        return ""
    nbgrader = metadata.get("nbgrader")
    candidates = (nbgrader.get("grade_id") if isinstance(nbgrader, dict) else None, metadata.get("id"))
    return next((each for each in candidates if isinstance(each, str) and _GIVEN_ID.fullmatch(each)), "")


def _source(cell: dict[str, Any], number: int, notes: list[str]) -> str:
    value = cell.get("source", cell.get("input", ""))
    lines = value if isinstance(value, list) else [value]
    if not all(isinstance(line, str) for line in lines):
        notes.append(f"the source of cell {number} is no text, so it counts as empty")
        return ""
    source = "".join(lines).replace("\r\n", "\n").replace("\r", "\n")
    return source.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # lone surrogates cannot be written
