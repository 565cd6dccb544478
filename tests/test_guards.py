"""What may import what: the theory needs numpy alone, no room imports what it may not, no stem another's privates.

Each guard is shown to be able to fail.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EVALUATE = """
from dtlib import theory
assert theory.formulas(), "no formula is registered"
assert theory.collectives.ring_all_reduce_bytes(8.0, 4) == 12.0
assert theory.dp.effective_batch(32, 8, 4) == 1024
"""
BLOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch is blocked here")
sys.meta_path.insert(0, Blocked())
"""
ROOMS = (
    "theory", "theory.planner", "theory.calibration", "ranks", "lab", "grading", "grading.sandbox", "grading.classroom",
    "cli",
)  # fmt: skip
TOOLS = {"formula", "units", "valid", "cluster", "decompose"}  # of the theory
NOT_LOADED = (
    "\nimport sys\nassert not any(name.partition('.')[0] == 'torch' for name in sys.modules), 'torch was loaded'\n"
)


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)


def without_torch(code):
    """Guard: `code` runs where torch cannot be imported at all."""
    return python(BLOCK + code)


def never_loads_torch(code):
    """Guard: after `code`, torch is not among the loaded modules."""
    return python(code + NOT_LOADED)


def lint(file, code):
    """Guard: the linter's rule against importing torch at the top of a module, for `code` as if it stood in `file`."""
    command = [sys.executable, "-m", "ruff", "check", "--quiet", "--select", "TID253", "--stdin-filename", file, "-"]
    return subprocess.run(command, input=code, capture_output=True, text=True, timeout=60, cwd=ROOT)


@pytest.mark.parametrize("guard", [without_torch, never_loads_torch])
def test_formulas_are_evaluated_without_torch(guard):
    done = guard(EVALUATE)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["import dtlib", "import dtlib.cli", "import dtlib.grading.exercises.release"])
def test_light_imports_stay_light(command):
    done = never_loads_torch(command)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("hidden", ["import torch", "import torch.nn as nn", "from torch import Tensor"])
def test_the_guard_that_blocks_torch_can_fail(hidden):
    done = without_torch(EVALUATE + hidden)
    assert done.returncode == 1
    assert "torch is blocked here" in done.stderr


def test_the_guard_that_looks_for_torch_can_fail():
    done = never_loads_torch(EVALUATE + "import torch")
    assert done.returncode == 1
    assert "torch was loaded" in done.stderr


def test_the_linter_forbids_torch_in_theory_and_allows_it_in_ranks_and_lab():
    code = '"""A module."""\n\nimport torch\n\nprint(torch)\n'
    assert "TID253" in lint("dtlib/theory/memory.py", code).stdout
    assert lint("dtlib/ranks/memory.py", code).returncode == 0
    assert lint("dtlib/lab/memory.py", code).returncode == 0


def rooms(source):
    """Which of dtlib's rooms the Python text `source` imports."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update(f"{'dtlib.' if node.level >= 2 else ''}{node.module}.{name.name}" for name in node.names)
            found.add(f"{'dtlib.' if node.level >= 2 else ''}{node.module}")
        elif isinstance(node, ast.ImportFrom):
            found.update(f"dtlib.{name.name}" for name in node.names if node.level >= 2)
    return {room for room in ROOMS if any(f"{name}.".startswith(f"dtlib.{room}.") for name in found)}


@pytest.mark.parametrize(
    ("room", "forbidden"),
    [
        ("theory", {"ranks", "lab", "grading", "cli"}),
        ("theory/timing", {"theory.planner", "theory.calibration"}),
        ("theory/planner", {"theory.calibration"}),
        ("ranks", {"lab", "grading", "cli"}),
        ("lab", {"ranks", "grading", "cli"}),
        ("figures", {"ranks", "lab", "grading"}),
        ("grading/exercises", {"ranks", "lab", "grading.sandbox", "grading.classroom", "cli"}),
        ("grading/sandbox", {"ranks", "grading.classroom", "cli"}),
        ("grading/classroom", {"ranks", "cli"}),
        ("processes", {*ROOMS}),
    ],
)
def test_rooms_import_only_what_they_may(room, forbidden):
    files = sorted((ROOT / "dtlib" / room).rglob("*.py"))
    assert files
    trespassers = {file.name: rooms(file.read_text()) & forbidden for file in files}
    assert {name: found for name, found in trespassers.items() if found} == {}


def of_theory(source):
    """Which modules of the theory the Python text `source` imports."""
    nodes = list(ast.walk(ast.parse(source)))
    found = [each.name.split(".") for node in nodes if isinstance(node, ast.Import) for each in node.names]
    for node in (each for each in nodes if isinstance(each, ast.ImportFrom)):
        found += [[*(node.module or "").split("."), each.name] for each in node.names]
    return {(*path, "theory")[path.index("theory") + 1] for path in found if "theory" in path}


def test_instruments_know_no_formula():
    found = {file.name: of_theory(file.read_text()) - TOOLS for file in (ROOT / "dtlib" / "lab").rglob("*.py")}
    assert {name: names for name, names in found.items() if names} == {}
    source = (
        "from dtlib.theory import (\n    dp,\n    units as u,\n)\ndef f():\n    from dtlib.theory.zero.step import x\n"
    )
    assert of_theory(source) == {"dp", "units", "zero"}
    assert of_theory("from dtlib import lab, theory") == of_theory("from .. import theory as t") == {"theory"}
    assert of_theory("import dtlib.theory.pp.bubble, numpy") == of_theory("from ..theory import pp") == {"pp"}


def names_a_room(text):
    """Which words of `text` name a room, or a module of one."""
    return re.findall(r"\b(?:dtlib\.(?:theory|ranks|lab|grading)|lab|grading)\b", text)


def test_processes_know_no_room_by_name():
    files = sorted((ROOT / "dtlib" / "processes").rglob("*.py"))
    assert files
    assert {file.name: found for file in files if (found := names_a_room(file.read_text()))} == {}
    assert names_a_room('("dtlib.theory", "torch")\nraise RuntimeError("lab.run")') == ["dtlib.theory", "lab"]


def test_the_guard_of_the_rooms_can_fail():
    assert rooms("from dtlib.ranks import dp") == {"ranks"}
    assert rooms("from .. import lab") == {"lab"}
    assert rooms("from dtlib.theory.calibration import folds") == {"theory", "theory.calibration"}
    assert rooms("from ..ranks.dp import x\nimport dtlib.lab") == {"ranks", "lab"}
    assert rooms("from dtlib.grading.classroom import check") == {"grading", "grading.classroom"}
    assert rooms("import numpy\nfrom . import units") == set()


def privates(file, source):
    """What the Python text `source`, as if it stood in `file` (from the root), imports of another stem's privates."""
    *package, own = Path(file).with_suffix("").parts
    stem = (*package, own)[:3]
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            home = [*package[: len(package) - node.level + 1]] if node.level else []
            names = [".".join([*home, *filter(None, [node.module]), name.name]) for name in node.names]
        else:
            continue
        for name in names:
            parts = tuple(name.split("."))
            if parts[0] == "dtlib" and parts[:3] != stem and any(part[0] == "_" for part in parts):
                found.append(name)
    return found


@pytest.mark.parametrize("room", ["theory", "ranks"])
def test_no_stem_imports_what_is_private_to_another(room):
    files = sorted((ROOT / "dtlib" / room).rglob("*.py"))
    assert files
    found = {file.name: privates(file.relative_to(ROOT), file.read_text()) for file in files}
    assert {name: names for name, names in found.items() if names} == {}


def test_the_guard_of_privates_can_fail():
    file = "dtlib/ranks/zero/shard.py"
    assert privates(file, "from dtlib.ranks.dp._peers import Peers") == ["dtlib.ranks.dp._peers.Peers"]
    assert privates(file, "from ..dp.base import _split, x") == ["dtlib.ranks.dp.base._split"]
    assert privates(file, "import dtlib.theory._lookup") == ["dtlib.theory._lookup"]
    assert privates(file, "from . import _check\nfrom ._rounds import x\nfrom torch.utils import _pytree") == []
    assert privates("dtlib/ranks/model.py", "from .dp import _rounds") == ["dtlib.ranks.dp._rounds"]


def where(text):
    """Of each line of CONTRIBUTING's table *Where is it?* the question, the file, and the name in it ("" for none)."""
    found = re.findall(r"^\| (.+?) \| `([\w./]+)` *(?:`(\w+)`)? \|$", text, re.M)
    return [(question, file, name) for question, file, name in found if "/" in file]


def missing(file, name):
    """Guard: what is not where a line of the table says, "" if it is."""
    if not (ROOT / file).exists():
        return f"there is no {file}"
    if not name:
        return ""
    tree = ast.parse((ROOT / file).read_text())
    names = {each.name for each in tree.body if isinstance(each, ast.FunctionDef | ast.ClassDef)}
    return "" if name in names else f"{file} defines no {name}"


def test_what_people_look_for_is_where_contributing_says():
    table = where((ROOT / "CONTRIBUTING.md").read_text())
    assert len(table) >= 20
    assert [told for _, file, name in table if (told := missing(file, name))] == []


def test_the_guard_of_the_table_can_fail():
    assert where("| a check | `dtlib/lab/check.py` `check` |\n") == [("a check", "dtlib/lab/check.py", "check")]
    assert missing("dtlib/lab/compare.py", "check") == "there is no dtlib/lab/compare.py"
    assert missing("dtlib/lab/check.py", "no_check") == "dtlib/lab/check.py defines no no_check"
