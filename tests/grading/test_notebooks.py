"""The notebooks as a learner meets them: examples that hold, and texts that promise what is checked."""

from __future__ import annotations

import doctest
import re

import nbformat
import pytest

from dtlib.grading import all_exercises
from dtlib.grading.exercises.catalogue import STEMS

from .answers import ROOT, reference_namespace


def cells(stem: str, folder: str = "solutions") -> dict[str, str]:
    """The sources of a notebook's cells by id, texts included."""
    notebook = nbformat.read(ROOT / folder / f"{stem}.ipynb", 4)
    return {cell.id: cell.source for cell in notebook.cells}


@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("folder", ["exercises", "solutions"])
def test_every_exercise_has_a_cell_that_checks_it(folder: str, stem: str):
    """What these cells show is looked at where the notebooks run (`make notebooks`, `conftest.py`)."""
    checks = [name.removesuffix("-check").replace("-", ".") for name in cells(stem, folder) if name.endswith("-check")]
    assert checks == [name for name in all_exercises() if name.startswith(f"{stem}.")]


@pytest.mark.parametrize("stem", STEMS)
def test_examples_hold(stem: str):
    """Every exercise has an example, and the reference gives what it says."""
    space = reference_namespace(stem)
    tasks = {name: text for name, text in cells(stem).items() if name.endswith("-task")}
    assert len(tasks) >= 3
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
    listed = re.search(r"with ([\d, and]+) ranks", text)
    spanned = re.search(r"(\d+) to (\d+) ranks", text)
    micro = re.search(r"(\d+) to (\d+) micro-batches", text)
    tells = "world_size" in exercise.cases(0)[0] or spanned or micro
    cases = [case for seed in range(200 if tells else 1) for case in exercise.cases(seed)]
    if "world_size" in cases[0]:
        assert {int(n) for n in re.findall(r"\d+", listed[1])} == {case["world_size"] for case in cases}
    elif spanned:
        position = {"holds_after": 1, "ring_on_paper": 1}[exercise.function]
        drawn = [case["arguments"][position] for case in cases]
        sizes = [each if isinstance(each, int) else len(each) for each in drawn]
        assert (min(sizes), max(sizes)) == (int(spanned[1]), int(spanned[2]))
    if micro:
        counts = [case["micro_batches"] for case in cases]
        assert (min(counts), max(counts)) == (int(micro[1]), int(micro[2]))
