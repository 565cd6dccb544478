"""The whole path: a class in which some are hostile, some bear odd names, and one did the work."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dtlib.grading.classroom import grader
from dtlib.grading.sandbox.runner import Sandbox
from dtlib.grading.sandbox.walls.limits import Limits
from dtlib.theory.units import MiB

from . import hostile_world as outside
from .answers import ROOT
from .hostile_bank import READ_WHOLE, hand_in, hostile_submissions

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the walls are those of Linux")

SEED = 20263
LIMITS = Limits(memory_bytes=400 * MiB, processes=32, output_bytes=MiB, cpu_seconds=2.0, patience_seconds=0.8)
HOSTILE = hostile_submissions()
IN_A_CLASS = (
    "A damaged archive instead of a result",
    "A daemon that writes a file once the grader has gone home",
    "A fake score on standard output",
    "A folder that is a link to the solutions",
    "A link to the solutions",
    "A notebook of 500 MB",
    "A notebook of brackets",
    "A pipe in place of a notebook",
    "An exception with a text of 60 MB",
    "Every descriptor closed",
    "Killing the parent",
    "Leaving by os._exit(0), as if all were well",
    "Results, overwritten",
    "The grader's own words about trouble, forged",
)
ODD_NAMES = (
    "=HYPERLINK(1)",
    "-rf",
    "$(reboot)",
    "a\nb",
    "a b\u202ec",
    "<script>",
    "results.json",
    "CON",
    "x" * 200,
    "|`*_[x](y)",
    "\u00e9",
    "e\u0301",
)


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    folder = tmp_path_factory.mktemp("course")
    with outside.world() as world, Sandbox(LIMITS) as sandbox:
        reference = ROOT / "solutions" / "collectives.ipynb"
        chosen = {hostile.title: hostile for hostile in HOSTILE if hostile.title in IN_A_CLASS}
        for number, title in enumerate(IN_A_CLASS):
            knows = world.knows(outside.new_mark(), folder / "results")
            hand_in(chosen[title], folder / "submissions" / f"hostile {number}", knows)
        for name in ("reference", *ODD_NAMES):
            (folder / "submissions" / name).mkdir()
            shutil.copy(reference, folder / "submissions" / name)
        chosen_exercises = ("collectives.2", "collectives.3")
        results = grader.grade(
            folder / "submissions", folder / "results", exercises=chosen_exercises, seed=SEED, jobs=2, sandbox=sandbox
        )
        yield results, folder


def test_each_earns_what_is_earned_and_nobody_pays_for_another(graded: tuple[Any, Path]):
    results, _ = graded
    points = {each["learner"]: each["points"] for each in results["learners"]}
    assert len(points) == len(IN_A_CLASS) + len(ODD_NAMES) + 1
    for number, title in enumerate(IN_A_CLASS):
        whole = next(hostile for hostile in HOSTILE if hostile.title == title).handed_in in READ_WHOLE
        assert points.pop(f"hostile {number}") == (0 if whole else 5), title
    assert set(points.values()) == {10}
    assert results["faults"] == []


def test_nothing_is_written_beside_the_results(graded: tuple[Any, Path]):
    _, folder = graded
    assert {path.name for path in folder.iterdir()} == {"submissions", "results"}
    files = [path for path in (folder / "results").rglob("*") if path.is_file()]
    assert all(re.fullmatch(r"[\w.-]+", path.name) for path in files), files
    assert not any(path.is_symlink() for path in files)
    table = (folder / "results" / "scores.csv").read_text(encoding="utf-8")
    assert not re.search(r"(^|[,\n\"])[=+@\t\r-]", table)
