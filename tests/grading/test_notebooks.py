"""The notebooks as a learner meets them: examples that hold, blanks that run, solutions that pass in good time."""

from __future__ import annotations

import doctest
import re

import nbformat
import pytest
from nbclient import NotebookClient

from dtlib.grading import all_exercises
from dtlib.grading.checks import STEMS

from .answers import ROOT, reference_namespace


def cells(stem: str) -> dict[str, str]:
    """The sources of a solutions notebook's cells by id, texts included."""
    notebook = nbformat.read(ROOT / "solutions" / f"{stem}.ipynb", 4)
    return {cell.id: cell.source for cell in notebook.cells}


def executed(folder: str, stem: str) -> dict[str, str]:
    """The text that each check cell shows when the notebook runs."""
    notebook = nbformat.read(ROOT / folder / f"{stem}.ipynb", 4)
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    shown = {}
    for cell in notebook.cells:
        if cell.id.endswith("-check"):
            *progress, output = cell.outputs  # what the check was doing is gone when it is done
            assert all(not each["data"]["text/plain"].strip() for each in progress)
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


def checked(name: str) -> str:
    """What a task says about its checks."""
    stem, _, number = name.partition(".")
    return cells(stem)[f"{stem}-{number}-task"].partition("**Checked**")[2].partition("<details>")[0]


@pytest.mark.parametrize("name", [name for name in all_exercises() if name != "collectives.1"])
def test_points_of_each_check_stand_in_the_text(name: str):
    told = [int(points) for points in re.findall(r"\((\d+)(?:; [^)]*)?\)", checked(name))]
    assert told == [check.points for check in all_exercises()[name].checks if check.points]


@pytest.mark.parametrize("name", all_exercises())
def test_numbers_of_ranks_in_the_text_are_those_that_are_drawn(name: str):
    exercise, text = all_exercises()[name], checked(name)
    cases = [case for seed in range(200) for case in exercise.cases(seed)]
    listed = re.search(r"with ([\d, and]+) ranks", text)
    spanned = re.search(r"(\d+) to (\d+) (?:ranks|workers)", text)
    if "world_size" in cases[0]:
        assert {int(n) for n in re.findall(r"\d+", listed[1])} == {case["world_size"] for case in cases}
    elif spanned:
        position = {"holds_after": 1, "sgd_step": 0, "ring_on_paper": 1}[exercise.function]
        drawn = [case["arguments"][position] for case in cases]
        sizes = [each if isinstance(each, int) else len(each) for each in drawn]
        assert (min(sizes), max(sizes)) == (int(spanned[1]), int(spanned[2]))
    micro = re.search(r"(\d+) to (\d+) micro-batches", text)
    if micro:
        counts = [case["micro_batches"] for case in cases]
        assert (min(counts), max(counts)) == (int(micro[1]), int(micro[2]))
