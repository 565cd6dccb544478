"""A class in shares: fair, in any order, killed and run again; joined to the report of one machine, or told why not."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys

import jsonschema
import pytest
from click.testing import CliRunner

from dtlib.cli import main
from dtlib.grading.classroom import fingerprint, report
from dtlib.grading.classroom.grader import GradeError
from dtlib.grading.classroom.shards import JoinError, Shard, join
from dtlib.grading.sandbox.walls.limits import Limits

from .answers import ROOT
from .classroom import PAPER, SEED, FakeSandbox, five, hand_in, load, points, reference, run, troubled, verdicts

pytestmark = pytest.mark.usefixtures("home")
NUM = 4


@pytest.fixture(autouse=True)
def _one_version(monkeypatch):
    monkeypatch.setattr(fingerprint, "of_grader", lambda: "0" * 64)  # an editor may save a file of ours meanwhile


def share(group, base, number, of=NUM, **options):
    """Grade a share as a machine of its own does, which has its own key; the folder of its results."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(base / f"machine-{number}"))
        out = base / f"results-{number}"
        run(group, out, shard=Shard(number, of), **options)
    return out


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """Four shares of the class, graded once, in another order."""
    base = tmp_path_factory.mktemp("graded")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fingerprint, "of_grader", lambda: "0" * 64)
        for number in (3, 1, 4, 2):
            share(five(base / "submissions"), base, number)
    return base


@pytest.fixture
def four(graded, tmp_path):
    for each in graded.glob("[mr]*"):
        shutil.copytree(each, tmp_path / each.name)
    return sorted(tmp_path.glob("results-*"))


# One that is killed


KILLED = """
import os, signal, sys
from pathlib import Path
from dtlib.grading.classroom import fingerprint
from dtlib.grading.classroom.grader import grade
from dtlib.grading.classroom.shards import Shard
from tests.grading.classroom import PAPER, FakeSandbox

class Deadly(FakeSandbox):
    def run(self, *args):
        if len(self.began) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().run(*args)

fingerprint.of_grader = lambda: "0" * 64
group, out = map(Path, sys.argv[1:])
grade(group, out, exercises=PAPER, seed=20261, jobs=1, sandbox=Deadly(), shard=Shard(2, 4))
"""


def test_four_shares_one_of_them_killed_and_repeated_are_one_machines_report(four, group, tmp_path, monkeypatch):
    run(group, tmp_path / "whole")
    shutil.rmtree(tmp_path / "results-2")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "machine-2"))
    command = [sys.executable, "-c", KILLED, str(group), str(tmp_path / "results-2")]
    killed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert killed.returncode == -9, killed.stderr
    with pytest.raises(JoinError, match=r"results-2 is not complete \(grading\): run shard 2/4 again"):
        join(four, tmp_path / "joined")
    assert not (tmp_path / "joined").exists()
    share(group, tmp_path, 2)
    joined = join(four, tmp_path / "joined")
    assert verdicts(tmp_path / "joined") == verdicts(tmp_path / "whole")
    for name in ("learners/anna.json", "reports/bob.md", "gradescope/cleo.json"):
        one, other = (tmp_path / base / name for base in ("whole", "joined"))
        if name.startswith("learners"):
            assert load(one)["fingerprint"] == load(other)["fingerprint"], "a later run keeps what was joined"
        else:
            assert one.read_text() == other.read_text()
    assert points(joined) == points(load(tmp_path / "whole" / "results.json"))
    jsonschema.validate(load(tmp_path / "joined" / "results.json"), report.schema())
    assert {path.name for path in (tmp_path / "joined").iterdir()} >= {"report.html", "scores.csv", "junit.xml"}


def test_the_order_of_the_folders_is_nothing_to_the_report(four, tmp_path):
    join(four, tmp_path / "one")
    join(four[::-1], tmp_path / "other")
    assert verdicts(tmp_path / "one") == verdicts(tmp_path / "other")


def test_each_pair_is_run_once_and_a_share_writes_its_own_alone(group, tmp_path):
    began = []
    for number in range(1, NUM + 1):
        sandbox = FakeSandbox()
        out = share(group, tmp_path, number, sandbox=sandbox)
        began += sandbox.began
        jsonschema.validate(load(out / "results.json"), report.schema())
        for path in (out / "learners").iterdir():
            jsonschema.validate(load(path), report.schema("learner"))
        assert not (out / "scores.csv").exists(), "no report of a part that somebody might hand back"
        assert not list((out / "gradescope").iterdir())
    assert sorted(began) == sorted(4 * PAPER), "of Eve's notebook nothing runs"


def test_a_share_that_is_done_is_kept_and_another_machines_is_not(group, tmp_path):
    share(group, tmp_path, 1)
    again = FakeSandbox()
    share(group, tmp_path, 1, sandbox=again)
    assert again.began == []
    (tmp_path / "machine-1").rename(tmp_path / "gone")
    share(group, tmp_path, 1, sandbox=again)
    assert again.began


def test_shares_that_are_dealt_anew_since_somebody_came_keep_nothing_that_is_no_longer_theirs(four, group, tmp_path):
    for name in ("ada", "zed"):
        hand_in(group, name, reference(*PAPER))
    for number in range(1, NUM + 1):
        share(group, tmp_path, number)
    join(four, tmp_path / "joined")
    run(group, tmp_path / "whole")
    assert verdicts(tmp_path / "joined") == verdicts(tmp_path / "whole")


def test_what_was_joined_is_kept_by_a_later_run(four, group, tmp_path):
    join(four, tmp_path / "joined")
    later = FakeSandbox()
    assert run(group, tmp_path / "joined", sandbox=later)["measured"]["kept"] == 5
    assert later.began == []


def test_without_a_wall_around_the_files_of_one_share_nobody_is_kept_later(four, group, tmp_path):
    share(group, tmp_path, 4, sandbox=FakeSandbox({"files": "the kernel refuses"}), fresh=True)
    joined = join(four, tmp_path / "joined")
    assert "no wall around the files" in joined["not_kept"]
    assert joined["walls"]["files"] == "the kernel refuses"
    assert run(group, tmp_path / "joined")["measured"]["kept"] == 0


def test_more_shares_than_there_is_to_grade(tmp_path):
    hand_in(tmp_path / "submissions", "anna", reference("collectives.2"))
    options = {"exercises": ("collectives.2",)}
    parts = [share(tmp_path / "submissions", tmp_path, number, 3, **options) for number in (1, 2, 3)]
    assert points(join(parts, tmp_path / "joined")) == {"anna": 5}


# What is never mixed


def other_seed(group, base):
    shutil.rmtree(base / "results-4")
    share(group, base, 4, seed=SEED + 1)


def other_exercises(group, base):
    shutil.rmtree(base / "results-4")
    share(group, base, 4, exercises=PAPER[:2])


def other_limits(group, base):
    share(group, base, 4, limits=Limits(exercise_seconds=33))


def other_number(group, base):
    shutil.rmtree(base / "results-4")
    share(group, base, 4, of=5)


def other_notebook(group, base):
    hand_in(group, "bob", reference(*PAPER))
    share(group, base, 4)


def somebody_new(group, base):
    hand_in(group, "zed")
    share(group, base, 4)


def other_version(group, base):
    text = (base / "results-4" / "results.json").read_text()
    (base / "results-4" / "results.json").write_text(text.replace("0" * 64, "1" * 64))


def twice(group, base):
    shutil.copytree(base / "results-3", base / "results-5")


def missing(group, base):
    shutil.rmtree(base / "results-2")


def two_missing(group, base):
    for number in (1, 3):
        shutil.rmtree(base / f"results-{number}")


def no_record(group, base):
    next((base / "results-2" / "learners").iterdir()).unlink()


def other_points(group, base):
    (path,) = (each for each in (base / "results-2" / "learners").iterdir() if each.name == "bob.json")
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "points": record["points"] + 1}))


def half_a_file(group, base):
    path = base / "results-2" / "results.json"
    path.write_text(path.read_text()[:500])


def nothing(group, base):
    (base / "results-5").mkdir()


def a_whole_class(group, base):
    run(group, base / "results-5")


def whole_classes(group, base):
    for each in base.glob("results-*"):
        shutil.rmtree(each)
    run(group, base / "results-5")
    shutil.copytree(base / "results-5", base / "results-6")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (other_seed, "results-4 has another seed than results-1"),
        (other_exercises, "results-4 has other exercises than results-1"),
        (other_limits, "results-4 has other limits than results-1"),
        (other_number, "results-1 is shard 1/4, and results-4 shard 4/5"),
        (other_notebook, "results-4 saw other submissions than results-1: grade both again"),
        (somebody_new, "results-4 saw other submissions than results-1: grade both again"),
        (other_version, r"results-4 was graded by dtlib \S+ \(1{12}\), and this is dtlib \S+ \(0{12}\)"),
        (twice, "results-3 and results-5 hold the same shard"),
        (missing, "of 4 shards these are missing: 2$"),
        (whole_classes, "results-[56] and results-[56] are each a whole class: give one of them"),
        (two_missing, "of 4 shards these are missing: 1, 3$"),
        (no_record, r"results-2 has no record of .*: run shard 2/4 again"),
        (other_points, r"results-2 has no record of bob \(it is not as results.json says\)"),
        (half_a_file, "results-2 holds no results of dtlib grade --shard"),
        (nothing, "results-5 holds no results of dtlib grade --shard"),
        (a_whole_class, "results-5 is shard 1/1, and results-1 shard 1/4"),
    ],
)
def test_what_is_no_class_is_told_and_nothing_is_written(four, group, tmp_path, change, told):
    change(group, tmp_path)
    result = CliRunner().invoke(main, ["report", *map(str, tmp_path.glob("results-*")), "--out", str(tmp_path / "out")])
    assert result.exit_code == 2, result.output
    said = re.sub(r"\s*│\s*|\s+", " ", result.output).strip()
    assert re.search(told.rstrip("$"), said), said
    with pytest.raises(JoinError, match=told):
        join([*tmp_path.glob("results-*")], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_results_do_not_go_where_a_share_or_another_class_lies(four, group, tmp_path):
    with pytest.raises(JoinError, match="out must not lie inside a share"):
        join(four, four[0])
    with pytest.raises(GradeError, match="out holds shard 1/4, and not shard 2/4"):
        run(group, four[0], shard=Shard(2, NUM))
    with pytest.raises(GradeError, match="out holds shard 1/4, and not a whole class"):
        run(group, four[0])
    run(group, tmp_path / "whole")
    with pytest.raises(GradeError, match="out holds a whole class, and not shard 2/4"):
        run(group, tmp_path / "whole", shard=Shard(2, NUM))


# The commands


def command(*words):
    return CliRunner().invoke(main, [*map(str, words)])


@pytest.mark.parametrize("shard", ["0/4", "5/4", "a/b", "3", "1/0", "-1/4", "1/4/2", " 1/4", "१/4", ""])
def test_a_share_that_cannot_be_is_named(group, tmp_path, shard):
    result = command("grade", group, "--out", tmp_path / "out", "--seed", 7, f"--shard={shard}")
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert f"--shard must be K/N with K from 1 to N, such as 3/16, not {shard!r}" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--shard", "1/4"], "a shard needs a seed"),
        (["--shard", "1/4", "--seed", 7, "--fail-under", 50], "give it to dtlib report"),
    ],
)
def test_what_a_share_needs_is_told(group, tmp_path, words, told):
    result = command("grade", group, "--out", tmp_path / "out", *words)
    assert result.exit_code == 2
    assert told in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


def test_the_commands_from_the_first_to_the_last(group, tmp_path, monkeypatch):
    monkeypatch.setattr(
        importlib.import_module("dtlib.grading.sandbox.runner"), "Sandbox", lambda *_, **__: FakeSandbox()
    )
    hand_in(group, "fay", {**reference(*PAPER), **troubled("collectives.1", "not known", "it waited")})
    chosen = [word for name in PAPER for word in ("--exercise", name)]
    codes, parts = [], []
    for number in (1, 2):
        parts.append(tmp_path / f"results-{number}")
        shard = ("--seed", SEED, "--shard", f"{number}/2")
        done = command("grade", group, "--out", parts[-1], *shard, *chosen)
        assert f"a share, for dtlib report: {parts[-1]}" in done.output.replace("\n", "")
        assert "mean" not in done.output, "of parts of exercises"
        codes.append(done.exit_code)
    assert sorted(codes) == [0, 4]
    joined = command("report", *parts, "--out", tmp_path / "out", "--fail-under", 50)
    assert joined.exit_code == 4
    assert "not known: fay collectives.1. Run the shards that had them again" in joined.output
    hand_in(group, "fay", reference(*PAPER))
    for number, part in enumerate(parts, start=1):
        assert command("grade", group, "--out", part, "--seed", SEED, "--shard", f"{number}/2", *chosen).exit_code == 0
    joined = command("report", *parts, "--out", tmp_path / "out", "--fail-under", 50)
    assert joined.exit_code == 1
    assert "under 50 %" in joined.output
    assert "report.html" in joined.output
    assert command("report", *parts, "--out", tmp_path / "out", "--quiet").output == ""
    assert command("report", *parts, "--out", tmp_path / "out", "--fail-under", 101).exit_code == 2


# Another push


def test_who_has_not_changed_is_kept_by_every_machine_and_the_rest_is_dealt(group, tmp_path):
    first = run(group, tmp_path / "class")
    hand_in(group, "bob", reference(*PAPER))
    hand_in(group, "zoe", reference("collectives.1"))
    options = {"seed": 99, "since": tmp_path / "class"}
    parts = [share(group, tmp_path, number, 2, **options) for number in (1, 2)]
    began = {name for part in parts for name in {each["learner"] for each in load(part / "results.json")["learners"]}}
    assert began == {"bob", "zoe"}
    for wrong in (None, tmp_path / "nowhere", parts[0]):
        with pytest.raises(JoinError, match="earlier results, which since must name"):
            join(parts, tmp_path / "joined", since=wrong)
    joined = join(parts, tmp_path / "joined", since=tmp_path / "class")
    seeds = {each["learner"]: each["seed"] for each in joined["learners"]}
    assert seeds == {**dict.fromkeys(seeds, SEED), "bob": 99, "zoe": 99}, "who hands in again meets other cases"
    before = {each["learner"]: each["points"] for each in first["learners"]}
    points = {each["learner"]: each["points"] for each in joined["learners"]}
    assert points == {**before, "bob": 15, "zoe": 5}
    assert joined["measured"]["kept"] == 4
    assert joined["walls"] == first["walls"]
    third = [share(group, tmp_path / "third", number, 2, seed=5, since=tmp_path / "joined") for number in (1, 2)]
    assert [load(each / "results.json")["learners"] for each in third] == [[], []], "nothing changed"
    assert verdicts(tmp_path / "joined")["scores.csv"] == (
        join(third, tmp_path / "again", since=tmp_path / "joined") and verdicts(tmp_path / "again")["scores.csv"]
    )


def test_one_machine_keeps_what_another_graded(group, tmp_path, monkeypatch):
    run(group, tmp_path / "class")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "another"))
    sandbox = FakeSandbox()
    kept = run(group, tmp_path / "here", seed=None, since=tmp_path / "class", sandbox=sandbox)
    assert (kept["measured"]["kept"], sandbox.began) == (5, [])
    run(group, tmp_path / "afresh", seed=None, since=tmp_path / "class", sandbox=sandbox, fresh=True)
    assert len(sandbox.began) == 12, "all but who cannot be read"
