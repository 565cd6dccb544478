"""Makes the learner's function out of a notebook's cells, in the process that will call it.

An exercise is loaded alone. Its own cell runs in full: the cell with the exercise's id, or else the last cell that
defines the function. Of all other cells only those top-level statements run that the function depends on (see
`slices.needed`), so another cell that is broken, slow or hostile costs nobody else's points.
"""

from __future__ import annotations
import __future__

import ast
import dis
import importlib
import linecache
import re
import traceback
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .magics import parse
from .slices import PRELUDE, Statement, compiled, defined_in_text, is_stub, is_stub_class, needed

_OF_AN_EXERCISE = re.compile(r"[a-z_]+-\d+")
_CHECK = re.compile(r"[a-z_]+-\d+-check")
_MOST_SOURCE = 2**17  # characters of all cells but the own one: nobody writes more, and analysing it takes seconds
_skipped: dict[str, str] = {}  # of the last `load` in this process: a name, and why it is missing


class Unusable(Exception):
    """There is no function to call: `kind` is ``missing``, ``blank``, ``syntax`` or ``raised``, `text` says why.

    `line` shows the learner's line, "" where none is to blame.
    """

    def __init__(self, kind: str, text: str, line: str = "") -> None:
        super().__init__(f"{text}, in {line}" if line else text)
        self.kind = kind
        self.text = text
        self.line = line


class _Cell:
    """A code cell, parsed: `body` is None where `error` says why it cannot be."""

    def __init__(self, place: int, id: str, source: str, name: str, read: bool) -> None:
        self.place, self.id, self.name, self.file = place, id, name, f"<cell {name}>"
        self.source = source.replace("\r\n", "\n").replace("\r", "\n")
        self.body: list[ast.stmt] | None = None
        self.error: SyntaxError | None = None
        self.statements: list[Statement] = []
        if not read:
            self.error = SyntaxError("the code is too large")
            return
        lines = [line + "\n" for line in self.source.split("\n")]
        linecache.cache[self.file] = (len(self.source), None, lines, self.file)
        try:
            self.body = parse(self.source).body
        except SyntaxError as error:
            self.error = error

    def defines(self, function: str) -> bool:
        if self.body is None:
            return function in defined_in_text(self.source)
        return any(function in each.binds for each in self.statements)

    def answers(self, function: str) -> bool:
        """Whether its last definition of `function` is more than a stub; to import a function is not to answer."""
        last = self._last(function)
        if last is None or last.is_import or is_stub(last, function):
            return False
        return not any(is_stub_class(each) for each in self.statements if each.binds & last.uses)

    def writes(self, function: str) -> bool:
        """Whether it answers, and with a definition: ``f = None`` in the cell of another exercise means another `f`."""
        last = self._last(function)
        return last is not None and last.is_definition and self.answers(function)

    def _last(self, function: str) -> Statement | None:
        return next((each for each in reversed(self.statements) if function in each.binds), None)


def load(cells: Sequence[tuple[str, str]], cell_id: str, function: str) -> Callable[..., Any]:
    """The learner's `function` for the exercise whose cell has the id `cell_id`; `cells` are (id, source) in order.

    - The own cell is the last one with that id that answers; where none does (deleted, broken or still a stub), the
      last added cell that answers, wherever it stands; then the exercise's check and the cell of another exercise, if
      somebody typed the answer there; then what is left. In a cell, the last definition wins.
    - What it needs of other cells runs first, in notebook order. A statement there that raises is skipped, and
      `explain` knows it. Other cells called ``…-check``, `lab.run` and `grading.check` do not run.
    - `np`, `torch`, `dist`, `lab` and `grading` are there even without a set-up cell.
    - Lines of the own cell that try the function out below its last definition do not run (they would send what no
      task asks for), and what else raises there is skipped: the function stands.

    Raises `Unusable` where no function comes out of it. Tracebacks show the lines of ``<cell collectives-5>``.
    """
    _skipped.clear()
    parsed = _parse_all(cells, cell_id)
    own = _own_cell(parsed, cell_id, function)
    if own is None:
        raise Unusable("missing", _nowhere(parsed, cell_id, function))
    _refuse_syntax(own)
    shared, of_others = _rest(parsed, own, cell_id)
    namespace: dict[str, Any] = {"__name__": "__main__", "display": _ignore}
    before = needed(own.statements, shared, of_others, function)
    _bring(namespace, [*own.statements, *before])
    failed = [each for each in before if not _run_other(each, namespace, parsed)]
    _run_own(own, namespace, function)
    for each in failed:  # a helper below the own cell may need what the own cell defines
        if each.place > own.place:
            _run_other(each, namespace, parsed)
    return _found(namespace, own, function)


def explain(error: BaseException) -> str:
    """Why a name is missing, for a ``NameError`` of a function that `load` returned; "" for other errors."""
    name = getattr(error, "name", None) if isinstance(error, NameError) else None
    return _skipped.get(name, "") if isinstance(name, str) else ""


def is_blank(function: Any) -> bool:
    """Whether a function has nothing in it: it does no more than return None (``pass``, ``...``, a docstring)."""
    code = getattr(function, "__code__", None)
    if not isinstance(code, types.CodeType):
        return False
    nothing = {"RESUME", "NOP", "RETURN_CONST", "RETURN_VALUE", "LOAD_CONST", "CACHE", "COPY_FREE_VARS"}
    steps = list(dis.get_instructions(code))
    returns_none = all(step.argval is None for step in steps if step.opname in ("LOAD_CONST", "RETURN_CONST"))
    return returns_none and all(step.opname in nothing for step in steps)


def _parse_all(cells: Sequence[tuple[str, str]], cell_id: str) -> list[_Cell]:
    parsed: list[_Cell] = []
    names: set[str] = set()
    left = _MOST_SOURCE
    for place, (id, source) in enumerate(cells, 1):
        name = id if id and id not in names else f"{id} (number {place})" if id else f"number {place}"
        names.add(name)
        if id != cell_id:
            left -= len(source)
        parsed.append(_Cell(place, id, source, name, read=id == cell_id or left >= 0))
        if left < 0:  # this one is too large, not those below it
            left += len(source)
    flags = _future_flags(parsed)
    for cell in parsed:
        cell.statements = [Statement(node, cell.place, cell.file, flags) for node in cell.body or ()]
    return parsed


def _future_flags(cells: Iterable[_Cell]) -> int:
    flags = 0
    for node in (node for cell in cells for node in cell.body or ()):
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            features = (getattr(__future__, each.name, None) for each in node.names)
            flags |= sum({each.compiler_flag for each in features if isinstance(each, __future__._Feature)})
    return flags


def _own_cell(cells: Sequence[_Cell], cell_id: str, function: str) -> _Cell | None:
    by_id = [cell for cell in reversed(cells) if cell.id == cell_id]
    rest = [cell for cell in reversed(cells) if cell.id != cell_id and not _CHECK.fullmatch(cell.id)]
    shared = [cell for cell in rest if not _OF_AN_EXERCISE.fullmatch(cell.id)]
    answers = [cell for cell in (*by_id, *shared) if cell.answers(function)]
    of_others = sorted(cells, key=lambda cell: (cell.id != f"{cell_id}-check", -cell.place))
    answers += [cell for cell in of_others if cell.writes(function)]
    if answers:
        return answers[0]
    defines = [cell for cell in (*by_id, *rest) if cell.defines(function)]
    if defines:
        return defines[0]
    return next((cell for cell in by_id if cell.source.strip()), None)


def _nowhere(cells: Sequence[_Cell], cell_id: str, function: str) -> str:
    for cell in cells:
        if _CHECK.fullmatch(cell.id) and cell.defines(function):
            return f"only cell `{cell.name}` defines `{function}`, and checks do not run here"
    here = any(cell.id == cell_id for cell in cells)
    return f"no cell defines `{function}`" + ("" if here else f", and there is no cell `{cell_id}`")


def _refuse_syntax(own: _Cell) -> None:
    error = own.error
    if error is None:
        try:
            compiled(own.body or (), own.file, own.statements[0].flags if own.statements else 0)
            return
        except SyntaxError as late:
            error = late
    raise Unusable("syntax", f"the cell is no valid Python ({str(error.msg)[:200]})", _line(own, error.lineno))


def _rest(cells: Sequence[_Cell], own: _Cell, cell_id: str) -> tuple[list[Statement], list[Statement]]:
    shared: list[Statement] = []
    of_others: list[Statement] = []
    for cell in cells:
        if cell is own:
            continue
        if _CHECK.fullmatch(cell.id):
            for name in (name for each in cell.statements for name in each.binds):
                _skipped[name] = (
                    f"`{name}` is missing, because cell `{cell.name}` is a check, and checks do not run here"
                )
            continue
        (of_others if _OF_AN_EXERCISE.fullmatch(cell.id) else shared).extend(cell.statements)
        if cell.error is not None:
            for name in defined_in_text(cell.source):
                _skipped[name] = f"`{name}` is missing, because cell `{cell.name}` is no valid Python"
    return shared, of_others


def _bring(namespace: dict[str, Any], statements: Sequence[Statement]) -> None:
    """Import what the set-up cell brings, as far as `statements` use it."""
    used = {name for each in statements for name in each.uses}
    for name in PRELUDE.keys() & used:
        try:
            namespace[name] = importlib.import_module(PRELUDE[name])
        except ImportError as error:
            _skipped[name] = f"`{name}` is missing: {_told(error)}"


def _run_other(statement: Statement, namespace: dict[str, Any], cells: Sequence[_Cell]) -> bool:
    """Run a statement of another cell, and remember why the names that it binds are missing if it raises."""
    why = "starts processes of its own, which is for the notebook alone"
    try:
        if not statement.launches and statement.code is not None:
            brought = {} if statement.is_import else {name: namespace[name] for name in PRELUDE if name in namespace}
            exec(statement.code, namespace)
            namespace.update(brought)  # `np = torch = None` in a line that was needed for another name
            for name in statement.binds:
                _skipped.pop(name, None)
            return True
    except BaseException as error:
        why = f"raised {_told(error)}"
    number = statement.node.lineno
    where = f"line {number} of cell `{cells[statement.place - 1].name}`"
    for name in statement.binds - namespace.keys():
        _skipped[name] = f"`{name}` is missing, because {where} {why}"
    return False


def _run_own(own: _Cell, namespace: dict[str, Any], function: str) -> None:
    last = max((number for number, each in enumerate(own.statements) if function in each.binds), default=None)
    for number, statement in enumerate(own.statements):
        tries_it_out = statement.launches or (last is not None and number > last and statement.calls(function))
        if statement.code is None or (tries_it_out and function not in statement.binds):
            continue
        try:
            exec(statement.code, namespace)
        except Exception as error:
            if last is None or number <= last:
                raise _raised(error, own) from None
        except BaseException as error:
            raise _raised(error, own) from None


def _raised(error: BaseException, own: _Cell) -> Unusable:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == own.file]
    line = _line(own, frames[-1].lineno if frames else None)
    if isinstance(error, SystemExit):
        return Unusable("raised", "the cell called sys.exit, so its function was never called", line)
    why = explain(error)
    return Unusable("raised", f"the cell raised {_told(error)}" + (f" ({why})" if why else ""), line)


def _found(namespace: dict[str, Any], own: _Cell, function: str) -> Callable[..., Any]:
    if function not in namespace:
        raise Unusable("missing", f"cell `{own.name}` does not define `{function}`")
    found = namespace[function]
    if not callable(found):
        raise Unusable("missing", f"`{function}` is a {_type(found)}, and should be a function")
    if is_blank(found):
        raise Unusable("blank", f"`{function}` has no body yet")
    return found  # type: ignore[no-any-return]


def _line(own: _Cell, number: int | None) -> str:
    if not number:
        return f"cell `{own.name}`"
    source = linecache.getline(own.file, number).strip()[:200]
    return f"line {number} of cell `{own.name}`" + (f": `{source}`" if source else "")


def _told(error: BaseException) -> str:
    try:
        text = (str(error).strip().splitlines() or [""])[0][:300]
        return f"{_type(error)}: {text}" if text else _type(error)
    except BaseException:
        return "an exception whose text cannot be read"


def _type(value: Any) -> str:
    return str(type.__dict__["__name__"].__get__(type(value)))[:100]  # whatever its metaclass says


def _ignore(*values: Any, **options: Any) -> None:
    """Stands in for IPython's `display`."""
