"""A formula that is 3 % off fails whatever is called measured: the code of the pages is run with all formulas off.

What moves along with the formula, because it is computed from it or from the same definition, still agrees: it is
found, and has to say what it is (`by="simulation"`, ``"derivation"``, ``"definition"``).
"""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dtlib import theory
from dtlib.lab import ledger

OFF = Path(__file__).parent / "off"
ROOT = Path(__file__).parents[2]
PAGES = sorted(page for page in (ROOT / "chapters").glob("*.ipynb") if "lab.check(" in page.read_text("utf-8"))


def run_off(page, folder):
    """The ledger's lines of the page's code where every formula is 3 % off, and the cells that raised."""
    environment = os.environ | {
        "PYTHONPATH": str(OFF), "DTLIB_LEDGER": str(folder / "off.jsonl"), "DTLIB_WHERE": f"chapters/{page.stem}",
        "DTLIB_STATIC": "1", "MPLBACKEND": "Agg",
    }  # fmt: skip
    command = [sys.executable, OFF / "run_page.py", page]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=page.parent)
    assert done.returncode == 0, done.stderr
    return ledger.read(folder / "off.jsonl"), re.findall(
        r"^cell \d+: .*(?:\n(?:  .*|\w+(?:Error|\.).*))*", done.stderr, re.M
    )


def knows(lines):
    """The formulas of lines that are called measured, and did not notice."""
    return [line.formula for line in lines if line.evidence == "measured" and line.passed]


@pytest.mark.soak
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_whatever_a_page_calls_measured_fails_with_formulas_that_are_off(page, tmp_path):
    lines, raised = run_off(page, tmp_path)
    assert lines
    assert raised == []  # a cell that ends early may not have come to its check
    assert knows(lines) == []


CELLS = [
    "import numpy as np\nfrom dtlib import lab, theory\nsteps = theory.collectives.ring_all_reduce_steps",
    "assert steps(4) == 6\n"
    "lab.check('collectives.ring_all_reduce_steps', theory=steps(4), measured=len(range(6)), by='count')",
    # a search by the formula itself, and an instrument that decides by it
    "best = theory.dp.best_world_size(50.0, 1e9, 1e-5, 5e10)\n"
    "time = [(n - best) ** 2 for n in range(1, 4000)]\n"
    "lab.check('dp.best_world_size', theory=best, measured=1 + int(np.argmin(time)), by='count')",
    "def counted():\n    return sum(1 for _ in range(theory.collectives.ring_all_reduce_steps(2)))\n"
    "lab.check('collectives.ring_all_reduce_steps', theory=steps(2), measured=lab.run(counted, 1)[0], by='count')",
    "1 / 0",
]


def test_what_moves_along_with_its_formula_is_found(tmp_path):
    page = tmp_path / "page.ipynb"
    cells = [{"cell_type": "code", "source": source.splitlines(keepends=True)} for source in CELLS]
    page.write_text(json.dumps({"cells": cells}))
    lines, raised = run_off(page, tmp_path)
    assert [line.passed for line in lines] == [False, True, True]
    assert knows(lines) == ["dp.best_world_size", "collectives.ring_all_reduce_steps"]
    assert len(raised) == 1
    assert raised[0].startswith("cell 4:")
    assert "ZeroDivisionError" in raised[0]


def test_no_rank_and_no_instrument_imports_a_formula():
    registered = {id(known.function): name for name, known in theory.formulas().items()}
    found = []
    for file in [file for part in ("ranks", "lab", "processes") for file in (ROOT / "dtlib" / part).rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dtlib"):
                module = importlib.import_module(node.module)
                names = {each.name: getattr(module, each.name, None) for each in node.names}
                found += [f"{file}: {name}" for name, each in names.items() if id(each) in registered]
                found += [f"{file}: all of theory" for name in names if f"{node.module}.{name}" == "dtlib.theory"]
    assert found == []
