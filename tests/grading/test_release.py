"""`dtlib release`: exercises are what the solutions give, and bad markers are refused with the cell's name."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import nbformat
import pytest
from click.testing import CliRunner

from dtlib.cli import main
from dtlib.grading.exercises import bank, launch
from dtlib.grading.exercises.catalogue import STEMS, all_exercises
from dtlib.grading.exercises.release import COURSE, ReleaseError, banks, exercise_text, release, strip
from dtlib.grading.sandbox import costs

from .answers import ROOT


def notebook(folder: Path, *cells: dict, name: str = "toy.ipynb") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(json.dumps({"cells": list(cells), "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    return path


def grade_cells(path: Path) -> dict[str, dict]:
    """The nbgrader metadata of each cell that carries any, by its ``grade_id``."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    told = [cell["metadata"]["nbgrader"] for cell in cells if "nbgrader" in cell["metadata"]]
    return {each["grade_id"]: each for each in told}


def code(source: str, cell_id: str = "a", **metadata) -> dict:
    return {
        "cell_type": "code",
        "id": cell_id,
        "metadata": metadata,
        "source": source.splitlines(keepends=True),
        "execution_count": 7,
        "outputs": [{"output_type": "stream", "name": "stdout", "text": ["secret"]}],
    }


ANSWER = """\
def f(x):
    \"\"\"Twice x.\"\"\"
    ### BEGIN SOLUTION
    if x:
        return 2 * x
    ### END SOLUTION
    return 0
"""


class TestStrip:
    def test_solution_becomes_one_line_as_far_indented(self):
        assert strip(ANSWER, "here") == (
            'def f(x):\n    """Twice x."""\n    raise NotImplementedError("your turn")\n    return 0'
        )

    def test_two_solutions_in_a_cell(self):
        text = ANSWER + "\n\n" + ANSWER.replace("def f", "def g")
        assert strip(text, "here").count("your turn") == 2

    def test_hidden_tests_disappear(self):
        assert strip("a = 1\n### BEGIN HIDDEN TESTS\nassert a\n### END HIDDEN TESTS\nb = 2", "here") == "a = 1\nb = 2"

    def test_windows_line_ends_and_trailing_blanks(self):
        assert "2 * x" not in strip(ANSWER.replace("\n", "  \r\n"), "here")

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("def f():\n    ### BEGIN SOLUTION\n    pass", "line 2: BEGIN SOLUTION without its END"),
            ("def f():\n    pass\n    ### END SOLUTION", "line 3: END SOLUTION without its BEGIN"),
            (
                "def f():\n    ### BEGIN SOLUTION\n    ### BEGIN SOLUTION\n    ### END SOLUTION",
                "line 3: BEGIN SOLUTION inside the SOLUTION of line 2",
            ),
            (
                "def f():\n    ### BEGIN SOLUTION\n    ### END HIDDEN TESTS",
                "line 3: END HIDDEN TESTS without its BEGIN",
            ),
            ("### BEGIN SOLUTION\nx = 1\n### END SOLUTION", "line 1: a solution outside of a function"),
            ("def f():\n    # BEGIN SOLUTION\n    pass", "line 2: '# BEGIN SOLUTION' is almost a marker"),
            ("def f():\n    ### begin solution\n    pass", "almost a marker"),
            ("def f():\n    pass  ### BEGIN SOLUTION", "almost a marker"),
            ("### BEGIN HIDDEN TEST\n### END HIDDEN TEST", "almost a marker"),
        ],
    )
    def test_bad_markers_are_refused_with_the_place(self, text, told):
        with pytest.raises(ReleaseError) as caught:
            strip(text, "toy.ipynb, cell 'a'")
        assert str(caught.value).startswith("toy.ipynb, cell 'a', ")
        assert told in str(caught.value)


class TestRelease:
    def test_outputs_go_ids_and_nbgrader_stay(self, tmp_path):
        told = {"grade": False, "grade_id": "a", "locked": False, "schema_version": 3, "solution": True, "task": False}
        notebook(tmp_path / "s", code(ANSWER, nbgrader=told, collapsed=True, tags=["hint"]))
        (path,) = release(tmp_path / "s", tmp_path / "e")
        (cell,) = json.loads(path.read_text())["cells"]
        assert (cell["id"], cell["outputs"], cell["execution_count"]) == ("a", [], None)
        assert cell["metadata"] == {"nbgrader": told, "tags": ["hint"]}
        nbformat.validate(nbformat.read(path, 4))

    def test_same_solutions_same_bytes_and_nothing_written_twice(self, tmp_path):
        source = notebook(tmp_path / "s", code(ANSWER))
        (path,) = release(tmp_path / "s", tmp_path / "e")
        before = path.read_bytes()
        assert release(tmp_path / "s", tmp_path / "e") == []
        assert release(str(tmp_path / "s"), str(tmp_path / "e"), check=True) == []
        assert exercise_text(source).encode() == before == path.read_bytes()

    def test_cell_with_hidden_tests_alone_is_dropped(self, tmp_path):
        hidden = code("### BEGIN HIDDEN TESTS\nassert f(1) == 2\n### END HIDDEN TESTS", "b")
        source = notebook(tmp_path / "s", code(ANSWER), hidden, code("", "empty"))
        assert [cell["id"] for cell in json.loads(exercise_text(source))["cells"]] == ["a", "empty"]

    def test_markdown_answers_become_an_invitation(self, tmp_path):
        text = "Why?\n\n### BEGIN SOLUTION\nBecause.\n### END SOLUTION\n"
        cell = {"cell_type": "markdown", "id": "m", "metadata": {}, "source": text}
        (released,) = json.loads(exercise_text(notebook(tmp_path / "s", cell)))["cells"]
        assert "".join(released["source"]) == "Why?\n\n*Your answer here.*"

    @pytest.mark.parametrize("change", ["edited", "missing", "orphan"])
    def test_drift_is_found(self, tmp_path, change):
        notebook(tmp_path / "s", code(ANSWER))
        (path,) = release(tmp_path / "s", tmp_path / "e")
        if change == "edited":
            path.write_text(path.read_text().replace("your turn", "my turn"))
        elif change == "missing":
            path.unlink()
        else:
            notebook(tmp_path / "e", code("x = 1"), name="old.ipynb")
        with pytest.raises(match=r"old\.ipynb" if change == "orphan" else r"toy\.ipynb"):
            release(tmp_path / "s", tmp_path / "e", check=True)

    def test_nothing_is_written_where_one_notebook_is_bad(self, tmp_path):
        notebook(tmp_path / "s", code(ANSWER), name="a.ipynb")
        notebook(tmp_path / "s", code("def f():\n    ### BEGIN SOLUTION\n    pass"), name="b.ipynb")
        with pytest.raises(ReleaseError, match=r"b\.ipynb, cell 'a', line 2"):
            release(tmp_path / "s", tmp_path / "e")
        assert not (tmp_path / "e").exists()

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"cells": 3}', '{"cells": [{"source": "x"}]}'])
    def test_what_is_no_notebook_is_refused(self, tmp_path, text):
        (tmp_path / "bad.ipynb").write_text(text)
        with pytest.raises(ReleaseError, match=r"bad\.ipynb is no notebook"):
            release(tmp_path, tmp_path / "e")

    def test_empty_folder_is_refused(self, tmp_path):
        with pytest.raises(ReleaseError, match="holds no notebook"):
            release(tmp_path, tmp_path / "e")

    def test_cells_with_one_name_are_refused(self, tmp_path):
        with pytest.raises(ReleaseError, match="two cells are called 'a'"):
            exercise_text(notebook(tmp_path, code("x = 1"), code("y = 1")))


class TestBanks:
    def test_what_ships_is_made_and_held_against(self, tmp_path, monkeypatch):
        assert COURSE == ROOT / "solutions"
        monkeypatch.setattr(bank, "SHIPPED", tmp_path / "checks" / "shipped.json")
        written = release(COURSE, tmp_path / "e")
        assert bank.SHIPPED in written
        shipped = json.loads(bank.SHIPPED.read_text("utf-8"))
        assert shipped.keys() == {"shared", *all_exercises()}
        (checks, mistake, feedback, *programs) = shipped["collectives.2"][0]
        assert set(checks) <= {each.name for each in all_exercises()["collectives.2"].checks}
        assert mistake
        assert isinstance(feedback, str)
        compile(programs[0], "program", "exec")
        assert "### BEGIN" not in bank.SHIPPED.read_text("utf-8")
        assert release(COURSE, tmp_path / "e", check=True) == []
        bank.SHIPPED.write_text(bank.SHIPPED.read_text("utf-8") + " ")
        with pytest.raises(match=r"shipped\.json"):
            release(COURSE, tmp_path / "e", check=True)

    def test_other_solutions_leave_it_alone(self, tmp_path, monkeypatch):
        monkeypatch.setattr(bank, "SHIPPED", tmp_path / "shipped.json")
        notebook(tmp_path / "s", code(ANSWER))
        release(tmp_path / "s", tmp_path / "e")
        assert not bank.SHIPPED.exists()

    def test_a_difference_that_fits_no_more_is_told(self, monkeypatch):
        monkeypatch.setattr(bank, "reference", lambda cell: "def other():\n    pass\n")
        with pytest.raises(ReleaseError, match="what ships of the banks cannot be made"):
            banks(COURSE)


class TestCommittedNotebooks:
    def test_exercises_are_what_the_solutions_give(self):
        release(ROOT / "solutions", ROOT / "exercises", check=True)

    def test_no_solution_is_left(self):
        for path in (ROOT / "exercises").glob("*.ipynb"):
            assert "SOLUTION" not in path.read_text(encoding="utf-8")

    def test_every_exercise_has_its_cells_and_points(self):
        for stem in STEMS:
            for folder in ("solutions", "exercises"):
                told = grade_cells(ROOT / folder / f"{stem}.ipynb")
                for name, exercise in all_exercises().items():
                    if name.startswith(f"{stem}."):
                        slug = name.replace(".", "-")
                        assert told[slug]["solution"]
                        assert told[f"{slug}-check"]["points"] == exercise.points
                        assert {each["schema_version"] for each in told.values()} == {3}

    def test_every_exercise_has_the_cost_of_its_reference(self):
        assert set(costs.recorded()) == set(all_exercises())  # else: `python -m grading.record_costs STEM` in `tests`


class TestLaunch:
    """The notebooks of the branch that opens elsewhere."""

    @pytest.mark.parametrize("stem", STEMS)
    def test_each_begins_with_links_and_a_cell_that_installs(self, stem: str):
        source = ROOT / "solutions" / f"{stem}.ipynb"
        plain = nbformat.reads(exercise_text(source), 4)
        made = nbformat.reads(exercise_text(source, "https://github.com/owner/course"), 4)
        nbformat.validate(made)
        assert [cell.id for cell in made.cells] == ["launch", "launch-install", *(cell.id for cell in plain.cells)]
        addresses = re.findall(r"\]\((\S+)\)", made.cells[0].source)
        assert [urlsplit(each).netloc for each in addresses] == [
            "colab.research.google.com", "mybinder.org", "codespaces.new",
        ]  # fmt: skip
        assert [f"exercises/{stem}.ipynb" in each for each in addresses] == [True, True, False]
        assert all("owner/course" in each and "launch" in each for each in addresses)

    def test_the_cell_installs_only_where_the_course_is_not(self, monkeypatch, capsys):
        (_, cell) = launch.cells("https://github.com/owner/course/", "zero", "v1.2.3")
        code, ran = "".join(cell["source"]), []
        monkeypatch.setattr(subprocess, "run", lambda words, **_: ran.append(words) or SimpleNamespace(stdout="works"))
        exec(code, {})
        assert ran == []
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        exec(code, {})
        assert [words[1:3] for words in ran] == [["-m", "pip"], ["-m", "dtlib.cli"]]
        assert ran[0][-1] == "dtlib-course[lab] @ git+https://github.com/owner/course@v1.2.3"
        assert capsys.readouterr().out == "works\n"

    @pytest.mark.parametrize("address", ["https://example.org/owner/course", "https://github.com/owner", "REPOSITORY"])
    def test_an_address_that_they_cannot_open_is_refused(self, address: str):
        with pytest.raises(ValueError, match="repository must be https://github"):
            launch.places(address, "zero")

    def test_a_hand_in_that_begins_so_is_graded_as_any_other(self, tmp_path):
        made = json.loads((ROOT / "solutions" / "memory.ipynb").read_text("utf-8"))
        made["cells"] = [*launch.cells("https://github.com/owner/course", "memory"), *made["cells"]]
        (tmp_path / "in").mkdir()
        (tmp_path / "in" / "ada.ipynb").write_text(json.dumps(made), "utf-8")
        words = ["grade", str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--exercise", "memory.1", "--quiet"]
        result = CliRunner().invoke(main, [*words, "--fail-under", "100"])
        assert result.exit_code == 0, result.output
