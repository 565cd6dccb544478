"""A class from end to end: real submissions, real walls, the command line, every file."""

import csv
import json
import re
import shutil
from xml.etree import ElementTree

import jsonschema
import pytest
from click.testing import CliRunner

from dtlib.cli import main
from dtlib.grading import all_exercises
from dtlib.grading.report import schema

from .bank import wrong_answers
from .classroom import hand_in, load, notebook, reference, verdicts

CHOSEN = ("collectives.2", "collectives.5", "dp.1", "dp.5")  # of each chapter one on paper and one on ranks
TOTAL = sum(all_exercises()[name].points for name in CHOSEN)
SEED = 20261
WRONG = 3  # learners who give, one after another, the wrong answers of the bank


def grade(submissions, out, *options):
    chosen = [word for name in CHOSEN for word in ("--exercise", name)]
    return CliRunner().invoke(main, ["grade", str(submissions), "--out", str(out), *chosen, *options])


def wrong_answer(exercise, number):
    return [each for each in wrong_answers() if each.exercise == exercise][number]


def hand_in_all(folder, learner, answers):
    for stem in ("collectives", "dp"):
        hand_in(folder, learner, {name: each for name, each in answers.items() if name.startswith(stem)}, stem)


def without_cell(source, name):
    data = json.loads(source)
    data["cells"] = [cell for cell in data["cells"] if cell["id"] != name]
    return json.dumps(data)


@pytest.fixture(scope="module")
def handed_in(tmp_path_factory):
    """References, blanks, wrong answers, and notebooks that something happened to."""
    folder = tmp_path_factory.mktemp("course") / "submissions"
    right = reference(*CHOSEN)
    hand_in_all(folder, "reference", right)
    hand_in_all(folder, "blank", {})
    for number in range(WRONG):
        hand_in_all(folder, f"wrong {number}", {n: wrong_answer(n.replace("-", "."), number).source for n in right})
    hand_in(folder, "half", right, "dp")
    windows = hand_in(folder, "windows", right, "collectives")
    windows.write_bytes(b"\xef\xbb\xbf" + windows.read_bytes().replace(b"\\n", b"\\r\\n"))
    hand_in_all(
        folder, "broken", {**right, "collectives-2": "def ring_on_paper(:\n", "dp-1": "import os\nos._exit(0)\n"}
    )
    cut = hand_in(folder, "cut", right, "collectives")
    cut.write_text(cut.read_text()[:3000])
    (folder / "empty").mkdir()
    (folder / "empty" / "dp.ipynb").write_text("")
    deleted = hand_in(folder, "deleted", right, "collectives")
    deleted.write_text(without_cell(notebook(right), "collectives-2"))
    return folder


@pytest.fixture(scope="module")
def out(handed_in, tmp_path_factory):
    folder = tmp_path_factory.mktemp("graded") / "results"
    result = grade(handed_in, folder, "--seed", str(SEED), "--jobs", "2", "--fail-under", "100")
    assert result.exit_code == 1, result.output
    return folder


def without_counted_bytes(record):
    """The kernel counts headers too, some bytes more or less each time; no verdict turns on them."""
    return re.sub(r"Saw [\d,]+ B \([^)]*\)", "Saw bytes", json.dumps(record))


def by_exercise(out, learner):
    (entry,) = [each for each in load(out / "results.json")["learners"] if each["learner"] == learner]
    return entry, {each["id"]: each for each in load(out / "learners" / f"{entry['file']}.json")["exercises"]}


def test_references_earn_everything(out):
    entry, exercises = by_exercise(out, "reference")
    assert (entry["points"], entry["max_points"], entry["percent"]) == (TOTAL, TOTAL, 100), exercises
    assert {each["status"] for each in exercises.values()} == {"pass"}


def test_blanks_earn_nothing_and_were_not_attempted(out):
    entry, exercises = by_exercise(out, "blank")
    assert entry["points"] == 0
    assert {each["status"] for each in exercises.values()} == {"not attempted"}


@pytest.mark.parametrize("number", range(WRONG))
def test_wrong_answers_fail_on_the_check_that_the_bank_names(out, number):
    _, exercises = by_exercise(out, f"wrong {number}")
    for name in CHOSEN:
        expected = wrong_answer(name, number)
        assert exercises[name]["status"] == "fail"
        assert exercises[name]["points"] < exercises[name]["max_points"]
        (check,) = [each for each in exercises[name]["checks"] if each["name"] == expected.check]
        assert (check["passed"], check["mistake"]) == (False, expected.mistake), exercises[name]
        assert check["message"]


def test_what_is_broken_costs_itself_alone(out):
    right = {name: all_exercises()[name].points for name in CHOSEN}
    expected = {
        "half": {"collectives.2": ("not attempted", 0), "collectives.5": ("not attempted", 0)},
        "windows": {"dp.1": ("not attempted", 0), "dp.5": ("not attempted", 0)},
        "broken": {"collectives.2": ("fail", 0), "dp.1": ("fail", 0)},
        "deleted": dict.fromkeys(("collectives.2", "dp.1", "dp.5"), ("not attempted", 0)),
    }
    for learner, odd in expected.items():
        _, exercises = by_exercise(out, learner)
        found = {name: (each["status"], each["points"]) for name, each in exercises.items()}
        assert found == {**{name: ("pass", points) for name, points in right.items()}, **odd}, learner
    for learner in ("cut", "empty"):
        entry, exercises = by_exercise(out, learner)
        assert entry["points"] == 0
        assert all(each["reason"] for each in exercises.values())


def test_the_files_are_whole_and_agree(out, handed_in):
    data = load(out / "results.json")
    jsonschema.validate(data, schema())
    learners = [each["learner"] for each in data["learners"]]
    assert learners == sorted(learners)
    assert set(learners) == {path.name for path in handed_in.iterdir()}
    with (out / "scores.csv").open(newline="", encoding="utf-8") as file:
        scores = {row["learner"]: int(row["points"]) for row in csv.DictReader(file)}
    suites = {suite.get("name"): suite for suite in ElementTree.parse(out / "junit.xml").getroot()}
    for each in data["learners"]:
        record = load(out / "learners" / f"{each['file']}.json")
        jsonschema.validate(record, schema("learner"))
        assert each["points"] == record["points"] == scores[each["learner"]]
        assert each["points"] == load(out / "gradescope" / f"{each['file']}.json")["score"]
        assert f"**{each['points']} of {TOTAL} points**" in (out / "reports" / f"{each['file']}.md").read_text()
        assert each["learner"] in suites
    assert (out / "report.md").stat().st_size < 900 * 1024


def test_the_same_seed_gives_the_same_verdicts(out, handed_in, tmp_path):
    for learner in ("reference", "wrong 0", "wrong 1", "broken"):
        shutil.copytree(handed_in / learner, tmp_path / "some" / learner)
    result = grade(tmp_path / "some", tmp_path / "again", "--seed", str(SEED), "--jobs", "1")
    assert result.exit_code == 0, result.output
    first, second = verdicts(out), verdicts(tmp_path / "again")
    for name in (each for each in second if each.endswith(".json")):
        assert without_counted_bytes(first[name]) == without_counted_bytes(second[name])


def test_the_next_run_has_nothing_to_do(out, handed_in):
    before = verdicts(out)
    result = grade(handed_in, out)
    assert result.exit_code == 0, result.output
    assert verdicts(out) == before
