"""The instructor's page says what is so: exit codes, options, walls, files; and it gives no answer away."""

from __future__ import annotations

import re

import pytest

from dtlib.cli import main
from dtlib.grading.exercises.catalogue import STEMS
from dtlib.grading.sandbox.walls import MEANING, WALLS
from dtlib.grading.sandbox.walls.ward import ROOM_BYTES

from .answers import ROOT, cells

PAGE = (ROOT / "chapters" / "grading.md").read_text(encoding="utf-8")
GRADE = main.commands["grade"]
HELP = GRADE.help or ""
CELLS = re.findall(r"^```\{code-cell\}[^\n]*\n(.*?)^```$", PAGE, re.M | re.S)


def test_exit_codes_are_those_of_the_command():
    told = set(re.findall(r"^\| (\d+) \|", PAGE, re.M))
    assert told == set(re.findall(r"^\s+(\d+) {2,}", HELP, re.M))


def test_files_are_those_of_the_command():
    wanted = set(re.findall(r"\b(?:learners/|reports/|gradescope/)?\w+\.(?:md|csv|json|xml)\b", HELP))
    assert wanted >= {"report.md", "results.json", "reports/NAME.md"}
    assert {name for name in wanted if f"`{name}`" not in PAGE} == set()


def test_options_are_those_of_the_commands():
    known = {name for command in main.commands.values() for each in command.params for name in each.opts}
    lines = "\n".join(line for line in PAGE.splitlines() if "gh api" not in line)
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", lines)) <= known


def test_every_wall_is_explained():
    assert set(MEANING) == set(WALLS)
    assert all(MEANING.values())
    assert "MEANING[name]" in PAGE


def test_what_a_rank_may_hold_unseen_is_told():
    told = f"{ROOM_BYTES // 2**20} MiB for imports"
    assert told in PAGE
    assert told in (ROOT / "README.md").read_text(encoding="utf-8")


def test_cells_are_short():
    assert CELLS
    assert [cell.count("\n") for cell in CELLS if cell.count("\n") > 24] == []


def solution_lines(stem: str) -> list[str]:
    """The lines of the answers that say something: short ones, and those of the tasks, stand everywhere."""
    answers = re.findall(r"### BEGIN SOLUTION\n(.*?)### END SOLUTION", "\n".join(cells(stem).values()), re.S)
    return [line.strip() for line in "\n".join(answers).splitlines() if len(line.strip()) > 30]


@pytest.mark.parametrize("stem", STEMS)
def test_no_answer_stands_on_the_page(stem: str):
    lines = solution_lines(stem)
    assert len(lines) > 10
    assert [line for line in lines if line in PAGE] == []
