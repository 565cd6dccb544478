"""The workflow that an instructor copies: it grades with options that exist, with few rights, and nothing else runs."""

from __future__ import annotations

import re
import shlex

import click
import pytest
import yaml

from dtlib.cli import main

from .answers import ROOT

FILE = ROOT / ".github" / "workflows" / "grade.yml"
TEXT = FILE.read_text(encoding="utf-8")
WORKFLOW = yaml.safe_load(TEXT)
EVENTS = WORKFLOW[True]  # YAML 1.1 reads the key `on` as true
(JOB,) = WORKFLOW["jobs"].values()
STEPS = JOB["steps"]
RUN = [step["run"] for step in STEPS if "run" in step]


def grade_options(line: str) -> dict:
    """What the command line makes of `line`; raises a ``ClickException`` where it refuses it."""
    words = shlex.split(re.sub(r"\$\{SEED:\+(.*?)\}", r"\1", line).replace("$SEED", "7"))
    assert words[:2] == ["dtlib", "grade"]
    return main.commands["grade"].make_context("grade", words[2:]).params


def grade_line() -> str:
    (line,) = [line for script in RUN for line in script.splitlines() if "dtlib" in line]
    return line


def test_the_command_is_one_that_dtlib_has():
    options = grade_options(grade_line())
    assert (str(options["submissions"]), str(options["out"]), options["seed"], options["jobs"]) == (
        "submissions",
        "results",
        7,
        2,
    )


@pytest.mark.parametrize(
    ("old", "new"), [("--jobs 2", "--job-count 2"), ("--jobs 2", "--jobs two"), ("--out results", "")]
)
def test_a_command_that_dtlib_lacks_is_refused(old: str, new: str):
    with pytest.raises(click.ClickException):
        grade_options(grade_line().replace(old, new))


def test_it_starts_where_submissions_change_and_on_demand_alone():
    assert set(EVENTS) == {"push", "pull_request", "workflow_dispatch"}
    assert EVENTS["push"] == EVENTS["pull_request"] == {"paths": ["submissions/**"]}
    assert not (ROOT / "submissions").exists(), "the course's own repository would grade"


def test_rights_and_credentials():
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert "permissions" not in JOB
    (checkout,) = [step for step in STEPS if step.get("uses", "").startswith("actions/checkout@")]
    assert checkout["with"]["persist-credentials"] is False
    assert "secrets." not in TEXT


def test_nothing_that_somebody_else_wrote_becomes_part_of_a_command():
    assert [script for script in RUN if "${{" in script] == []
    touched = [line for script in RUN for line in script.splitlines() if "submissions" in line]
    assert touched == [grade_line()]


def test_walls_are_let_up_before_anything_is_graded_and_the_report_is_shown_after():
    order = "\n".join(RUN)
    assert order.index("pip install") < order.index("apparmor_restrict_unprivileged_userns=0")
    assert order.index("apparmor_restrict_unprivileged_userns=0") < order.index("dtlib grade")
    assert order.index("dtlib grade") < order.index('results/report.md >> "$GITHUB_STEP_SUMMARY"')
    (upload,) = [step for step in STEPS if step.get("uses", "").startswith("actions/upload-artifact@")]
    assert (upload["if"], upload["with"]["path"]) == ("always()", "results")


def test_python_is_pinned_with_its_packages():
    (setup,) = [step for step in STEPS if step.get("uses", "").startswith("actions/setup-python@")]
    assert setup["with"] == {"python-version": "3.11", "cache": "pip"}
    assert any("-r requirements.txt" in script for script in RUN)
