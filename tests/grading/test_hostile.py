"""The bank of hostile submissions: each scores zero for its exercise, with a reason, and leaves nothing behind.

A control run shows each one's harm where the wall is off, so that we know what stopped it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from dtlib.grading.classroom import intake
from dtlib.grading.classroom.judging import grade_exercise
from dtlib.grading.classroom.report.record import Record
from dtlib.grading.exercises.catalogue import all_exercises
from dtlib.grading.sandbox.runner import Sandbox
from dtlib.grading.sandbox.walls import WALLS
from dtlib.grading.sandbox.walls.limits import Limits
from dtlib.theory.units import MiB

from . import hostile_world as outside
from .answers import ROOT
from .hostile_bank import HARMS, READ_WHOLE, Control, Hostile, hand_in, hostile_submissions, reference_notebook
from .hostile_needs import NEEDS
from .hostile_world import Naive, World

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the walls are those of Linux")

SEED = 20262
LIMITS = Limits(
    memory_bytes=400 * MiB, processes=32, output_bytes=MiB, cpu_seconds=2.0, patience_seconds=0.8, idle_seconds=2.0
)
BESIDE = {"collectives": "collectives.3", "dp": "dp.3"}
ON_RANKS = ("collectives.6", "dp.6")
FEW_CASES = 2  # of ranks, each in fresh processes: enough to earn points with
HOSTILE = hostile_submissions()
CONTROLS = [(hostile, control) for hostile in HOSTILE for control in hostile.controls]
# Of each kind and style the first; `make soak` takes them all.
FIRST = {(control.kind, control.style): (hostile, control) for hostile, control in reversed(CONTROLS)}.values()
OTHER_WALLS = ("clock", "judge", "meter", "intake")
LARGE_BYTES = 180 * MiB  # of memory: the bombs are a good deal larger
HANG_S = 0.8


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with outside.world() as built:
        yield built


@pytest.fixture(scope="module")
def sandbox(world: World) -> Iterator[Sandbox]:
    with Sandbox(LIMITS) as box:
        yield box


@pytest.fixture(scope="class")
def before(world: World) -> dict[str, str]:
    return outside.project()


@pytest.fixture(scope="class")
def marks() -> list[str]:
    return []


@pytest.fixture(scope="class")
def naive(world: World) -> Iterator[Naive]:
    grader = Naive(world.folder)
    yield grader
    grader.close()


@pytest.fixture(scope="class")
def open_environment(world: World) -> Iterator[Sandbox]:
    with Sandbox(LIMITS, without={"environment"}) as box:
        yield box


@contextlib.contextmanager
def lowered(sandbox: Sandbox, wall: str) -> Iterator[Sandbox]:
    """The same sandbox as ``Sandbox(without={wall})``, without the seconds that another one takes to start."""
    stood = sandbox.walls[wall]
    sandbox.walls[wall] = "left out"
    yield sandbox
    sandbox.walls[wall] = stood


def grade(sandbox: Sandbox, folder: Path, exercise: str, learner: str = "mallory", few: int = FEW_CASES) -> Record:
    """What the grader says about an exercise of a learner, by the same steps as `dtlib grade` takes."""
    asked = all_exercises()[exercise]
    draw = (lambda rng: asked.draw(rng)[:few]) if exercise in ON_RANKS or few == 1 else asked.draw
    return grade_exercise(sandbox, replace(asked, draw=draw), submission(folder, learner), SEED)


def submission(folder: Path, learner: str) -> intake.Submission:
    (found,) = [each for each in intake.find(folder) if each.learner == learner]
    found.read(tempfile.TemporaryFile())  # noqa: SIM115  it lives as long as what was found
    return found


def hand_in_beside_neighbour(hostile: Hostile, folder: Path, knows: dict[str, Any]) -> None:
    hand_in(hostile, folder / "mallory", knows)
    if hostile.handed_in in READ_WHOLE:
        (folder / "neighbour").mkdir()
        shutil.copy(ROOT / "solutions" / f"{hostile.stem}.ipynb", folder / "neighbour")


class TestBehindWalls:
    @pytest.mark.parametrize("hostile", HOSTILE, ids=[hostile.title for hostile in HOSTILE])
    def test_scores_zero_with_a_reason_and_leaves_nothing(
        self,
        hostile: Hostile,
        world: World,
        sandbox: Sandbox,
        before: dict[str, str],
        marks: list[str],
        tmp_path: Path,
        lacking: Callable[[str], None],
    ):
        if sandbox.walls.get(hostile.wall):
            lacking(f"this machine has no such wall: {sandbox.walls[hostile.wall]}")
        mark = outside.new_mark()
        marks.append(mark)
        hand_in_beside_neighbour(hostile, tmp_path, world.knows(mark))
        handed_in = outside.fingerprints(tmp_path / "mallory") if hostile.handed_in not in READ_WHOLE else {}
        results = outside.fingerprints(world.results)
        children = set(psutil.Process().children(recursive=True))

        # What never ends, or unpacks without an end, costs its whole time in each case: one is enough.
        graded = grade(sandbox, tmp_path, hostile.exercise, few=1 if hostile.wall in ("clock", "judge") else FEW_CASES)
        message = "\n".join([graded["reason"], *(check["message"] for check in graded["checks"])])
        assert graded["points"] == 0, message
        assert graded["status"] == ("fail" if hostile.handed_in != "linked folder" else "not attempted")
        assert re.search(hostile.reason, message, re.S), message
        assert len(message) < 10_000
        assert len(graded["measured"]["printed"]) < 50_000

        learner = "neighbour" if hostile.handed_in in READ_WHOLE else "mallory"
        other = grade(sandbox, tmp_path, BESIDE[hostile.stem], learner)
        assert other["points"] == all_exercises()[BESIDE[hostile.stem]].points, other

        assert set(psutil.Process().children(recursive=True)) <= children
        assert outside.processes(mark) == []
        assert outside.files(mark, world.folder, world.results) == []
        assert outside.fingerprints(world.results) == results
        assert not handed_in or outside.fingerprints(tmp_path / "mallory") == handed_in

    def test_nothing_comes_later_and_no_byte_of_the_project_has_changed(
        self, world: World, before: dict[str, str], marks: list[str]
    ):
        assert [mark for mark in marks if outside.processes(mark) or outside.files(mark, world.folder)] == []
        # Somebody may be working on the project meanwhile: what a case writes bears its mark, or leaves nothing over.
        for name, digest in before.items():
            content = (ROOT / name).read_bytes() if (ROOT / name).is_file() else b""
            if hashlib.sha256(content).hexdigest() != digest:
                assert content, f"{name} is empty or gone"
                assert not any(mark.encode() in content for mark in marks), f"{name} was changed"


class TestControls:
    @pytest.mark.parametrize(
        ("hostile", "control"),
        [pytest.param(*each, marks=() if each in FIRST else pytest.mark.soak) for each in CONTROLS],
        ids=[f"{hostile.title} ({control.kind} {control.style})" for hostile, control in CONTROLS],
    )
    def test_does_its_harm_where_the_wall_is_off(
        self,
        hostile: Hostile,
        control: Control,
        world: World,
        naive: Naive,
        sandbox: Sandbox,
        open_environment: Sandbox,
        tmp_path: Path,
        lacking: Callable[[str], None],
    ):
        if why_not := NEEDS.get(control.style, lambda: "")():
            lacking(why_not)
        mark = outside.new_mark()
        work = tmp_path / "work"
        work.mkdir()
        knows = world.knows(mark, None if control.harm == "results changed" else work)
        kept = {path: path.read_bytes() for path in world.results.iterdir()}
        try:
            if control.kind == "naive":
                harms = self.naively(hostile, control, naive, mark, work, knows)
            elif control.kind == "without":
                hand_in(hostile, tmp_path / "mallory", knows)
                box = open_environment if control.style == "environment" else sandbox
                with lowered(box, control.style):
                    graded = grade(box, tmp_path, hostile.exercise, few=100)
                harms = {"full marks"} if graded["points"] == all_exercises()[hostile.exercise].points else set()
            else:
                harms = self.in_the_notebook(hostile, knows)
            changed = {path: path.read_bytes() for path in world.results.iterdir()} != kept
            harms |= {"results changed"} if changed else set()
            harms |= {"file left"} if outside.files(mark, work) else set()
            assert control.harm in harms, self.printed(work)
        finally:
            outside.end_processes(mark)
            outside.remove(outside.files(mark, work, world.results))
            for path, content in kept.items():
                path.write_bytes(content)

    def naively(
        self, hostile: Hostile, control: Control, naive: Naive, mark: str, work: Path, knows: dict[str, Any]
    ) -> set[str]:
        folder = work.parent / "mallory"
        hand_in(hostile, folder, knows)
        if hostile.handed_in == "sparse file":
            os.truncate(folder / f"{hostile.stem}.ipynb", 200 * MiB)
        style = "" if control.style in NEEDS else control.style
        told = naive.grade(folder, work, hostile.exercise, style, HANG_S if control.harm == "hangs" else 30)
        harms = {
            "full marks": told["points"] == 5,
            "no verdict": told["points"] is None,
            "hangs": told["hangs"],
            "process left": bool(outside.processes(mark)),
            "memory": told["grown_bytes"] > LARGE_BYTES,
            "huge report": told["report_bytes"] > 10 * MiB,
        }
        with contextlib.suppress(ProcessLookupError):
            os.killpg(told["group"], signal.SIGKILL)
        return {harm for harm, done in harms.items() if done}

    def in_the_notebook(self, hostile: Hostile, knows: dict[str, Any]) -> set[str]:
        """What `grading.check` says, whose measuring happens in the learner's own process."""
        from dtlib.grading.classroom.check import judge

        asked = all_exercises()[hostile.exercise]
        setup = next(
            "".join(cell["source"]) for cell in reference_notebook(hostile.stem)["cells"] if cell["id"] == "setup"
        )
        source = setup.replace("grading, ", "") + "\n\n" + hostile.cell(knows)

        def answer(*arguments: Any) -> Any:  # runs in a rank, and so does whatever the cell patches
            space: dict[str, Any] = {}
            exec(source, space)
            return space[asked.function](*arguments)

        return {"full marks"} if judge(answer, asked, seed=SEED).status == "pass" else set()

    def printed(self, work: Path) -> str:
        output = work / "output.txt"
        return output.read_text(errors="replace")[-1000:] if output.exists() else "no output"


class TestBank:
    def test_there_are_more_than_the_promised_number(self):
        assert len(HOSTILE) >= 25

    def test_each_has_a_wall_and_a_control(self):
        for hostile in HOSTILE:
            assert hostile.wall in (*WALLS, *OTHER_WALLS), hostile.title
            assert hostile.controls, hostile.title
            assert {control.kind for control in hostile.controls} <= {"naive", "without", "notebook"}, hostile.title
            compile(hostile.source, hostile.title, "exec")
            re.compile(hostile.reason)

    def test_every_harm_is_shown_by_some_control(self):
        assert {control.harm for _, control in CONTROLS} == set(HARMS)

    def test_every_new_process_bears_the_mark(self):
        for hostile in HOSTILE:
            assert hostile.source.count("fork() == 0") <= hostile.source.count("begin_child("), hostile.title
