"""Notebooks as they are committed: clean, small cells, stable ids, nothing of this machine."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("chapters", "exercises", "solutions")
    for path in (ROOT / folder).glob("*.ipynb")
)
MAX_LINES = 20  # a chapter's cell holds one idea
MAX_FOLDED_LINES = 30  # a figure with its checks, which a reader sees who opens the fold
MAX_MECHANISM_LINES = 25  # the cell that is the chapter's mechanism
MAX_ANSWER_LINES = 40  # a cell of an exercise holds one whole answer
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|root|Users|mnt|work)/\w")


def faults(notebook: dict, max_lines: int = MAX_LINES) -> list[str]:
    """What is wrong with a notebook as it would be committed."""
    found = []
    if (notebook["nbformat"], notebook["nbformat_minor"]) < (4, 5):
        found.append("format older than 4.5: cells have no ids")
    ids = [cell.get("id", "") for cell in notebook["cells"]]
    found += [f"cell id {each!r} appears twice" for each in sorted({i for i in ids if ids.count(i) > 1})]
    kernel = notebook["metadata"].get("kernelspec", {}).get("name")
    if kernel != "python3":
        found.append(f"kernel {kernel!r}: must be python3, which every machine has")
    for number, cell in enumerate(notebook["cells"], start=1):
        source = "".join(cell["source"])
        where = f"cell {number} ({cell.get('id')})"
        if not re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", cell.get("id", "")):
            found.append(f"{where}: no valid id")
        if MACHINE_PATH.search(source):
            found.append(f"{where}: names a path of one machine")
        if cell["cell_type"] != "code":
            continue
        if cell.get("outputs"):
            found.append(f"{where}: has outputs")
        if cell.get("execution_count") is not None:
            found.append(f"{where}: has an execution count")
        lines = len(source.strip().splitlines())
        allowed = {"mechanism": MAX_MECHANISM_LINES, "hide-input": MAX_FOLDED_LINES}
        most = max(max_lines, *(allowed.get(tag, 0) for tag in cell["metadata"].get("tags", ())), 0)
        if lines > most:
            found.append(f"{where}: {lines} lines, more than {most}")
    return found


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_is_clean(name):
    text = (ROOT / name).read_text("utf-8")
    notebook = json.loads(text)
    assert faults(notebook, MAX_LINES if name.startswith("chapters/") else MAX_ANSWER_LINES) == []
    nbformat.validate(notebook)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_ids_survive_reading_and_writing(name):
    """nbformat gives new ids to cells whose ids it does not accept; then each save would be a difference."""
    notebook = nbformat.read(ROOT / name, as_version=4)
    ids = [cell["id"] for cell in notebook.cells]
    again = nbformat.reads(nbformat.writes(notebook), as_version=4)
    assert [cell["id"] for cell in again.cells] == ids
    assert ids == [cell["id"] for cell in json.loads((ROOT / name).read_text("utf-8"))["cells"]]


def _good() -> dict:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 + 1"), nbformat.v4.new_markdown_cell("a")])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    notebook.nbformat_minor = 5
    return json.loads(nbformat.writes(notebook))


def test_a_good_notebook_has_no_fault():
    assert faults(_good()) == []


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda n: n["cells"][0].update(outputs=[{"output_type": "stream"}]), "has outputs"),
        (lambda n: n["cells"][0].update(execution_count=3), "has an execution count"),
        (lambda n: n["cells"][0].update(source=["x = 1\n"] * 21), "21 lines, more than 20"),
        (lambda n: n["cells"][0].update(source=["x = 1\n"] * 31, metadata={"tags": ["hide-input"]}), "more than 30"),
        (lambda n: n["cells"][1].update(id=n["cells"][0]["id"]), "appears twice"),
        (lambda n: n["cells"][1].pop("id"), "no valid id"),
        (lambda n: n["cells"][1].update(source=["see /ho" + "me/me/x"]), "path of one machine"),
        (lambda n: n["metadata"].pop("kernelspec"), "must be python3"),
        (lambda n: n.update(nbformat_minor=4), "format older"),
    ],
)
def test_each_fault_is_found(break_it, message):
    notebook = copy.deepcopy(_good())
    break_it(notebook)
    assert any(message in fault for fault in faults(notebook)), faults(notebook)
