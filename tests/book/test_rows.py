"""Rows of a page that hold one formula to several things say which is which: `lab.check(..., case="4 ranks")`."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from .test_pattern import LESSONS

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Check:
    """One call of `lab.check`, or of a `partial` of it: where, of which formula ("" where it varies), in a loop?"""

    cell: str
    formula: str
    looped: bool
    named: bool


def is_check(call: ast.Call, partials: dict[str, str]) -> bool:
    name = call.func
    return ast.unparse(name) == "lab.check" or (isinstance(name, ast.Name) and name.id in partials)


def partials_of(tree: ast.AST) -> dict[str, str]:
    """Names that stand for `lab.check` with some arguments, each with the formula that it has, or ""."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and "partial(lab.check" in ast.unparse(node.value):
            targets, values = [node.targets[0]], [node.value]
            if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                targets, values = node.targets[0].elts, node.value.elts
            for target, value in zip(targets, values, strict=True):
                if isinstance(target, ast.Name) and "partial(lab.check" in ast.unparse(value):
                    first = value.args[1] if isinstance(value, ast.Call) and len(value.args) > 1 else None
                    found[target.id] = first.value if isinstance(first, ast.Constant) else ""
    return found


def checks(cells: list[tuple[str, str]]) -> list[Check]:
    """The checks of a page, which is (name, source) of its code cells in order."""
    found, partials = [], {}
    for name, source in cells:
        tree = ast.parse(re.sub(r"^%", "#", source, flags=re.MULTILINE))
        partials |= partials_of(tree)
        loops = [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While | ast.comprehension)]
        inside = {id(each) for loop in loops for each in ast.walk(loop)}
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and is_check(call, partials):
                first = call.args[0] if call.args else None
                own = partials.get(ast.unparse(call.func), "")
                formula = first.value if isinstance(first, ast.Constant) and not own else own
                named = any(keyword.arg == "case" for keyword in call.keywords)
                found.append(Check(name, formula, id(call) in inside, named))
    return found


def alike(cells: list[tuple[str, str]]) -> list[str]:
    """Checks whose rows would look as if they were of one thing: in a loop or named twice, and without a case."""
    found = checks(cells)
    times = Counter(each.formula for each in found)
    return [
        f"{each.cell}: {each.formula}"
        for each in found
        if each.formula and not each.named and (each.looped or times[each.formula] > 1)
    ]


@pytest.mark.parametrize("stem", LESSONS)
def test_rows_that_are_alike_say_their_case(stem):
    page = json.loads((ROOT / "chapters" / f"{stem}.ipynb").read_text("utf-8"))
    assert alike([(c["id"], "".join(c["source"])) for c in page["cells"] if c["cell_type"] == "code"]) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('lab.check("a.b", theory=1, measured=1, by="wire")', []),
        ('for n in (1, 2):\n    lab.check("a.b", theory=n, measured=n, by="wire")', ["x: a.b"]),
        ('for n in (1, 2):\n    lab.check("a.b", theory=n, measured=n, by="wire", case=f"{n} ranks")', []),
        ('for name in "ab":\n    lab.check(name, theory=1, measured=1, by="wire")', []),
        ('show = partial(lab.check, by="clock")\nfor n in (1, 2):\n    show("a.b", theory=n, measured=n)', ["x: a.b"]),
        ('one = partial(lab.check, "a.b")\none(theory=1, measured=1)\none(theory=2, measured=2)', ["x: a.b"] * 2),
    ],
)
def test_a_row_without_its_case_is_found(source, found):
    assert alike([("x", source)]) == found
