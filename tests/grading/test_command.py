import importlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner
from rich.console import Console

from dtlib.grading.classroom import fingerprint, report
from dtlib.grading.classroom.roster import Event
from dtlib.grading.sandbox import runner as walls

from .answers import ROOT
from .classroom import HALF, PAPER, FakeSandbox, hand_in, load, reference, troubled

command = importlib.import_module("dtlib.cli.grade")  # the package has the command itself under this name
CHOSEN = tuple(word for name in PAPER for word in ("--exercise", name))


def invoke(*arguments):
    return CliRunner().invoke(command.grade, [*map(str, arguments)])


@pytest.fixture
def made(monkeypatch, tmp_path):
    """The sandboxes that the command made, and with what."""
    found = []

    def make(limits, hidden=()):
        found.append(FakeSandbox())
        found[-1].limits, found[-1].hidden = limits, hidden
        return found[-1]

    monkeypatch.setattr(walls, "Sandbox", make)
    monkeypatch.setattr(fingerprint, "of_grader", lambda: "0" * 64)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return found


@pytest.fixture
def handed_in(tmp_path, made):
    folder = tmp_path / "submissions"
    hand_in(folder, "anna", reference(*PAPER))
    hand_in(folder, "bob [red]x", {**reference("collectives.1"), "collectives-2": HALF})
    return folder


def test_a_class_is_graded_and_told_of(handed_in, tmp_path, made):
    out = tmp_path / "results"
    result = invoke(handed_in, "--out", out, "--seed", "7", *CHOSEN)
    assert result.exit_code == 0, result.output
    assert "anna: 15 of 15 points" in result.output
    assert "bob [red]x: 8 of 15 points" in result.output
    assert "2 learners graded\n" in result.output
    assert "mean 76.6 %, median 76.6 %, seed 7" in result.output
    assert "report.html" in result.output
    assert made[0].closed
    assert made[0].hidden == [handed_in, out, tmp_path / "data" / "dtlib"]
    again = invoke(handed_in, "--out", out, *CHOSEN)
    assert "2 of 2 learners are kept" not in again.output, "nothing had to begin"
    assert "2 learners graded, 2 of them kept" in again.output
    assert "seed 7" in again.output, "of the learners who were kept"
    assert len(made) == 1, "no sandbox is started for nothing"


def test_quiet_is_quiet(handed_in, tmp_path):
    result = invoke(handed_in, "--out", tmp_path / "results", "--quiet", *CHOSEN)
    assert (result.exit_code, result.output) == (0, "")


@pytest.mark.parametrize(("percent", "code"), [("0", 0), ("53", 0), ("53.4", 1), ("100", 1)])
def test_fail_under(handed_in, tmp_path, percent, code):
    result = invoke(handed_in, "--out", tmp_path / "results", "--fail-under", percent, *CHOSEN)
    assert result.exit_code == code
    assert (f"under {percent} %" in result.output) == bool(code)
    assert ("bob [red]x (53.3 %)" in result.output) == bool(code)


COMMANDS = ("::error title=Grading failed::", "  ::add-mask::5", "##[error]x", "a ##vso[task.complete result=Failed;]")


def grade_who_commands(folder, out):
    """Learners whose folders are named like commands to a CI system, each with another thing to tell of."""
    for name, trouble in zip(COMMANDS, ("fault", "not known", "", ""), strict=True):
        hand_in(folder, name, {**reference(*PAPER), **(troubled("collectives.1", trouble, name) if trouble else {})})
    told = [invoke(folder, "--out", out, "--seed", "7", *CHOSEN).output]
    for left_out in COMMANDS[:1], COMMANDS[:2]:  # the worst is told alone: then who is not known, who is under
        for name in left_out:
            shutil.rmtree(folder / name, ignore_errors=True)
        told.append(invoke(folder, "--out", out, "--fail-under", "100", *CHOSEN).output)
    told.append(invoke(folder / "##[group]nobody", "--out", out).output)  # refused
    return "\n".join(told)


def commands(log):
    return [line for line in log.splitlines() if line.lstrip().startswith("::") or "##" in line]


def test_no_name_of_a_folder_is_a_command_to_the_system_that_keeps_the_log(handed_in, tmp_path):
    log = grade_who_commands(handed_in, tmp_path / "results")
    assert commands(log) == []
    for said in (": :error title=Grading failed", ": :add-mask", "# #[error]x: 15", "# #vso[", "# #[group]nobody"):
        assert said in log, log
    assert "not known: " in log


def test_the_names_would_be_commands(handed_in, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "logged", lambda text: text)
    assert len(commands(grade_who_commands(handed_in, tmp_path / "results"))) > 4


def test_a_fault_of_the_grader_has_an_exit_code_of_its_own(handed_in, tmp_path):
    hand_in(handed_in, "cleo", {**reference(*PAPER), **troubled("collectives.1", "fault", "we fell over")})
    result = invoke(handed_in, "--out", tmp_path / "results", "--fail-under", "99", "--quiet", *CHOSEN)
    assert result.exit_code == 3
    assert "the grader itself failed on 1: cleo collectives.1 RuntimeError: we fell over" in result.output
    assert load(tmp_path / "results" / "results.json")["class"]["graded"] == 3


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyError("a bug of ours")])
def test_what_nobody_foresaw_is_no_verdict_on_learners(handed_in, tmp_path, monkeypatch, error):
    def fail(*arguments):
        raise error

    monkeypatch.setattr(report, "write_class", fail)
    result = invoke(handed_in, "--out", tmp_path / "results", "--fail-under", "99", *CHOSEN)
    assert result.exit_code == 3
    assert f"the grader itself failed: {type(error).__name__}: {error}" in result.output
    assert load(tmp_path / "results" / "results.json")["class"]["graded"] == 2, "who was graded is recorded"


def test_the_time_limit_reaches_the_sandbox(handed_in, tmp_path, made):
    assert invoke(handed_in, "--out", tmp_path / "results", "--timeout", "12.5", *CHOSEN).exit_code == 0
    assert made[0].limits.cpu_seconds == 12.5
    assert made[0].limits.wall_seconds == 1.25 * 120
    assert load(tmp_path / "results" / "results.json")["limits"]["cpu_seconds"] == 12.5


def test_a_short_time_limit_leaves_the_others_alone():
    usual, short = command.limits_of(None), command.limits_of(1)
    assert (short.cpu_seconds, short.wall_seconds) == (1, usual.wall_seconds)


def test_what_is_not_known_has_an_exit_code_of_its_own_and_is_run_again(handed_in, tmp_path, made):
    hand_in(handed_in, "cleo", {**reference(*PAPER), **troubled("collectives.1", "not known", "it waited")})
    result = invoke(handed_in, "--out", tmp_path / "results", "--fail-under", "99", *CHOSEN)
    assert result.exit_code == 4
    assert "not known: cleo collectives.1. Run the same command again" in result.output
    assert "cleo: 10 of 15 points, and not everything is known" in result.output
    hand_in(handed_in, "cleo", reference(*PAPER))
    assert invoke(handed_in, "--out", tmp_path / "results", *CHOSEN).exit_code == 0
    assert sorted(made[1].began) == sorted(PAPER), "each runs again, in whatever order the slots take them"


def test_learners_alike_are_told_on_the_terminal(handed_in, tmp_path):
    hand_in(handed_in, "Anna", reference(*PAPER))
    result = invoke(handed_in, "--out", tmp_path / "results", *CHOSEN)
    assert "these names look alike: Anna, anna (2)" in result.output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--fail-under", "101"], "--fail-under must be from 0 to 100, not 101"),
        (["--fail-under", "nan"], "--fail-under must be from 0 to 100, not nan"),
        (["--timeout", "0"], "--timeout must be a positive number of seconds, not 0"),
        (["--timeout", "inf"], "--timeout must be a positive number of seconds, not inf"),
        (["--jobs", "0"], "jobs must be at least 1, not 0"),
        (["--jobs", "two"], "'two' is not a valid integer"),
        (["--seed", "-5"], "seed must be from 0"),
        (["--chapter", "alchemy"], "there is no chapter 'alchemy'; the chapters: memory, collectives, dp"),
        (["--exercise", "dp.99"], "there is no exercise 'dp.99'; the exercises: memory.1,"),
    ],
)
def test_wrong_usage_is_told_before_anything_is_written(handed_in, tmp_path, arguments, told):
    result = invoke(handed_in, "--out", tmp_path / "results", *arguments)
    assert result.exit_code == 2
    assert told in " ".join(result.output.split())
    assert not (tmp_path / "results").exists()


def test_folders_that_cannot_be(handed_in, tmp_path):
    assert invoke(handed_in).exit_code == 2
    for submissions, out, told in (
        (tmp_path / "none", tmp_path / "results", "there are no submissions at"),
        (handed_in, handed_in / "results", "must not lie inside"),
        (handed_in, tmp_path, "must not lie inside"),
    ):
        result = invoke(submissions, "--out", out)
        assert result.exit_code == 2
        assert told in " ".join(result.output.split())


def test_the_exit_codes_are_documented():
    said = invoke("--help").output
    for code in ("0 ", "1 ", "2 ", "3 ", "4 ", "130 "):
        assert f"\n    {code}" in said


INTERRUPTED = """
import sys, threading
from dtlib.grading.classroom import fingerprint
from dtlib.grading.sandbox import runner as sandbox
from dtlib.cli.grade import grade
from tests.grading.classroom import FakeSandbox

class Slow(FakeSandbox):
    def run(self, *arguments):
        if len(self.began) == 4:
            print("now", flush=True)
            threading.Event().wait(3)
        return super().run(*arguments)

fingerprint.of_grader = lambda: "0" * 64  # an editor may save a file of ours between two runs
sandbox.Sandbox = lambda limits, hidden: Slow()
grade(sys.argv[1:])
"""


def test_control_c_keeps_what_is_done(handed_in, tmp_path):
    out = tmp_path / "results"
    command = [sys.executable, "-c", INTERRUPTED, handed_in, "--out", out, "--jobs", "1", *CHOSEN]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while process.stdout.readline() != "now\n":
        assert process.poll() is None
    while not (out / "learners" / "anna.json").exists():
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "run the same command again" in errors
    data = load(out / "results.json")
    assert data["state"] == "interrupted"
    assert [each["status"] for each in data["learners"]] == ["graded", "not graded yet"]
    result = invoke(handed_in, "--out", out, *CHOSEN)
    assert result.exit_code == 0
    assert "1 of 2 learners are kept" in result.output


def test_a_bar_on_a_terminal_and_lines_elsewhere(monkeypatch):
    events = [
        Event("reading anna", 1, 2),
        Event("1 of 2 learners are kept", 0, 3, is_line=True),
        Event("collectives.1 of [bold]anna, 2 ranks", 0, 3),
    ]
    for terminal, kind in ((True, "xterm"), (True, "dumb"), (False, "xterm")):
        monkeypatch.setenv("TERM", kind)
        file = io.StringIO()
        console = Console(file=file, force_terminal=terminal, width=100)
        with command.shown(console) as show:
            for event in events:
                show(event)
        bar = terminal and kind != "dumb"
        assert ("[bold]anna" in file.getvalue()) == bar
        assert ("1 of 2 learners are kept" in file.getvalue()) != bar


def test_grading_needs_no_torch_to_be_refused(tmp_path):
    code = (
        "import sys\nfrom dtlib.cli.grade import grade\n"
        f"try:\n    grade({json.dumps([str(tmp_path / 'none'), '--out', str(tmp_path / 'out')])})\n"
        "except SystemExit as stop:\n    assert stop.code == 2\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
