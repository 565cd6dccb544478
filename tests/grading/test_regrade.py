"""One exercise is graded again, and all else of an earlier run is kept."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from dtlib.grading.classroom import fingerprint
from dtlib.grading.classroom.gradebook import Gradebook
from dtlib.grading.classroom.grader import GradeError
from dtlib.grading.classroom.shards import Shard, join
from dtlib.grading.exercises.seen import Trouble
from dtlib.grading.sandbox.walls.limits import Limits

from .classroom import PAPER, SEED, FakeSandbox, hand_in, load, outcome, points, reference, run, troubled

pytestmark = pytest.mark.usefixtures("home")


def another_version(monkeypatch):
    """The checks were mended meanwhile."""
    monkeypatch.setattr(fingerprint, "of_grader", lambda: "0" * 64)
    monkeypatch.setattr(fingerprint, "version", lambda name="": "2.0")


def entries(out, learner, *left_out):
    return [each for each in load(out / "learners" / f"{learner}.json")["exercises"] if each["id"] not in left_out]


@pytest.mark.parametrize("meanwhile", [lambda _: None, another_version])
def test_one_exercise_is_graded_again_and_all_else_is_kept(group, tmp_path, monkeypatch, meanwhile):
    out = tmp_path / "out"
    run(group, out, seed=None)
    names = [path.stem for path in (out / "learners").iterdir()]
    kept = {name: entries(out, name, "collectives.2") for name in names}
    first = {name: load(out / "learners" / f"{name}.json") for name in names}
    os.utime(group / "bob" / "collectives.ipynb", (0, 0))  # a checkout
    meanwhile(monkeypatch)

    class Stricter(FakeSandbox):
        def run(self, exercise, answer, cases, tell=lambda done, words: None):
            found = super().run(exercise, answer, cases, tell)
            return outcome(replace(each, said=(), trouble=Trouble("raised", "no")) for each in found.observed)

    sandbox = Stricter()
    results = run(group, out, seed=None, sandbox=sandbox, regrade=["collectives.2"])
    assert sandbox.began == ["collectives.2"] * 4, "of Eve's notebook nothing runs"
    assert points(results) == {"anna": 10, "bob": 5, "cleo": 5, "dan": 0, "eve": 0}
    assert {name: entries(out, name, "collectives.2") for name in names} == kept
    for name, before in first.items():
        now = load(out / "learners" / f"{name}.json")
        assert (now["seed"], now["measured"]["handed_in"]) == (before["seed"], before["measured"]["handed_in"])
        assert now["grader"]["version"] == fingerprint.version()
    assert run(group, out, seed=None, sandbox=(later := FakeSandbox()))["measured"]["kept"] == 5
    assert later.began == [], "and what was put together stands"


def test_who_handed_in_again_is_graded_as_a_whole(group, tmp_path):
    out = tmp_path / "out"
    run(group, out, seed=None)
    hand_in(group, "bob", reference(*PAPER))
    sandbox = FakeSandbox()
    assert points(run(group, out, seed=None, sandbox=sandbox, regrade=["collectives.2"]))["bob"] == 15
    assert sorted(sandbox.began) == ["collectives.1", *["collectives.2"] * 4, "collectives.3"]


def test_what_was_not_known_is_graded_again_alone(group, tmp_path):
    out = tmp_path / "out"
    unknown = {**reference(*PAPER), **troubled("collectives.2", "not known", "it was ended")}
    hand_in(group, "bob", unknown)
    run(group, out)
    sandbox = FakeSandbox()
    assert points(run(group, out, sandbox=sandbox, regrade=["collectives.1"]))["bob"] == 10
    assert sorted(sandbox.began) == [*["collectives.1"] * 4, "collectives.2", "collectives.3"], "bob's as a whole"
    run(group, out, sandbox=(sandbox := FakeSandbox()), regrade=["collectives.2"])
    assert sandbox.began == ["collectives.2"] * 4


def test_points_by_hand_and_lateness_outlive_a_regrade(group, tmp_path):
    out, shown = tmp_path / "out", tmp_path / "class"
    run(group, out)
    by_hand = {("bob", "collectives.1"): {"points": "1", "comment": "copied"}}
    book = Gradebook(None, by_hand, deadline="2000-01-01", late_percent=0.001)
    join([out], shown, book)
    before = (shown / "scores.csv").read_text()
    assert ",1," in next(line for line in before.splitlines() if line.startswith("bob"))
    os.utime(group / "bob" / "collectives.ipynb", (0, 0))
    run(group, tmp_path / "new", regrade=["collectives.2"], since=shown)
    run(group, out, regrade=["collectives.2"])
    for each in (out, tmp_path / "new"):
        join([each], shown, book)
        assert (shown / "scores.csv").read_text() == before


@pytest.mark.parametrize(
    "more", [{"seed": SEED + 1}, {"limits": Limits(5.0)}, {"exercises": PAPER[:2]}, {"out": "new"}]
)
def test_a_regrade_that_finds_nothing_to_keep_is_refused(group, tmp_path, more):
    run(group, tmp_path / "out")
    before = (tmp_path / "out" / "results.json").read_bytes()
    asked = {"regrade": ["collectives.1"], **more}
    with pytest.raises(GradeError, match="regrade must find an earlier run to keep"):
        run(group, tmp_path / asked.pop("out", "out"), sandbox=(sandbox := FakeSandbox()), **asked)
    assert sandbox.began == []
    assert (tmp_path / "out" / "results.json").read_bytes() == before
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("more", [{"fresh": True}, {"shard": Shard(1, 2)}, {"regrade": ["tp.1"]}])
def test_a_regrade_that_means_nothing_is_refused(group, tmp_path, more):
    with pytest.raises(GradeError, match="regrade"):
        run(group, tmp_path / "out", **{"regrade": ["collectives.1"], **more})
