"""A class is graded: verdicts, faults of the grader, options, folders and names."""

from __future__ import annotations

import gc
import hashlib
import json
import shutil
from types import SimpleNamespace

import pytest

from dtlib.grading.classroom import report
from dtlib.grading.classroom.grader import GradeError, grade
from dtlib.grading.classroom.intake import Submission
from dtlib.grading.classroom.judging import grade_exercise
from dtlib.grading.exercises.catalogue import all_exercises
from dtlib.grading.exercises.seen import Observed, Trouble
from dtlib.grading.sandbox.runner import Cell, Outcome

from .classroom import (
    HALF,
    NAMES,
    NONE,
    PAPER,
    SEED,
    FakeSandbox,
    hand_in,
    load,
    notebook,
    outcome,
    points,
    reference,
    run,
    troubled,
    verdicts,
)

pytestmark = pytest.mark.usefixtures("home")


def test_a_class_is_graded_with_partial_credit_and_reasons(group, tmp_path):
    out = tmp_path / "results"
    results = run(group, out, jobs=2)
    assert points(results) == {"anna": 15, "bob": 8, "cleo": 5, "dan": 0, "eve": 0}
    assert results["faults"] == []
    data = load(out / "results.json")
    assert data["state"] == "complete"
    by_name = {each["learner"]: each for each in data["learners"]}
    assert list(by_name) == NAMES
    assert {each["max_points"] for each in by_name.values()} == {15}
    assert by_name["bob"]["exercises"]["collectives.2"] == {"points": 3, "status": "partly right"}
    assert by_name["dan"]["exercises"]["collectives.2"] == {"points": 0, "status": "not attempted"}
    assert by_name["eve"]["exercises"]["collectives.2"]["status"] == "fail"
    bob = {each["id"]: each for each in load(out / "learners" / "bob.json")["exercises"]}
    seconds = {check["name"]: check for check in bob["collectives.2"]["checks"]}["seconds"]
    assert seconds["message"].startswith("Saw 0")
    statistics = {each["exercise"]: each for each in data["statistics"]}
    assert (statistics["collectives.2"]["attempted"], statistics["collectives.2"]["passed"]) == (4, 1)
    files = sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file())
    for name in ("anna", "bob", "cleo", "dan", "eve"):
        for kind in (f"learners/{name}.json", f"reports/{name}.md", f"feedback/{name}.html", f"gradescope/{name}.json"):
            files.remove(kind)
    assert files == [".dtlib-grade.lock", "junit.xml", "report.html", "report.md", "results.json", "scores.csv"]


def test_two_runs_with_one_seed_are_the_same_whatever_the_number_of_jobs(group, tmp_path):
    run(group, tmp_path / "one", jobs=1)
    run(group, tmp_path / "two", jobs=3)
    assert verdicts(tmp_path / "one") == verdicts(tmp_path / "two")


def seeds(results):
    return {each["learner"]: each["seed"] for each in results["learners"]}


def test_who_hands_in_again_meets_cases_that_nobody_has_seen(group, tmp_path):
    out = tmp_path / "out"
    first = run(group, out, seed=None)
    (drawn,) = set(seeds(first).values())
    assert load(out / "results.json")["seed"] == first["seed"] == drawn
    again = run(group, out, seed=None)
    assert (seeds(again), again["measured"]["kept"]) == (seeds(first), 5), "who is done is done"
    hand_in(group, "bob", {**reference("collectives.1"), "collectives-2": NONE})
    later = seeds(run(group, out, seed=None))
    assert later.pop("bob") not in {drawn, *later.values()}
    assert set(later.values()) == {drawn}
    assert set(seeds(run(group, out, seed=None, fresh=True)).values()).isdisjoint({drawn, *later.values()})
    assert set(seeds(run(group, out, seed=7)).values()) == {7}, "unless it is said which"


def test_a_learner_is_told_the_digest_of_the_seed_and_the_instructor_the_seed(group, tmp_path):
    out = tmp_path / "out"
    results = run(group, out, seed=None)
    seed = str(results["seed"])
    for folder in ("reports", "gradescope"):
        for path in (out / folder).iterdir():
            assert seed not in path.read_text(), path
    digest = hashlib.sha256(f"dtlib {seed}".encode()).hexdigest()[:16]
    assert digest in (out / "reports" / "bob.md").read_text()
    for name in ("report.md", "report.html", "results.json", "learners/bob.json"):
        assert seed in (out / name).read_text(), name
    assert int(seed) >= 2**31, "few seeds could be tried one after the other (fails once in four million runs)"


def test_the_same_exercises_count_for_everybody(tmp_path):
    folder = tmp_path / "submissions"
    hand_in(folder, "anna", reference("collectives.1"))
    hand_in(folder, "bob", reference("dp.1"), stem="dp")
    results = run(folder, tmp_path / "both", exercises=())
    handed_in = [name for name in all_exercises() if name.partition(".")[0] in ("collectives", "dp")]
    assert [each["id"] for each in results["exercises"]] == handed_in
    shutil.rmtree(folder / "bob")
    results = run(folder, tmp_path / "one", exercises=())
    assert {each["id"].partition(".")[0] for each in results["exercises"]} == {"collectives"}
    results = run(folder, tmp_path / "chosen", exercises=("collectives.2",), chapters=("dp",))
    assert [each["id"] for each in results["exercises"]][:2] == ["collectives.2", "dp.1"]
    shutil.rmtree(folder / "anna")
    (folder / "cleo").mkdir()
    (folder / "cleo" / "cooking.ipynb").write_text("")
    results = run(folder, tmp_path / "nothing", exercises=())
    assert [each["id"] for each in results["exercises"]] == list(all_exercises())
    assert points(results) == {"cleo": 0}


def test_one_notebook_is_a_class_of_one(tmp_path):
    path = tmp_path / "collectives.ipynb"
    path.write_text(notebook(reference(*PAPER)))
    results = run(path, tmp_path / "out")
    (only,) = results["learners"]
    assert only["points"] == 15
    assert load(tmp_path / "out" / "gradescope" / f"{only['file']}.json")["score"] == 15


def test_what_a_folder_holds_can_be_one_learners(tmp_path):
    """A second notebook makes no second learner, so Gradescope finds the one file that it copies."""
    folder = tmp_path / "submission"
    folder.mkdir()
    (folder / "collectives.ipynb").write_text(notebook(reference(*PAPER)))
    (folder / "my attempts.ipynb").write_text(notebook())
    assert len(run(folder, tmp_path / "many")["learners"]) == 2
    (only,) = run(folder, tmp_path / "one", one_learner=True)["learners"]
    assert (only["learner"], only["points"]) == ("submission", 15)
    assert [path.name for path in (tmp_path / "one" / "gradescope").iterdir()] == ["submission.json"]


# What the sandbox reports


def judged(observe, exercise="collectives.2", source="# something"):
    """The entry for an answer of which `observe` tells what came of each case, by its number."""
    exercise = all_exercises()[exercise]
    cell = Cell(exercise.id.replace(".", "-"), source)
    submission = SimpleNamespace(cells=lambda stem: [cell], problem=lambda stem: ("", True), untouched=(), fault=None)
    sandbox = SimpleNamespace(run=lambda e, a, cases, tell: outcome(map(observe, range(len(cases)), cases)))
    return grade_exercise(sandbox, exercise, submission, SEED)


def always(kind, text, line=""):
    return lambda number, case: Observed(case, trouble=Trouble(kind, text, line))


def right_but(*troubles, exercise="collectives.2"):
    """A right answer, but for the last cases."""
    answer = SimpleNamespace(cells=[(exercise.replace(".", "-"), reference(exercise)[exercise.replace(".", "-")])])
    cases = all_exercises()[exercise].cases(SEED)
    observed = FakeSandbox().run(all_exercises()[exercise], answer, cases).observed
    first = len(cases) - len(troubles)
    return lambda number, case: observed[number] if number < first else Observed(case, trouble=troubles[number - first])


@pytest.mark.parametrize("kind", ["raised", "hung", "died", "limit", "tampered", "syntax", "something new"])
def test_a_trouble_in_every_case_is_a_fail_with_one_reason(kind):
    entry = judged(always(kind, "it did this"))
    assert (entry["status"], entry["points"], entry["trouble"]) == ("fail", 0, kind)
    assert "t did this" in json.dumps(entry), "in the reason, or in what a check says"


@pytest.mark.parametrize("kind", ["limit", "tampered"])
def test_one_case_beyond_the_rules_costs_the_whole_exercise(kind):
    assert judged(right_but())["points"] == 5
    entry = judged(right_but(Trouble(kind, "why")))
    assert (entry["status"], entry["points"]) == ("fail", 0)
    assert entry["reason"].endswith(": why.")


def test_what_was_ended_from_outside_is_not_known_and_has_no_points():
    entry = judged(right_but(Trouble("not known", "it was ended after 120 s, of which it waited 90 s")))
    assert (entry["status"], entry["points"], entry["trouble"]) == ("not known", 0, "not known")
    assert entry["reason"] == (
        "What this earns is not known: it was ended after 120 s, of which it waited 90 s. It has to be run again."
    )
    assert {check["verdict"] for check in entry["checks"]} == {"not looked at"}


def test_who_hung_in_some_cases_is_told_so_and_no_check_is_blamed():
    entry = judged(right_but(Trouble("hung", "nothing moved any more", "line 3: `wait()`")))
    assert entry["status"] == "fail"
    assert {check["trouble"] for check in entry["checks"] if check["verdict"] == "fail"} == {"hung"}
    assert "line 3" not in json.dumps(entry["checks"])
    assert entry["measured"]["stood_at"] == "line 3: `wait()`"


def test_what_is_missing_was_not_attempted_unless_something_else_stands_there():
    assert judged(always("missing", "there is no function"), source=" ")["status"] == "not attempted"
    assert judged(always("missing", "there is no function"), source="x = 1")["status"] == "fail"
    assert judged(always("blank", "nothing yet"))["status"] == "not attempted"


def test_the_line_at_which_an_endless_loop_stood_is_no_part_of_the_verdict():
    lines = ("rank 0 at line 3: `i += 1`", "rank 0 at line 4: `i -= 1`")
    one, other = (judged(always("hung", "after 10 s rank 0 had not returned", each), "collectives.4") for each in lines)
    assert one.pop("measured")["stood_at"] == lines[0]
    assert other.pop("measured")["stood_at"] == lines[1]
    assert one == other


def test_a_sandbox_that_loses_cases_is_a_fault_of_ours():
    submission = SimpleNamespace(cells=lambda stem: [], problem=lambda stem: ("", True), untouched=(), fault=None)
    sandbox = SimpleNamespace(run=lambda *args: Outcome([]))
    exercise = all_exercises()["collectives.2"]
    entry = grade_exercise(sandbox, exercise, submission, SEED)
    reason = f"RuntimeError: 0 of {len(exercise.cases(SEED))} cases came back"
    assert (entry["status"], entry["reason"]) == ("error", reason)


def test_a_fault_of_the_grader_costs_nobody_else_and_is_told(group, tmp_path):
    hand_in(group, "bob", {**reference("collectives.1"), **troubled("collectives.2", "fault", "no wall")})
    out = tmp_path / "out"
    results = run(group, out)
    assert points(results) == {"anna": 15, "bob": 5, "cleo": 5, "dan": 0, "eve": 0}
    assert results["faults"] == [{"learner": "bob", "exercise": "collectives.2", "text": "RuntimeError: no wall"}]
    (entry,) = [each for each in load(out / "learners" / "bob.json")["exercises"] if each["status"] == "error"]
    assert entry["points"] == 0
    assert "not your fault" in (out / "reports" / "bob.md").read_text()
    again = FakeSandbox()
    run(group, out, sandbox=again)
    assert sorted(again.began) == list(PAPER[:2]), "whom the grader failed is graded again, and nobody else"


def test_what_is_not_known_is_run_again_and_nobody_else(group, tmp_path):
    hand_in(group, "bob", {**reference("collectives.1"), **troubled("collectives.2", "not known", "it was ended")})
    out = tmp_path / "out"
    results = run(group, out)
    assert [(each["learner"], each["exercise"]) for each in results["not_known"]] == [("bob", "collectives.2")]
    (bob,) = [each for each in results["learners"] if each["learner"] == "bob"]
    assert (bob["status"], bob["points"]) == ("not known", 5)
    assert "has to be run again" in (out / "reports" / "bob.md").read_text()
    again = FakeSandbox()
    run(group, out, sandbox=again)
    assert sorted(again.began) == list(PAPER[:2])


def test_a_submission_that_cannot_be_read_is_a_fault_of_ours_and_the_others_are_graded(group, tmp_path, monkeypatch):
    def read(submission, spool, original=Submission.read):
        if submission.learner == "bob":
            raise MemoryError("too much")
        return original(submission, spool)

    monkeypatch.setattr(Submission, "read", read)
    results = run(group, tmp_path / "out")
    assert points(results) == {"anna": 15, "bob": 0, "cleo": 5, "dan": 0, "eve": 0}
    assert {each["learner"] for each in results["faults"]} == {"bob"}
    assert "MemoryError: too much" in results["faults"][0]["text"]


def test_a_sandbox_that_does_not_start_is_told_and_everybody_has_a_zero(group, tmp_path, monkeypatch):
    def refuse(*args, **options):
        raise OSError("no namespaces today")

    monkeypatch.setattr("dtlib.grading.sandbox.runner.Sandbox", refuse)
    results = grade(group, tmp_path / "out", exercises=PAPER)
    assert [each["status"] for each in results["learners"]] == ["not graded yet"] * 5
    assert "no namespaces today" in results["faults"][0]["text"]
    assert "no namespaces today" in (tmp_path / "out" / "report.md").read_text()


# What is written when


def test_nothing_of_a_submission_is_kept_in_memory(group, tmp_path):
    before = set(map(id, gc.get_objects()))
    results = run(group, tmp_path / "out", jobs=2)
    gc.collect()
    new = (each for each in gc.get_objects() if id(each) not in before)
    assert not any(type(each) in (Submission, Outcome, Observed) for each in new)
    assert len(results["learners"]) == 5


def test_a_learner_whose_files_cannot_be_written_stops_nobody(group, tmp_path, monkeypatch):
    original = report.write_learner

    def write(folder, file, record):
        if file == "bob":
            raise OSError(28, "No space left on device")
        original(folder, file, record)

    monkeypatch.setattr(report, "write_learner", write)
    results = run(group, tmp_path / "out")
    assert points(results) == {"anna": 15, "bob": 0, "cleo": 5, "dan": 0, "eve": 0}
    assert "No space left" in results["faults"][0]["text"]


# Bad input


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"exercises": ("collectives.77",)}, r"no exercise 'collectives.77'; the exercises: memory.1, "),
        ({"exercises": (), "chapters": ("alchemy",)}, r"no chapter 'alchemy'; the chapters: memory, collectives, dp"),
        ({"jobs": 0}, "jobs must be at least 1, not 0"),
        ({"seed": -1}, "seed must be from 0"),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(group, tmp_path, options, told):
    with pytest.raises(GradeError, match=told):
        run(group, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_bad_folders_are_refused_before_anything_is_written(group, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "results.json").write_text("{}")
    for submissions, out, told in (
        (tmp_path / "nowhere", tmp_path / "out", "there are no submissions at"),
        (tmp_path / "empty", tmp_path / "out", "holds no submission"),
        (group, tmp_path / "file", "out must be a folder"),
        (group, group, "must not lie inside"),
        (group, group / "out", "out must not lie inside the submissions"),
        (group, tmp_path, "the submissions must not lie inside out"),
        (group, tmp_path / "other", "out holds results.json, which dtlib did not write"),
        (group, tmp_path / "file" / "out", "out"),
    ):
        (tmp_path / "data").mkdir(exist_ok=True)
        before = sorted(tmp_path.glob("[!d]*/**"))
        with pytest.raises(GradeError, match=told):
            run(submissions, out)
        assert sorted(tmp_path.glob("[!d]*/**")) == before


def test_hostile_names_stay_in_the_folder(tmp_path):
    folder = tmp_path / "submissions"
    for name in (
        "=cmd|' /C calc'!A0",
        "<img src=x onerror=alert(1)>",
        "`rm -rf`",
        "a | b",
        "[x](http:x)",
        "\x1b[31mred",
    ):
        hand_in(folder, name.replace("/", "∕"), reference("collectives.2"))
    out = tmp_path / "out"
    results = run(folder, out, exercises=("collectives.2",))
    assert set(points(results).values()) == {5}
    assert len(list((out / "learners").iterdir())) == 6
    assert json.loads((out / "results.json").read_text())["class"]["graded"] == 6


# The seal


def test_a_right_and_a_wrong_answer_behind_real_walls(tmp_path):
    folder = tmp_path / "submissions"
    hand_in(folder, "anna", reference("collectives.2"))
    hand_in(folder, "Anna", {"collectives-2": HALF})
    results = grade(folder, tmp_path / "out", exercises=["collectives.2"], seed=SEED, jobs=2)
    assert results["faults"] == results["not_known"] == []
    assert points(results) == {"Anna": 3, "anna (2)": 5}
    assert results["alike"] == [("Anna", "anna (2)")]
    assert "Names that look alike" in (tmp_path / "out" / "report.md").read_text()
    again = grade(folder, tmp_path / "out", exercises=["collectives.2"])
    assert again["measured"]["kept"] == 2
