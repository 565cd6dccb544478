"""The notebooks as a learner meets them: examples that hold, blanks that run, solutions that pass in good time."""

from __future__ import annotations

import doctest
import re

import nbformat
import pytest
from nbclient import NotebookClient

from dtlib.grading import all_exercises

from .bank import ROOT, cells, reference_namespace

STEMS = ("collectives", "dp")


def executed(folder: str, stem: str) -> dict[str, str]:
    """The text that each check cell shows when the notebook runs."""
    notebook = nbformat.read(ROOT / folder / f"{stem}.ipynb", 4)
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    shown = {}
    for cell in notebook.cells:
        if cell.id.endswith("-check"):
            (output,) = cell.outputs
            assert "text/html" in output["data"]
            shown[cell.id.removesuffix("-check").replace("-", ".")] = output["data"]["text/plain"]
    return shown


@pytest.mark.parametrize("stem", STEMS)
def test_solutions_pass_every_check(stem: str):
    shown = executed("solutions", stem)
    assert set(shown) == {name for name in all_exercises() if name.startswith(f"{stem}.")}
    for name, text in shown.items():
        points = all_exercises()[name].points
        assert text.splitlines()[0].endswith(f"pass · {points} of {points} points"), text


@pytest.mark.parametrize("stem", STEMS)
def test_blank_exercises_run_and_are_not_attempted(stem: str):
    for text in executed("exercises", stem).values():
        assert "not attempted · 0 of" in text.splitlines()[0], text


@pytest.mark.parametrize("stem", STEMS)
def test_examples_hold(stem: str):
    """Every exercise has an example, and the reference gives what it says."""
    space = reference_namespace(stem)
    tasks = {name: text for name, text in cells(stem).items() if name.endswith("-task")}
    assert len(tasks) >= 5
    for name, text in tasks.items():
        examples = "\n".join(re.findall(r"```python\n(.*?)```", text, re.S))
        test = doctest.DocTestParser().get_doctest(examples, dict(space), name, None, 0)
        assert test.examples, f"{name} has no example"
        results = doctest.DocTestRunner(verbose=False).run(test)
        assert results.failed == 0, name


@pytest.mark.parametrize("stem", STEMS)
def test_points_in_the_text_are_those_of_the_checks(stem: str):
    for name, exercise in all_exercises().items():
        if not name.startswith(f"{stem}."):
            continue
        task = cells(stem)[f"{name.replace('.', '-')}-task"]
        (total,) = re.findall(r"\*\*Checked\*\* \((\d+) points\)", task)
        assert int(total) == exercise.points, name
        assert f"## {name.partition('.')[2]}. {exercise.title} ★" in task
