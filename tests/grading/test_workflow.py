"""The workflow that an instructor copies: it grades with options that exist, with few rights, and nothing else runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import click
import pytest
import yaml

from dtlib.cli import main
from dtlib.grading.classroom.gradebook import read_roster

from .answers import ROOT
from .classroom import hand_in, load, reference

DTLIB = f"{sys.executable} -m dtlib.cli"
FILE = ROOT / ".github" / "workflows" / "grade.yml"
TEXT = FILE.read_text(encoding="utf-8")
WORKFLOW = yaml.safe_load(TEXT)
EVENTS = WORKFLOW[True]  # YAML 1.1 reads the key `on` as true
JOBS = WORKFLOW["jobs"]
STEPS = [step for job in JOBS.values() for step in job["steps"]]
RUN = [step["run"] for step in STEPS if "run" in step]


def options_of(line: str, name: str = "grade") -> dict:
    """What the command line makes of `line`; raises a ``ClickException`` where it refuses it."""
    words = shlex.split(line.partition(" || ")[0].replace("$SEED", "7").replace("$SHARD", "3/4"))
    assert words[:2] == ["dtlib", name]
    return main.commands[name].make_context(name, words[2:]).params


def lines(job: str) -> list[str]:
    return [line for step in JOBS[job]["steps"] for line in step.get("run", "").splitlines()]


def grade_line(job: str = "grade") -> str:
    (line,) = [line.strip() for line in lines(job) if "dtlib" in line]
    return line


def test_the_commands_are_those_that_dtlib_has():
    options = options_of(grade_line())
    told = {name: str(options[name]) for name in ("submissions", "out", "seed", "jobs", "shard", "since")}
    assert told == {"submissions": "submissions", "out": "results", "seed": "7", "jobs": "2", "shard": "3/4"} | {
        "since": "previous"
    }
    assert str(options_of(grade_line("report"), "report")["out"]) == "results"


def test_every_share_is_graded_with_one_seed_and_then_they_are_joined():
    grade, report = JOBS["grade"], JOBS["report"]
    shards = grade["strategy"]["matrix"]["shard"]
    assert shards == list(range(1, len(shards) + 1)), "--shard K/N goes from 1 to N"
    assert grade["strategy"]["fail-fast"] is False
    (env,) = [step["env"] for step in grade["steps"] if "env" in step]
    assert env == {"SEED": "${{ needs.begin.outputs.seed }}", "SHARD": "${{ matrix.shard }}/${{ strategy.job-total }}"}
    assert (grade["needs"], report["needs"], report["if"]) == ("begin", ["begin", "grade"], "${{ !cancelled() }}")
    upload, download = (
        next(
            step["with"]
            for step in job["steps"]
            if step.get("uses", "").startswith(f"actions/{action}-artifact@") and "results-" in str(step["with"])
        )
        for job, action in ((grade, "upload"), (report, "download"))
    )
    assert (upload["name"], upload["path"]) == ("results-${{ matrix.shard }}", "results")
    assert (download["pattern"], download["path"]) == ("results-*", "shards")
    assert "shards/results-*" in grade_line("report")


@pytest.mark.parametrize("typed", ["", "20261"])
def test_the_seed_is_the_one_that_was_typed_or_a_new_one(tmp_path, typed):
    drawn = set()
    for number in range(2):
        out = tmp_path / str(number)
        environment = {**os.environ, "SEED": typed, "GITHUB_OUTPUT": str(out)}
        subprocess.run(["bash", "-ec", lines("begin")[0]], env=environment, check=True)
        drawn.add(re.fullmatch(r"seed=(\d+)\n", out.read_text())[1])
    assert drawn == {typed} if typed else len(drawn) == 2


@pytest.mark.parametrize(
    ("old", "new"),
    [("--jobs 2", "--job-count 2"), ("--jobs 2", "--jobs two"), ("--out results", ""), ("--shard", "--part")],
)
def test_a_command_that_dtlib_lacks_is_refused(old: str, new: str):
    with pytest.raises(click.ClickException):
        options_of(grade_line().replace(old, new))


def test_it_starts_where_submissions_change_and_on_demand_alone():
    assert set(EVENTS) == {"push", "workflow_dispatch"}
    assert EVENTS["push"] == {"paths": ["submissions/**"]}
    assert not (ROOT / "submissions").exists(), "the course's own repository would grade"


def test_rights_and_credentials():
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert [job for job in JOBS.values() if "permissions" in job] == []
    checkouts = [step for step in STEPS if step.get("uses", "").startswith("actions/checkout@")]
    assert [each["with"]["persist-credentials"] for each in checkouts] == [False, False]
    assert "secrets." not in TEXT


def test_nothing_that_somebody_else_wrote_becomes_part_of_a_command():
    assert [script for script in RUN if "${{" in script] == []
    touched = [line.strip() for script in RUN for line in script.splitlines() if "submissions" in line]
    assert touched == [grade_line()]


def test_walls_are_let_up_before_anything_is_graded_and_the_report_is_shown_after():
    order = "\n".join(lines("grade"))
    assert order.index("pip install") < order.index("apparmor_restrict_unprivileged_userns=0")
    assert order.index("apparmor_restrict_unprivileged_userns=0") < order.index("dtlib grade")
    order = "\n".join(lines("report"))
    assert order.index("dtlib report") < order.index('results/report.md >> "$GITHUB_STEP_SUMMARY"')
    uploads = [step for step in STEPS if step.get("uses", "").startswith("actions/upload-artifact@")]
    assert [(each.get("if"), each["with"]["path"]) for each in uploads] == [(None, "previous")] + [
        ("always()", "results")
    ] * 2


def test_python_is_pinned_with_its_packages():
    setups = [step for step in STEPS if step.get("uses", "").startswith("actions/setup-python@")]
    assert [each["with"] for each in setups] == [{"python-version": "3.11", "cache": "pip"}] * 2
    assert sum("-r requirements.txt" in script for script in RUN) == 2


def test_what_is_graded_is_kept_for_the_next_push_and_everybody_starts_from_the_same():
    steps = {name: [step.get("uses", "").partition("@")[0] for step in job["steps"]] for name, job in JOBS.items()}
    assert "actions/cache/restore" in steps["begin"]
    assert [name for name in steps if "actions/cache/save" in steps[name]] == ["report"]
    (restored,) = [each["with"] for each in STEPS if each.get("uses", "").startswith("actions/cache/restore@")]
    (saved,) = [each["with"] for each in STEPS if each.get("uses", "").startswith("actions/cache/save@")]
    assert saved["path"] == restored["path"] == "previous"
    assert saved["key"].startswith(restored["restore-keys"])
    for name in ("grade", "report"):
        assert {"name": "previous", "path": "previous"} in [step.get("with") for step in JOBS[name]["steps"]]
        assert "--since previous" in grade_line(name)


@pytest.mark.parametrize(
    ("codes", "ended", "tries"), [("0", 0, 1), ("4 0", 0, 2), ("4 4", 0, 2), ("3", 3, 1), ("1", 1, 1)]
)
def test_what_is_not_known_is_tried_once_more_and_turns_nothing_red(tmp_path, codes, ended, tries):
    (tmp_path / "dtlib").write_text(
        f"""#!/bin/bash
n=$(cat {tmp_path}/n 2>/dev/null || echo 0); echo $((n + 1)) > {tmp_path}/n
codes=({codes}); exit "${{codes[$n]}}"
"""
    )
    (tmp_path / "dtlib").chmod(0o755)
    (script,) = [step["run"] for step in JOBS["grade"]["steps"] if "dtlib grade" in step.get("run", "")]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SEED": "1", "SHARD": "1/1"}
    done = subprocess.run(["bash", "-e", "-c", script], env=environment)
    assert (done.returncode, int((tmp_path / "n").read_text())) == (ended, tries)


PAGE = (ROOT / "chapters" / "grading.md").read_text("utf-8")
GH = """#!/bin/bash
case "$2" in
  repos/school/week1-[ab]*/tarball) cat "$HANDED_IN/${2//[^a-z0-9]/}.tgz" ;;
  repos/school/week1-[ab]*) echo 2001-11-26T10:00:00Z ;;
  *) exit 1 ;;
esac
"""


def test_the_collectors_lines_bring_what_each_handed_in_and_when(tmp_path):
    """Of three names: one has a repository, one's list was saved on Windows, and one has none."""
    (script,) = [each for each in re.findall(r"^```bash\n(.*?)^```$", PAGE, re.M | re.S) if "learners.txt" in each]
    for name in ("ada", "bob"):
        root = tmp_path / "in" / f"school-week1-{name}-1234567"
        root.mkdir(parents=True)
        (root / "dp.ipynb").write_text(name)
        tarball = tmp_path / "in" / f"reposschoolweek1{name}tarball.tgz"
        subprocess.run(["tar", "-czf", tarball, "-C", root.parent, root.name], check=True)
    programs, desk = tmp_path / "bin", tmp_path / "desk"
    for folder in (programs, desk / "submissions" / "ada"):
        folder.mkdir(parents=True)
    for name, text in (("gh", GH), ("git", '#!/bin/bash\necho "$*" >> git.log\n')):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (desk / "submissions" / "ada" / "old.ipynb").write_text("taken back since")
    (desk / "learners.txt").write_bytes(b"ada\nbob\r\n\nzoe")
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "ORG": "school"}
    environment["HANDED_IN"] = str(tmp_path / "in")
    subprocess.run(["bash", "-c", script], cwd=desk, env=environment, check=True, stderr=subprocess.DEVNULL)
    brought = {path.relative_to(desk / "submissions").as_posix(): path.read_text() for path in desk.rglob("*.ipynb")}
    assert brought == {"ada/dp.ipynb": "ada", "bob/dp.ipynb": "bob"}
    assert not (desk / "submissions" / "zoe").exists()
    times = {name: row["handed_in"] for name, row in read_roster(desk / "roster.csv").items()}
    assert times == {"ada": "2001-11-26T10:00:00Z", "bob": "2001-11-26T10:00:00Z", "zoe": ""}
    assert (desk / "git.log").read_text().splitlines()[-1] == "push"


def test_gradescopes_lines_leave_its_results(tmp_path):
    """The page's `run_autograder`, in folders of this test: a learner's exercise on paper."""
    (script,) = [each for each in re.findall(r"^```bash\n(.*?)^```$", PAGE, re.M | re.S) if "autograder" in each]
    hand_in(tmp_path / "autograder", "submission", reference("collectives.2"))
    (tmp_path / "autograder" / "results").mkdir()
    script = script.replace("/autograder/", f"{tmp_path}/autograder/").replace("/tmp/results", f"{tmp_path}/graded")
    script = script.replace("--chapter collectives", "--exercise collectives.2").replace(
        "dtlib grade", f"{DTLIB} grade"
    )
    subprocess.run(["bash", "-ec", script], env={**os.environ, "XDG_DATA_HOME": str(tmp_path / "data")}, check=True)
    told = load(tmp_path / "autograder" / "results" / "results.json")
    assert (told["score"], told["max_score"]) == (5, 5)
