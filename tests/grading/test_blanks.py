"""Who has begun an exercise is never taken for somebody who has not, and a blank costs no start of processes."""

from __future__ import annotations

import json
import tempfile

import pytest

from dtlib.grading.classroom.grader import grade
from dtlib.grading.classroom.intake import find
from dtlib.grading.exercises.blanks import is_untouched
from dtlib.grading.exercises.catalogue import all_exercises
from dtlib.grading.sandbox.harness.cells import load
from dtlib.grading.sandbox.walls import WALLS

from .answers import ROOT
from .classroom import PAPER, SEED, FakeSandbox, hand_in, notebook, reference, run
from .classroom import load as read

pytestmark = pytest.mark.usefixtures("home")
NAME, ID = "collectives.1", "collectives-1"
FUNCTION = all_exercises()[NAME].function
ANSWER = reference(NAME)[ID]
RIGHT = 'def answer(*given):\n    return "right"\n'
WIDE = chr(0xFF41 + ord(FUNCTION[0]) - ord("a")) + FUNCTION[1:]
STEMS = sorted({each.partition(".")[0] for each in all_exercises()})


def code_cells(stem="collectives"):
    return [
        (cell["id"], "".join(cell["source"]))
        for cell in json.loads((ROOT / "exercises" / f"{stem}.ipynb").read_text("utf-8"))["cells"]
        if cell["cell_type"] == "code"
    ]


def with_source(id, source):
    return [(each, source if each == id else text) for each, text in code_cells()]


@pytest.mark.parametrize("stem", STEMS)
def test_what_is_handed_out_is_untouched(stem):
    names = [each for each in all_exercises() if each.startswith(f"{stem}.")]
    assert [each for each in names if not is_untouched(each, code_cells(stem))] == []


BEGUN = {
    "in its cell": with_source(ID, ANSWER),
    "in a cell of one's own": [*code_cells(), ("", ANSWER)],
    "above its cell": [("mine", ANSWER), *code_cells()],
    "in a second cell of its id": [*code_cells(), (ID, ANSWER)],
    "before a second cell of its id": [(ID, ANSWER), *code_cells()],
    "in the set-up cell": with_source("setup", dict(code_cells())["setup"] + "\n" + ANSWER),
    "by another name": [*code_cells(), ("", f"{RIGHT}{FUNCTION} = answer")],
    "by a name in letters of another form": [*code_cells(), ("", f"{RIGHT}{WIDE} = answer")],
}


@pytest.mark.parametrize("how", BEGUN)
def test_an_answer_anywhere_is_run(how):
    """The control: each of these is an answer that the sandbox would find."""
    cells = BEGUN[how]
    assert not is_untouched(NAME, cells)
    found = load(cells, ID, FUNCTION)
    assert found.__name__ in (FUNCTION, "answer")
    assert "NotImplementedError" not in found.__code__.co_names, "that is the blank"


def test_a_deleted_cell_is_left_to_the_sandbox():
    assert not is_untouched(NAME, [each for each in code_cells() if each[0] != ID])


def test_other_exercises_and_blanks_at_the_ends_of_lines_change_nothing():
    cells = [(id, f"\n{source}  \n\n".replace("\n", " \n")) for id, source in with_source("collectives-2", "x = 1")]
    assert is_untouched(NAME, cells)
    assert not is_untouched("collectives.2", cells)


def test_a_class_learns_what_the_sandbox_would_have_said(tmp_path, monkeypatch):
    hand_in(tmp_path / "in", "anna", reference(NAME))
    hand_in(tmp_path / "in", "dan")
    sandbox = FakeSandbox()
    run(tmp_path / "in", tmp_path / "quick", sandbox=sandbox)
    assert sandbox.began == [NAME], "of two learners and three exercises"
    monkeypatch.setattr("dtlib.grading.classroom.intake.submissions.is_untouched", lambda *_: False)
    run(tmp_path / "in", tmp_path / "slow", sandbox=(slow := FakeSandbox()))
    assert len(slow.began) == 6
    for name in ("anna", "dan"):
        quick, slow = (read(tmp_path / each / "learners" / f"{name}.json") for each in ("quick", "slow"))
        for one, two in zip(quick["exercises"], slow["exercises"], strict=True):
            assert {**one, "measured": {}} == {**two, "measured": {}}


def test_a_class_that_has_not_begun_starts_no_process(tmp_path, monkeypatch):
    hand_in(tmp_path / "in", "dan")
    monkeypatch.setattr("dtlib.grading.sandbox.runner.Sandbox.__init__", None)
    results = grade(tmp_path / "in", tmp_path / "out", seed=SEED)
    assert (results["faults"], [each["status"] for each in results["learners"]]) == ([], ["graded"])
    hand_in(tmp_path / "in", "anna", reference(NAME))
    assert grade(tmp_path / "in", tmp_path / "out", seed=SEED)["faults"], "the control: here one is started"


def test_who_was_not_run_says_nothing_of_walls(tmp_path):
    walls = dict.fromkeys(WALLS, "") | {"limits": "it does not stand"}
    hand_in(tmp_path / "in", "anna", reference(NAME))
    run(tmp_path / "in", tmp_path / "out", sandbox=FakeSandbox(walls))
    hand_in(tmp_path / "in", "dan")
    for kept in (1, 2):
        results = grade(tmp_path / "in", tmp_path / "out", seed=SEED, exercises=PAPER)
        assert (results["measured"]["kept"], results["walls"]) == (kept, walls)
    hand_in(tmp_path / "none", "dan")
    grade(tmp_path / "none", tmp_path / "nothing", seed=SEED)
    assert "Nothing had to be run." in (tmp_path / "nothing" / "report.md").read_text()


def test_marks_of_another_form_do_not_take_long(tmp_path):
    """A run of marks that have to be sorted: as a whole, half a million of them take minutes."""
    cells = json.loads(notebook())
    cells["cells"].append({"cell_type": "code", "id": "mine", "source": "#" + "\u0301\u0323" * 250_000, "metadata": {}})
    (tmp_path / "anna.ipynb").write_text(json.dumps(cells))
    (anna,) = find(tmp_path)
    with tempfile.TemporaryFile() as spool:
        anna.read(spool)
        assert NAME in anna.untouched
