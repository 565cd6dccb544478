"""The files that set the course up on other people's machines: what they call exists, and they may do little."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import click
import pytest
import yaml

from dtlib.cli import main

ROOT = Path(__file__).parents[1]
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text("utf-8")) for path in (ROOT / ".github/workflows").glob("*.yml")}
OURS = ("book", "elsewhere", "links", "release", "tests")


def steps(name: str) -> list[dict]:
    return [step for job in WORKFLOWS[name]["jobs"].values() for step in job["steps"]]


def commands(name: str) -> list[str]:
    return [line for step in steps(name) for line in step.get("run", "").splitlines()]


def targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


def refused(line: str) -> str:
    """Why the project's own programs would not take the command `line`; "" where they do."""
    words = shlex.split(line)
    program = Path(words[0]).name
    if program == "make":
        return "" if {word for word in words[1:] if "=" not in word} <= targets() else "no such target"
    if program == "dtlib":
        try:
            main.commands[words[1]].make_context(words[1], words[2:])
        except (KeyError, click.ClickException) as error:
            return str(error)
    if "_ext/" in line:
        (script,) = [word for word in words if word.startswith("_ext/")]
        return "" if (ROOT / script).is_file() else "no such script"
    return ""


@pytest.mark.parametrize("name", OURS)
def test_what_a_workflow_calls_is_there(name):
    for line in commands(name):
        for command in line.split(" && "):
            assert refused(command) == "", command


@pytest.mark.parametrize(
    "line", ["make dust", "dtlib memory llama3-70b --zeros 3", "dtlib memry x", "python _ext/d.py"]
)
def test_a_command_that_is_not_there_is_refused(line):
    assert refused(line)


@pytest.mark.parametrize("name", OURS)
def test_a_workflow_reads_and_only_those_that_publish_write(name):
    assert WORKFLOWS[name]["permissions"] == {"contents": "read"} | (
        {"pages": "write", "id-token": "write"} if name == "book" else {}
    )
    writers = {job for job, each in WORKFLOWS[name]["jobs"].items() if each.get("permissions") == {"contents": "write"}}
    assert writers == {"book": {"launch"}, "release": {"publish"}}.get(name, set())
    assert not [line for line in commands(name) if "${{ github" in line or "${{ inputs" in line]


def test_a_release_is_of_a_tag_whose_notes_were_read_before_anything_was_built():
    assert WORKFLOWS["release"][True] == {"push": {"tags": ["v*"]}}
    order = "\n".join(commands("release"))
    assert order.index("dist.py notes") < order.index("dtlib release") < order.index("make dist")
    assert order.index("make dist") < order.index("gh release create")


def test_theory_and_commands_are_tried_on_three_systems():
    (job,) = WORKFLOWS["elsewhere"]["jobs"].values()
    assert {name.partition("-")[0] for name in job["strategy"]["matrix"]["os"]} == {"ubuntu", "macos", "windows"}
    readme = (ROOT / "README.md").read_text("utf-8")
    assert "| | Linux | macOS | Windows |" in readme
    assert "untested" in readme


def container() -> dict:
    text = (ROOT / ".devcontainer" / "devcontainer.json").read_text("utf-8")
    return json.loads(re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE))


def test_a_container_grants_what_walls_and_networks_need_and_opens_the_exercises():
    told = container()
    assert told["runArgs"] == [f"--security-opt={name}=unconfined" for name in ("seccomp", "apparmor", "systempaths")]
    (opened,) = told["customizations"]["codespaces"]["openFiles"]
    assert (ROOT / opened).is_file()
    setup = (ROOT / told["onCreateCommand"].split()[1]).read_text("utf-8")
    assert refused(setup.splitlines()[-1]) == ""
    assert "dtlib doctor" in told["postAttachCommand"]
    assert "/lab/tree/exercises" in told["postAttachCommand"]


def test_binder_installs_the_exact_versions_and_the_course():
    (wanted,) = (ROOT / "binder" / "requirements.txt").read_text("utf-8").split("-r ")[1:]
    assert (ROOT / "binder" / wanted.strip()).resolve() == ROOT / "requirements.txt"
    packages = (ROOT / "binder" / "apt.txt").read_text("utf-8").split()
    setup = (ROOT / ".devcontainer" / "setup").read_text("utf-8")
    assert set(packages) <= set(setup.split())
    assert (ROOT / "binder" / "postBuild").stat().st_mode & 0o111


def test_make_links_finds_the_extensions_of_the_book():
    recipe = subprocess.run(["make", "-n", "links"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (script,) = re.findall(r"sed ('.*?') _config.yml > _build/links.yml", recipe)
    done = subprocess.run(["bash", "-c", f"sed {script} _config.yml"], cwd=ROOT, capture_output=True, text=True)
    told = yaml.safe_load(done.stdout)
    assert told["execute"]["execute_notebooks"] == "off"
    places = told["sphinx"]["local_extensions"]
    assert places
    assert [
        name for name, folder in places.items() if not (ROOT / "_build" / folder / f"{name}.py").resolve().is_file()
    ] == []


@pytest.mark.parametrize("script", ["binder/postBuild", ".devcontainer/setup", ".ci/run"])
def test_scripts_are_shell(script):
    assert subprocess.run(["bash", "-n", ROOT / script]).returncode == 0
