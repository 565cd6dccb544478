"""What IPython adds to Python: `%magics`, `!shell lines` and a trailing `?` are taken out, and no line number moves."""

from __future__ import annotations

import ast
import re
import warnings

_RUNS_PYTHON = ("time", "timeit", "capture", "prun", "memit", "mprun", "snakeviz")  # cell magics around Python code
_CELL_MAGIC = re.compile(r"\s*%%(\w*)")
_MAGIC = re.compile(
    r"(?P<indent>[ \t]*)(?:[%!?]|(?P<name>[A-Za-z_]\w*)[ \t]*=[ \t]*[%!]|[\w.\[\]]+\?{1,2}[ \t]*(?:#.*)?$)"
)
_MOST_TRIES = 20  # a cell of ten thousand shell lines is not parsed ten thousand times


def parse(source: str) -> ast.Module:
    """The syntax tree of a cell's `source`; a magic line counts as ``pass``, ``name = !command`` as ``name = None``.

    Lines that are Python stay Python: a line of a string that begins with ``%`` is none of IPython's. Raises
    ``SyntaxError`` for everything that cannot be parsed, also for null bytes and for code that is nested too deeply.
    """
    lines = _without_cell_magic(source.split("\n"))
    magics = [index for index, line in enumerate(lines) if _MAGIC.match(line)]
    for _ in range(_MOST_TRIES if magics else 0):
        try:
            return _parse("\n".join(lines))
        except SyntaxError as error:
            index = (error.lineno or 0) - 1
            if index not in magics:  # a real mistake, or one that a magic line further up or down brought about
                break
            _blank(lines, index)
            magics.remove(index)
    before = list(lines)
    for index in magics:
        _blank(lines, index)
    try:
        return _parse("\n".join(lines))
    except SyntaxError:
        return _parse("\n".join(before))


def _parse(source: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(source)
    except (RecursionError, MemoryError):
        raise SyntaxError("the code is too large or nested too deeply") from None
    except ValueError as error:  # null bytes, lone surrogates
        raise SyntaxError(str(error)) from None


def _without_cell_magic(lines: list[str]) -> list[str]:
    """`lines` without ``%%time`` and its like at the top; nothing is left of a cell in another language."""
    kept = list(lines)
    for index, line in enumerate(lines):
        magic = _CELL_MAGIC.match(line)
        if magic is None and line.strip():
            break
        if magic is not None and magic[1] not in _RUNS_PYTHON:
            return [""] * len(lines)
        kept[index] = ""
    return kept


def _blank(lines: list[str], index: int) -> None:
    magic = _MAGIC.match(lines[index])
    if magic is None:
        return
    goes_on = lines[index].endswith("\\")
    lines[index] = magic["indent"] + (f"{magic['name']} = None" if magic["name"] else "pass")
    while goes_on and index + 1 < len(lines):
        index += 1
        goes_on = lines[index].endswith("\\")
        lines[index] = ""
