"""What sets the course up on other people's machines, and what they are told to type: it exists, and may do little."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib
from importlib.metadata import metadata
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner
from packaging.specifiers import SpecifierSet

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
            command = main.commands[words[1]]
            if words[2:]:  # a name alone is spoken of, not called
                command.make_context(words[1], words[2:])
        except (KeyError, click.ClickException) as error:
            return str(error)
    if program == "python" and words[1] == "-m" and words[2] in ("benchmarks", "grading.record_costs"):
        script = f"benchmarks/{words[3]}.py" if words[2] == "benchmarks" else "tests/grading/record_costs.py"
        return "" if (ROOT / script).is_file() else f"no such module: {script}"
    gone = [word for word in words[1:] if re.match(r"_ext/|tests\b", word) and not (ROOT / word).exists()]
    return "no such file" if gone else ""


@pytest.mark.parametrize("name", OURS)
def test_what_a_workflow_calls_is_there(name):
    for line in commands(name):
        for command in line.split(" && "):
            assert refused(command) == "", command


@pytest.mark.parametrize(
    "line",
    [
        "make dust", "dtlib memory llama3-70b --zeros 3", "dtlib memry", "python _ext/d.py", "pytest tests/gold",
        "python -m benchmarks gold",
    ],
)  # fmt: skip
def test_a_command_that_is_not_there_is_refused(line):
    assert refused(line)


PAGES = {name: (ROOT / name).read_text("utf-8") for name in ("README.md", "CONTRIBUTING.md")}


def typed(page: str) -> list[str]:
    """Each command of ours in a page's blocks of shell and in its prose, without what a comment says of it."""
    lines = [line for block in re.findall(r"^```sh\n(.*?)^```$", page, re.M | re.S) for line in block.splitlines()]
    lines += re.findall(r"`([^`\n]+ [^`\n]+)`", re.sub(r"^```.*?^```$", "", page, flags=re.M | re.S))
    found = [command for line in lines for command in line.partition(" #")[0].strip().split(" && ")]
    return [each for each in found if each and Path(each.split()[0]).name in ("make", "dtlib", "python", "pytest")]


@pytest.mark.parametrize("name", PAGES)
def test_what_a_reader_is_told_to_type_is_there(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("check.py").touch()  # for `dtlib parity`, which tests/lab/test_parity.py runs
    lines = typed(PAGES[name])
    assert len(lines) > 10
    assert {line: why for line in lines if (why := refused(line.partition(" >")[0]))} == {}


@pytest.mark.parametrize("name", PAGES)
def test_files_and_extras_that_a_page_names_are_there(name):
    text = re.sub(r"^```.*?^```$", "", PAGES[name], flags=re.M | re.S)
    files = re.findall(r"\]\(([^)]+)\)", text) + re.findall(r"`([\w.-]+/[\w.*/-]*)`", text)
    made = ("results/", "submissions/", "_build/")
    assert [file for file in files if not file.startswith(made) and not list(ROOT.glob(file))] == []
    assert len(files) > 5
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert {*re.findall(r"'\.\[(\w+)\]'", text)} <= {*extras}


ASKED = [line for line in typed(PAGES["README.md"]) if re.match(r"dtlib (?:memory|plan|explain) .", line)]


def test_the_commands_of_the_readme_answer(tmp_path, monkeypatch):
    """With a model's configuration, and runs of a cluster, of a reader's own."""
    monkeypatch.chdir(tmp_path)
    config = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256}
    config |= {"num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 8192}
    Path("config.json").write_text(json.dumps(config))
    runs = [f"{gpus},{tp},1,1,{steps},4096,1,9000\n" for gpus in (8, 16) for tp in (1, 2) for steps in (4, 8)]
    Path("runs.csv").write_text("gpus,tp,pp,mbs,grad_acc,seq,zero,tok_s_gpu\n" + "".join(runs))
    assert len(ASKED) == 10
    for line in ASKED:
        words, _, into = line.partition(" > ")
        done = CliRunner().invoke(main, shlex.split(words)[1:])
        assert done.exit_code == 0, (line, done.output)
        if into:
            Path(into).write_text(done.stdout)


def test_the_line_in_which_the_rooms_meet_runs(tmp_path, monkeypatch):
    codes = re.findall(r"^```python\n(.*?)^```$", PAGES["README.md"], re.M | re.S)
    (code,) = [each for each in codes if "lab.wire" in each]
    monkeypatch.setenv("DTLIB_LEDGER", str(tmp_path / "ledger.jsonl"))
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    (line,) = [json.loads(each) for each in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert (line["formula"], line["by"], line["passed"]) == ("collectives.ring_all_reduce_bytes", "wire", True)


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


def test_what_is_pinned_installs_on_the_first_python_of_the_course():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    first = project["requires-python"].removeprefix(">=")
    pinned = [line.partition("==")[0] for line in (ROOT / "requirements.txt").read_text("utf-8").split()]
    asked = {name: metadata(name).get("Requires-Python") for name in pinned}
    assert {name: rule for name, rule in asked.items() if f"{first}.0" not in SpecifierSet(rule or "")} == {}


@pytest.mark.parametrize("script", ["binder/postBuild", ".devcontainer/setup", ".ci/run"])
def test_scripts_are_shell(script):
    assert subprocess.run(["bash", "-n", ROOT / script]).returncode == 0
