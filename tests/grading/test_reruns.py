"""Who is done stays done, whatever happens: reruns, kills, interruptions, seals, and records that others wrote."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
import threading

import pytest

from dtlib.grading.classroom import fingerprint, report
from dtlib.grading.classroom.grader import GradeError
from dtlib.grading.classroom.report import folder as results_folder
from dtlib.grading.classroom.seals import Key
from dtlib.grading.sandbox.walls.limits import Limits

from .answers import ROOT
from .classroom import NAMES, PAPER, SEED, WALLS, FakeSandbox, hand_in, load, points, reference, run, verdicts

pytestmark = pytest.mark.usefixtures("home")


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
    for name in ("grading/exercises/dp.py", "lab/wire.py", "theory/units.py", "figures/style.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1")
    monkeypatch.setattr(fingerprint, "_PACKAGE", tmp_path)
    seen = {fingerprint.of_grader.__wrapped__()}
    for name in ("grading/exercises/dp.py", "lab/wire.py", "theory/units.py"):
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
from dtlib.grading.classroom import fingerprint
from dtlib.grading.classroom.grader import grade
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
    original = report.write_results
    monkeypatch.setattr(report, "write_results", lambda *args: (written.append(1), original(*args)))
    run(folder, tmp_path / "out", exercises=("collectives.2",))
    assert 10 < len(written) < 60


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


def test_a_seed_that_somebody_else_wrote_is_not_believed(group, tmp_path):
    out = tmp_path / "out"
    run(group, out)
    path = out / "learners" / "bob.json"
    path.write_text(path.read_text().replace(f'"seed": {SEED}', '"seed": 1'))
    results = run(group, out, seed=None)
    assert results["measured"]["kept"] == 4
    assert {each["learner"]: each["seed"] for each in results["learners"]}["bob"] not in (1, SEED)


# Really


def test_the_grader_does_not_import_torch(group, tmp_path):
    done = in_a_process(group, tmp_path / "out", "live")
    assert done.returncode == 0, done.stderr
