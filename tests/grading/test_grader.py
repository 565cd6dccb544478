import fcntl
import gc
import json
import shutil
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from dtlib.grading import fingerprint, grader
from dtlib.grading.checks import all_exercises
from dtlib.grading.grader import GradeError, grade
from dtlib.grading.intake import Submission
from dtlib.grading.judging import grade_exercise
from dtlib.grading.report import folder as results_folder
from dtlib.grading.sandbox import Cell, Outcome
from dtlib.grading.seals import Key
from dtlib.grading.seen import Observed, Trouble
from dtlib.grading.walls.limits import Limits

from .answers import ROOT
from .classroom import (
    HALF,
    PAPER,
    SEED,
    WALLS,
    FakeSandbox,
    hand_in,
    load,
    notebook,
    outcome,
    reference,
    troubled,
    verdicts,
)

NAMES = ["anna", "bob", "cleo", "dan", "eve"]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Where the key of this machine lies meanwhile."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "data" / "dtlib"


@pytest.fixture
def group(tmp_path):
    """A folder of five: all right, half of one, a limit, blank, and a notebook that cannot be read."""
    folder = tmp_path / "submissions"
    hand_in(folder, "anna", reference(*PAPER))
    hand_in(folder, "bob", {**reference("collectives.1"), "collectives-2": HALF})
    hand_in(folder, "cleo", {**reference("collectives.1"), **troubled("collectives.2", "limit")})
    hand_in(folder, "dan")
    hand_in(folder, "eve").write_text("{not json")
    return folder


def run(group, out, **options):
    sandbox = options.pop("sandbox", None) or FakeSandbox()
    options.setdefault("exercises", PAPER)
    options.setdefault("seed", SEED)
    return grade(group, out, sandbox=sandbox, **options)


def points(results):
    return {each["learner"]: each["points"] for each in results["learners"]}


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
        for kind in (f"learners/{name}.json", f"reports/{name}.md", f"gradescope/{name}.json"):
            files.remove(kind)
    assert files == [".dtlib-grade.lock", "junit.xml", "report.html", "report.md", "results.json", "scores.csv"]


def test_two_runs_with_one_seed_are_the_same_whatever_the_number_of_jobs(group, tmp_path):
    run(group, tmp_path / "one", jobs=1)
    run(group, tmp_path / "two", jobs=3)
    assert verdicts(tmp_path / "one") == verdicts(tmp_path / "two")


def test_the_seed_is_drawn_recorded_and_used_again(group, tmp_path):
    first = run(group, tmp_path / "one", seed=None)["seed"]
    assert load(tmp_path / "one" / "results.json")["seed"] == first
    assert run(group, tmp_path / "one", seed=None)["seed"] == first
    assert run(group, tmp_path / "two", seed=None)["seed"] != first
    assert run(group, tmp_path / "one", seed=first + 1)["seed"] == first + 1
    assert f"seed={first + 1}" in (tmp_path / "one" / "reports" / "bob.md").read_text()


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
    submission = SimpleNamespace(cells=lambda stem: [cell], problem=lambda stem: ("", True), fault=None)
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
    submission = SimpleNamespace(cells=lambda stem: [], problem=lambda stem: ("", True), fault=None)
    sandbox = SimpleNamespace(run=lambda *args: Outcome([]))
    entry = grade_exercise(sandbox, all_exercises()["collectives.2"], submission, SEED)
    assert (entry["status"], entry["reason"]) == ("error", "RuntimeError: 0 of 7 cases came back")


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
    assert sorted(again.began) == list(PAPER), "whom the grader failed is graded again, and nobody else"


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
    assert sorted(again.began) == list(PAPER)


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

    monkeypatch.setattr("dtlib.grading.sandbox.Sandbox", refuse)
    results = grade(group, tmp_path / "out", exercises=PAPER)
    assert [each["status"] for each in results["learners"]] == ["not graded yet"] * 5
    assert "no namespaces today" in results["faults"][0]["text"]
    assert "no namespaces today" in (tmp_path / "out" / "report.md").read_text()


# What is written when


def test_zeros_are_written_before_anything_is_graded(group, tmp_path):
    out = tmp_path / "out"
    seen = []

    class Looking(FakeSandbox):
        def run(self, *args):
            if not seen:
                seen.append(load(out / "results.json"))
                seen.append(load(out / "gradescope" / "anna.json"))
            return super().run(*args)

    run(group, out, sandbox=Looking(), jobs=1)
    zeros, gradescope = seen
    assert zeros["state"] == "grading"
    assert [each["status"] for each in zeros["learners"]] == ["not graded yet"] * 5
    assert {each["points"] for each in zeros["learners"]} == {0}
    assert zeros["max_points"] == 15
    assert gradescope["score"] == 0
    assert sum(test["max_score"] for test in gradescope["tests"]) == 15


def test_a_learner_who_is_done_is_skipped(group, tmp_path):
    out = tmp_path / "out"
    run(group, out)
    before = verdicts(out)
    untouched = (out / "learners" / "anna.json").stat().st_mtime_ns
    second = FakeSandbox()
    assert run(group, out, sandbox=second, seed=None)["measured"]["kept"] == 5
    assert second.began == []
    assert verdicts(out) == before
    assert (out / "learners" / "anna.json").stat().st_mtime_ns == untouched


def changed_notebook(group, out, monkeypatch):
    hand_in(group, "bob", reference(*PAPER))
    return {}


def other_seed(group, out, monkeypatch):
    return {"seed": SEED + 1}


def other_exercises(group, out, monkeypatch):
    return {"exercises": PAPER[:2]}


def other_limits(group, out, monkeypatch):
    return {"limits": Limits(exercise_seconds=33)}


def other_grader(group, out, monkeypatch):
    monkeypatch.setattr(fingerprint, "of_grader", lambda: "0" * 64)
    return {}


def fresh(group, out, monkeypatch):
    return {"fresh": True}


def half_a_file(group, out, monkeypatch):
    path = out / "learners" / "bob.json"
    path.write_text(path.read_text()[:500])
    return {}


def forged(group, out, monkeypatch):
    """Somebody writes a record with full marks, and a seal by a key of his own."""
    monkeypatch.setenv("XDG_DATA_HOME", str(out.parent / "elsewhere"))
    path = out / "learners" / "bob.json"
    record = load(path)
    del record["seal"]
    path.write_text(Key().sealed({**record, "points": 15}))
    monkeypatch.setenv("XDG_DATA_HOME", str(out.parent / "data"))
    return {}


def another_machine(group, out, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(out.parent / "elsewhere"))
    return {}


def another_number(group, out, monkeypatch):
    path = out / "learners" / "bob.json"
    path.write_text(path.read_text().replace('"points": 8', '"points": 15'))
    return {}


@pytest.mark.parametrize(
    ("change", "regraded"),
    [
        (changed_notebook, ["bob"]),
        (half_a_file, ["bob"]),
        (another_number, ["bob"]),
        (forged, ["bob"]),
        (another_machine, "all"),
        (other_seed, "all"),
        (other_exercises, "all"),
        (other_limits, "all"),
        (other_grader, "all"),
        (fresh, "all"),
    ],
)
def test_who_is_graded_again(group, tmp_path, monkeypatch, change, regraded):
    out = tmp_path / "out"
    run(group, out)
    options = change(group, out, monkeypatch)
    done = []
    results = run(group, out, progress=lambda event: done.append(event), **options)
    names = sorted(event.learner for event in done if event.learner)
    assert names == (NAMES if regraded == "all" else regraded)
    assert points(results)["bob"] == (15 if change is changed_notebook else 8)


def test_the_fingerprint_covers_every_source_that_grades(tmp_path, monkeypatch):
    for name in ("grading/checks/dp.py", "lab/wire.py", "theory/units.py", "figures/style.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1")
    monkeypatch.setattr(fingerprint, "_PACKAGE", tmp_path)
    seen = {fingerprint.of_grader.__wrapped__()}
    for name in ("grading/checks/dp.py", "lab/wire.py", "theory/units.py"):
        (tmp_path / name).write_text("x = 2")
        seen.add(fingerprint.of_grader.__wrapped__())
    assert len(seen) == 4
    (tmp_path / "figures/style.py").write_text("x = 2")
    assert fingerprint.of_grader.__wrapped__() in seen


def test_files_that_were_removed_come_back_without_grading(group, tmp_path):
    out = tmp_path / "out"
    run(group, out)
    before = (out / "reports" / "bob.md").read_text()
    (out / "reports" / "bob.md").unlink()
    second = FakeSandbox()
    run(group, out, sandbox=second)
    assert (out / "reports" / "bob.md").read_text() == before
    assert second.began == []


def test_who_is_gone_is_dropped_and_files_of_others_stay(group, tmp_path):
    out = tmp_path / "out"
    run(group, out)
    shutil.rmtree(group / "bob")
    shutil.rmtree(group / "cleo")
    (out / "reports" / "cleo.md").write_text("my own notes on Cleo")
    (out / "learners" / "notes.json").write_text('{"schema": "mine"}')
    (out / "reports" / "grades.md").write_text("mine")
    results = run(group, out)
    assert list(points(results)) == ["anna", "dan", "eve"]
    left = {path.name for path in (out / "learners").iterdir()} | {path.name for path in (out / "reports").iterdir()}
    assert left == {
        *("anna.json", "dan.json", "eve.json", "notes.json"),
        *("anna.md", "dan.md", "eve.md", "cleo.md", "grades.md"),
    }
    assert "bob" not in (out / "scores.csv").read_text()


def test_an_interruption_keeps_who_is_done_and_a_rerun_ends_with_the_same_scores(group, tmp_path):
    run(group, tmp_path / "whole")
    out = tmp_path / "out"

    interrupted = threading.Event()

    class Slow(FakeSandbox):
        def run(self, *args):
            if len(self.began) == 8:
                assert interrupted.wait(60)
            return super().run(*args)

    def interrupt(event):
        if event.learner == "bob":
            interrupted.set()
            raise KeyboardInterrupt

    results = run(group, out, sandbox=Slow(), progress=interrupt, jobs=1)
    assert results["state"] == "interrupted"
    data = load(out / "results.json")
    assert data["state"] == "interrupted"
    status = {each["learner"]: each["status"] for each in data["learners"]}
    assert status["anna"] == status["bob"] == "graded"
    assert status["eve"] == "not graded yet"
    assert "Interrupted" in (out / "report.md").read_text()
    assert len((out / "scores.csv").read_text().splitlines()) == 6
    second = FakeSandbox()
    assert run(group, out, sandbox=second)["measured"]["kept"] >= 2
    assert verdicts(out) == verdicts(tmp_path / "whole")
    assert len(second.began) <= 6
    assert threading.active_count() < 10


KILLED = """
import os, signal, sys, time
from pathlib import Path
from dtlib.grading import fingerprint
from dtlib.grading.grader import grade
from tests.grading.classroom import PAPER, FakeSandbox

class Deadly(FakeSandbox):
    def run(self, *args):
        if len(self.began) == 7:
            while not Path(sys.argv[2], "learners", "bob.json").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().run(*args)

fingerprint.of_grader = lambda: "0" * 64  # an editor may save a file of ours between two runs
sandbox = (Deadly if sys.argv[3] == "die" else FakeSandbox)()
grade(Path(sys.argv[1]), Path(sys.argv[2]), exercises=PAPER, seed=20261, jobs=1, sandbox=sandbox)
heavy = {"torch", "dtlib.ranks"} & set(sys.modules)
assert not heavy, heavy
print(len(sandbox.began))
"""


def in_a_process(*arguments):
    command = [sys.executable, "-c", KILLED, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_a_grader_that_was_killed_finishes_with_the_same_scores(group, tmp_path):
    run(group, tmp_path / "whole")
    killed = in_a_process(group, tmp_path / "out", "die")
    assert killed.returncode == -9, killed.stderr
    assert load(tmp_path / "out" / "results.json")["state"] == "grading"
    half_written = tmp_path / "out" / "learners" / ".dtlib-grade-0123.tmp"
    half_written.write_text("{")
    done = in_a_process(group, tmp_path / "out", "live")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 6, "Cleo and Dan, three exercises each"
    assert verdicts(tmp_path / "out") == verdicts(tmp_path / "whole")
    assert not half_written.exists()


def test_the_grader_does_not_import_torch(group, tmp_path):
    done = in_a_process(group, tmp_path / "out", "live")
    assert done.returncode == 0, done.stderr


def test_two_graders_do_not_write_to_one_folder(group, tmp_path):
    out = tmp_path / "out"
    run(group, out)
    with (out / results_folder.LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(GradeError, match="another dtlib grade is writing to"):
            run(group, out)
    run(group, out)


def test_results_are_refreshed_a_bounded_number_of_times(tmp_path, monkeypatch):
    folder = tmp_path / "submissions"
    for number in range(60):
        hand_in(folder, f"learner {number:03}")
    written = []
    original = grader.report.write_results
    monkeypatch.setattr(grader.report, "write_results", lambda *args: (written.append(1), original(*args)))
    run(folder, tmp_path / "out", exercises=("collectives.2",))
    assert 10 < len(written) < 60


def test_nothing_of_a_submission_is_kept_in_memory(group, tmp_path):
    results = run(group, tmp_path / "out", jobs=2)
    gc.collect()
    kept = [each for each in gc.get_objects() if type(each) in (Submission, Outcome, Observed)]
    assert kept == []
    assert len(results["learners"]) == 5


def test_a_learner_whose_files_cannot_be_written_stops_nobody(group, tmp_path, monkeypatch):
    original = grader.report.write_learner

    def write(folder, file, record):
        if file == "bob":
            raise OSError(28, "No space left on device")
        original(folder, file, record)

    monkeypatch.setattr(grader.report, "write_learner", write)
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


def test_the_key_lies_apart_and_nobody_else_can_read_it(group, tmp_path, home):
    results = run(group, tmp_path / "out")
    assert results["not_kept"] == ""
    (key,) = home.iterdir()
    assert (key.stat().st_mode & 0o777, key.stat().st_size) == (0o600, 32)
    for path in (tmp_path / "out").rglob("*.json"):
        assert key.read_bytes().hex() not in path.read_text()
    key.chmod(0o644)
    assert "others could read it" in run(group, tmp_path / "out")["not_kept"]
    assert run(group, tmp_path / "out")["measured"]["kept"] == 0


@pytest.mark.parametrize("where", ["submissions", "out"])
def test_the_key_never_lies_in_the_submissions_or_the_results(group, tmp_path, monkeypatch, where):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / where / "data"))
    for _ in range(2):
        results = run(group, tmp_path / "out")
        assert "it would lie in" in results["not_kept"]
        assert results["measured"]["kept"] == 0
    assert not list(tmp_path.rglob("grade.key"))


def test_without_a_wall_around_the_files_no_record_is_believed_later(group, tmp_path, home):
    out = tmp_path / "out"
    run(group, out)
    bare = {**dict.fromkeys(WALLS, ""), "files": "the kernel refuses"}

    class Looking(FakeSandbox):
        def run(self, *args):
            assert not list(home.iterdir()), "there is no key to be read"
            (home / "grade.key").write_bytes(b"x" * 32)  # the submission lays one that it knows
            (home / "grade.key").chmod(0o600)
            result = super().run(*args)
            (home / "grade.key").unlink()
            return result

    results = run(group, out, sandbox=Looking(bare), seed=SEED + 1, jobs=1)
    assert results["faults"] == []
    assert "no wall around the files" in results["not_kept"]
    assert "No record is kept" in (out / "report.md").read_text()
    assert not list(home.iterdir())
    assert run(group, out, seed=SEED + 1)["measured"]["kept"] == 0


def test_a_seed_that_somebody_else_wrote_is_not_used(group, tmp_path):
    out = tmp_path / "out"
    run(group, out)
    path = out / "results.json"
    path.write_text(path.read_text().replace(f'"seed": {SEED}', '"seed": 1'))
    assert run(group, out, seed=None)["seed"] not in (1, SEED)


# Really


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
