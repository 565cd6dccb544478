"""Which top-level statements of a notebook an exercise depends on: what each one binds, changes and uses."""

from __future__ import annotations

import ast
import builtins
import dis
import re
import types
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

PRELUDE = {
    "np": "numpy",
    "torch": "torch",
    "dist": "torch.distributed",
    "lab": "dtlib.lab",
    "grading": "dtlib.grading",
}  # what the setup cell brings, and each exercise has even where that cell was deleted

_LOADS = {"LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"}
_CHANGES = {"append", "appendleft", "add", "clear", "discard", "extend", "extendleft", "insert", "pop", "popitem"}
_CHANGES |= {"popleft", "remove", "reverse", "setdefault", "sort", "update"}
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_IMPORTS = (ast.Import, ast.ImportFrom)
_ASSIGNMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign)
_DEFINED_IN_TEXT = re.compile(r"^[ \t]*+(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)|^(\w+)[ \t]*=(?!=)", re.M)


def compiled(nodes: Sequence[ast.stmt], file: str, flags: int = 0) -> types.CodeType:
    """Code of top-level statements, with the line numbers that they have. ``SyntaxError`` where it cannot be made."""
    try:
        module = ast.Module(body=list(nodes), type_ignores=[])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return compile(module, file, "exec", flags=flags, dont_inherit=True)
    except (RecursionError, MemoryError, ValueError) as error:
        raise SyntaxError(str(error) or "the code is too large or nested too deeply") from None


@dataclass(frozen=True, eq=False)
class Statement:
    """A top-level statement of the cell at `place` in the notebook."""

    node: ast.stmt
    place: int
    file: str
    flags: int

    @cached_property
    def code(self) -> types.CodeType | None:
        """Its code, None where it cannot be compiled (a ``return`` outside of a function)."""
        try:
            return compiled([self.node], self.file, self.flags)
        except SyntaxError:
            return None

    @cached_property
    def binds(self) -> frozenset[str]:
        """The names that it binds in the notebook; those of a star import are not known."""
        if self.code is None:
            return frozenset()
        return frozenset(step.argval for step in dis.get_instructions(self.code) if step.opname == "STORE_NAME")

    @cached_property
    def uses(self) -> frozenset[str]:
        """The names that it looks up while it runs, or that its functions look up when they are called."""
        codes = [] if self.code is None else list(_all(self.code))
        steps = (step for code in codes for step in dis.get_instructions(code))
        return frozenset(step.argval for step in steps if step.opname in _LOADS)

    @cached_property
    def changes(self) -> frozenset[str]:
        """The names whose object it fills: ``TABLE[key] = value`` and ``TABLE.append(value)``, never an attribute."""
        return frozenset(_changed(self.node))

    @cached_property
    def launches(self) -> bool:
        """Whether it starts ranks or a check, which belongs in the notebook alone: `lab.run`, `grading.check`."""
        return any(isinstance(node, ast.Call) and _is_launch(node.func) for node in _at_top(self.node))

    def calls(self, function: str) -> bool:
        """Whether it calls `function` as it runs, other than in the body of a function that it defines."""
        calls = (node.func for node in _at_top(self.node) if isinstance(node, ast.Call))
        return any(isinstance(called, ast.Name) and called.id == function for called in calls)

    @property
    def is_star_import(self) -> bool:
        """Whether it is ``from module import *``."""
        return isinstance(self.node, ast.ImportFrom) and self.node.names[0].name == "*"

    @property
    def is_import(self) -> bool:
        """Whether it is an import."""
        return isinstance(self.node, _IMPORTS)

    @property
    def is_definition(self) -> bool:
        """Whether it defines a function or a class."""
        return isinstance(self.node, _DEFINITIONS)

    @property
    def is_simple(self) -> bool:
        """Whether it only defines, imports or assigns."""
        return isinstance(self.node, (*_DEFINITIONS, *_IMPORTS, *_ASSIGNMENTS))


def is_stub(statement: Statement, function: str) -> bool:
    """Whether `statement` defines `function` with nothing in it, or with ``raise NotImplementedError`` alone."""
    node = statement.node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name != function:
        return False
    return all(_is_nothing(each) for each in node.body)


def is_stub_class(statement: Statement) -> bool:
    """Whether `statement` defines a class that has methods, and nothing in any of them."""
    body = statement.node.body if isinstance(statement.node, ast.ClassDef) else ()
    methods = [each for each in body if isinstance(each, ast.FunctionDef)]
    return bool(methods) and all(_is_nothing(line) for each in methods for line in each.body)


def needed(
    own: Sequence[Statement], shared: Sequence[Statement], of_others: Sequence[Statement], function: str
) -> list[Statement]:
    """What the `own` statements of an exercise need of the other cells, in notebook order.

    `shared` are the statements of cells that belong to no exercise, `of_others` those of other exercises. A name that
    stands in several cells is taken from those above the own cell, and only where none of them has it from below. From
    another exercise's cell it is taken last of all, so that no exercise spoils another: only what the own cell, the
    shared cells, Python and the prelude do not know, only definitions, imports and assignments, and of one cell.
    """
    place = own[0].place if own else 0
    in_shared, in_others = _Index(shared), _Index(each for each in of_others if each.is_simple)
    chosen = dict.fromkeys(each for each in shared if each.is_star_import)
    waiting = sorted(_open_names(own) | {name for each in chosen for name in each.uses})
    asked = {function}
    while waiting:
        name = waiting.pop()
        if name in asked:
            continue
        asked.add(name)
        for each in _sources(name, place, in_shared, in_others):
            if each not in chosen:
                chosen[each] = None
                waiting += sorted(each.uses - asked)
    return sorted(chosen, key=lambda each: (each.place, each.node.lineno, each.node.col_offset))


def defined_in_text(text: str) -> set[str]:
    """The names that the text of a cell seems to define, for a cell that cannot be parsed."""
    return {name for pair in _DEFINED_IN_TEXT.findall(text) for name in pair if name}


class _Index:
    """Statements by the names that they bind and by those that they change."""

    def __init__(self, statements: Iterable[Statement]) -> None:
        self.binding: dict[str, list[Statement]] = {}
        self.changing: dict[str, list[Statement]] = {}
        for each in statements:
            for name in each.binds:
                self.binding.setdefault(name, []).append(each)
            for name in each.changes:
                self.changing.setdefault(name, []).append(each)


def _sources(name: str, place: int, in_shared: _Index, in_others: _Index) -> list[Statement]:
    found = [each for each in in_shared.binding.get(name, ()) if each.is_import or name not in PRELUDE]
    changing = in_shared.changing.get(name, [])
    if not found and name not in PRELUDE and not hasattr(builtins, name):
        found = in_others.binding.get(name, [])
        where = [each.place for each in found]
        nearest = max((each for each in where if each < place), default=min(where, default=place))
        found = [each for each in found if each.place == nearest]
        changing = [each for each in in_others.changing.get(name, ()) if each.place == nearest]
    if all(each.is_import for each in found):
        changing = []  # nobody's `append` to a module
    above = any(each.place < place for each in found)
    return [each for each in (*found, *changing) if not above or each.place < place]


def _open_names(own: Sequence[Statement]) -> set[str]:
    """The names that the own cell looks up before it binds them itself, if it does."""
    bound: set[str] = set()
    wanted: set[str] = set()
    for each in own:
        wanted |= each.uses - bound
        bound |= each.binds if each.is_simple else set()  # an `if` may bind or not
    return wanted


def _all(code: types.CodeType) -> Iterator[types.CodeType]:
    waiting = [code]
    while waiting:
        code = waiting.pop()
        yield code
        waiting += [each for each in code.co_consts if isinstance(each, types.CodeType)]


def _at_top(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below `node` that run when it runs: the bodies of functions are left out."""
    waiting: list[ast.AST] = [node]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting += [*node.decorator_list, *node.args.defaults, *(each for each in node.args.kw_defaults if each)]
        elif not isinstance(node, ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def _changed(node: ast.AST) -> Iterator[str]:
    for each in _at_top(node):
        target: ast.AST | None = None
        if isinstance(each, ast.Subscript) and isinstance(each.ctx, ast.Store | ast.Del):
            target = each.value
        elif isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and each.func.attr in _CHANGES:
            target = each.func.value
        while isinstance(target, ast.Subscript):
            target = target.value
        if isinstance(target, ast.Name):
            yield target.id


def _is_launch(function: ast.AST) -> bool:
    return (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Name)
        and (function.value.id, function.attr) in (("lab", "run"), ("grading", "check"))
    )


def _is_nothing(node: ast.stmt) -> bool:
    if isinstance(node, ast.Raise):
        error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        return isinstance(error, ast.Name) and error.id == "NotImplementedError"
    if isinstance(node, ast.Return):
        return node.value is None or (isinstance(node.value, ast.Constant) and node.value.value is None)
    return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
