import importlib
import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from dtlib import doctor, lab, theory
from dtlib.cli import main
from dtlib.doctor import Examination, Finding
from dtlib.lab import ledger

registry = importlib.import_module("dtlib.theory.formula")


def invoke(*arguments):
    return CliRunner().invoke(main, list(arguments))


def test_help_needs_neither_torch_nor_numpy():
    code = (
        "import sys\nfrom dtlib.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as stop:\n    assert stop.code == 0\n"
        "heavy = {'torch', 'numpy', 'rich', 'matplotlib'} & set(sys.modules)\nassert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "doctor" in done.stdout


def without_torch(*arguments):
    """The command in a process that has what `pip install .` gives, and nothing else that can be imported."""
    code = (
        "import sys\n"
        "absent = {'torch', 'cloudpickle', 'jinja2', 'markdown_it', 'matplotlib', 'platformdirs'}\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in absent:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "import importlib.metadata as installed\n"
        "version = installed.version\n"
        "def version_of(name):\n"
        "    if name in {'torch', 'cloudpickle', 'jinja2', 'markdown-it-py', 'matplotlib', 'platformdirs'}:\n"
        "        raise installed.PackageNotFoundError(name)\n"
        "    return version(name)\n"
        "installed.version = version_of\n"
        "from dtlib.cli import main\n"
        "main(sys.argv[1:])"
    )
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)


def test_what_pip_install_gives_answers_or_says_what_is_missing(tmp_path):
    assert without_torch("--help").returncode == 0
    job = without_torch("memory", "--model", "llama3-70b", "--dp", "4", "--zero", "3", "--gpu", "H100")
    assert job.returncode == 0, job.stderr
    assert "it does not fit" in job.stdout
    assert without_torch("memory", "--list").returncode == 0
    for needs in (["ledger"], ["grade", "exercises", "--out", str(tmp_path)], ["report", ".", "--out", str(tmp_path)]):
        done = without_torch(*needs)
        assert done.returncode == 1, done.stderr
        assert "which is not installed: pip install '.[lab]' in the folder of the course" in done.stderr
        assert "Traceback" not in done.stderr
    done = without_torch("doctor")
    assert (done.returncode, done.stderr) == (0, "")
    assert "install the extra lab, and ask again: pip install '.[lab]'" in " ".join(done.stdout.split())
    assert "does not run here" not in done.stdout


def test_theory_and_commands_need_nothing_that_only_unix_has():
    code = (
        "import sys, click, numpy, rich.console, rich.table, rich.status\nsys.platform = 'win32'\n"
        "for name in ('fcntl', 'resource', 'termios', 'pwd', 'grp', 'pty'):\n    sys.modules[name] = None\n"
        "from dtlib.cli import main\nmain(sys.argv[1:])"
    )
    for arguments in (["memory", "llama3-8b", "--dp", "8"], ["plan", "llama3-8b", "--gpus", "8"], ["doctor"]):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert "not on Windows" in done.stdout
    done = subprocess.run([sys.executable, "-c", code, "grade", ".", "--out", "x"], capture_output=True, text=True)
    assert done.returncode == 1, "nothing was taken away"


def test_every_command_explains_itself():
    for name, command in main.commands.items():
        result = invoke(name, "--help")
        assert result.exit_code == 0
        assert command.help


def test_unknown_command():
    result = invoke("docter")
    assert result.exit_code == 2
    assert "No such command 'docter'" in result.output


@pytest.fixture
def _healthy(monkeypatch):
    findings = (Finding("python", True, "3.11", required=True), Finding("GPU", False, "none", "the [CPU] will do"))
    monkeypatch.setattr(doctor, "examine", lambda: Examination(findings))


@pytest.mark.usefixtures("_healthy")
def test_doctor_prints_findings_and_succeeds():
    result = invoke("doctor")
    assert result.exit_code == 0
    assert "✓  python" in result.output
    assert "the [CPU] will do" in result.output
    assert "The course runs on this machine." in result.output


@pytest.mark.usefixtures("_healthy")
def test_doctor_as_json():
    result = invoke("doctor", "--json")
    assert result.exit_code == 0
    assert [finding["name"] for finding in json.loads(result.output)["findings"]] == ["python", "GPU"]


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_doctor_fails_where_the_course_cannot_run(monkeypatch, options):
    missing = Examination((Finding("torch", False, "not installed", "install it", required=True),))
    monkeypatch.setattr(doctor, "examine", lambda: missing)
    result = invoke("doctor", *options)
    assert result.exit_code == 1
    assert "install it" in result.output


@pytest.fixture
def _two_formulas(tmp_path, monkeypatch):
    monkeypatch.setenv("DTLIB_LEDGER", str(tmp_path / "ledger.jsonl"))
    monkeypatch.setattr(registry, "_registry", {})
    for name in ("demo.a_bytes", "demo.b_bytes"):

        @theory.formula(name, source="derived here", chapter="demo", equation="D")
        def twin():
            """A formula."""


@pytest.mark.usefixtures("_two_formulas")
def test_ledger_shows_what_was_and_was_not_measured():
    result = invoke("ledger")
    assert result.exit_code == 0
    assert "Of 2 formulas, 0 were measured by" in result.output
    assert "2 have no evidence" in " ".join(result.output.split())
    lab.check("demo.a_bytes", theory=100, measured=101, by="wire", rtol=0.1)
    result = invoke("ledger", "--require-all")
    assert result.exit_code == 1
    assert "compared: wire" in result.output
    assert "1.01" in result.output
    assert "none" in result.output
    lab.check("demo.b_bytes", theory=1, measured=1, by="count")
    result = invoke("ledger", "--require-all")
    assert result.exit_code == 0
    assert "Of 2 formulas, 1 were measured by" in " ".join(result.output.split())


@pytest.mark.usefixtures("_two_formulas")
def test_ledger_right_after_make_book_reads_what_the_book_measured(tmp_path, monkeypatch):
    folder = tmp_path / "course" / "chapters"
    (folder.parent / "_build").mkdir(parents=True)
    folder.mkdir()
    book = folder.parent / "_build" / "ledger.jsonl"
    monkeypatch.setenv("DTLIB_LEDGER", str(book))
    lab.check("demo.a_bytes", theory=1, measured=1, by="wire")
    monkeypatch.delenv("DTLIB_LEDGER")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for place in (folder.parent, folder):
        monkeypatch.chdir(place)
        data = json.loads(invoke("ledger", "--json").output)
        assert (data["ledger"], data["counts"]["measured"]) == (str(book), 1)
    monkeypatch.setenv("DTLIB_LEDGER", str(tmp_path / "mine.jsonl"))  # what is asked for by name comes first
    assert json.loads(invoke("ledger", "--json").output)["counts"]["measured"] == 0
    monkeypatch.delenv("DTLIB_LEDGER")
    monkeypatch.chdir(tmp_path)
    assert json.loads(invoke("ledger", "--json").output)["ledger"] == str(ledger.default_path())


@pytest.mark.usefixtures("_two_formulas")
def test_ledger_as_json():
    lab.check("demo.a_bytes", theory=100, measured=101, by="wire", rtol=0.1)
    result = invoke("ledger", "--json", "--chapter", "demo", "--require-all")
    assert result.exit_code == 1
    data = json.loads(result.output)
    assert data["missing"] == ["demo.b_bytes"]
    assert data["counts"] | {"compared": 1, "missing": 1} == data["counts"]
    assert data["formulas"][0]["worst_ratio"] == 1.01


@pytest.mark.usefixtures("_two_formulas")
def test_ledger_refuses_what_is_not_there(tmp_path):
    result = invoke("ledger", "--file", str(tmp_path / "none.jsonl"))
    assert result.exit_code == 1
    assert "there is no ledger at" in result.output
    result = invoke("ledger", "--chapter", "alchemy")
    assert result.exit_code == 1
    assert "no formula belongs to chapter 'alchemy'; there are demo" in result.output


@pytest.fixture
def _solutions(tmp_path, monkeypatch):
    import nbformat

    source = "def double(x):\n    ### BEGIN SOLUTION\n    return 2 * x\n    ### END SOLUTION"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    (tmp_path / "solutions").mkdir()
    nbformat.write(notebook, tmp_path / "solutions" / "demo.ipynb")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_solutions")
def test_release_strips_solutions_and_notices_drift(tmp_path):
    result = invoke("release", "--check")
    assert result.exit_code == 1
    assert "demo.ipynb" in result.output
    assert not (tmp_path / "exercises").exists()
    result = invoke("release")
    assert (result.exit_code, result.output) == (0, "wrote exercises/demo.ipynb\n")
    made = (tmp_path / "exercises" / "demo.ipynb").read_text()
    assert "return 2 * x" not in made
    assert "def double" in made
    assert invoke("release").output == "exercises is up to date\n"
    assert invoke("release", "--check").exit_code == 0
    (tmp_path / "exercises" / "demo.ipynb").write_text(made.replace("double", "triple"))
    result = invoke("release", "--check")
    assert result.exit_code == 1
    assert result.output.startswith("Error: ")


@pytest.mark.usefixtures("_solutions")
def test_release_refuses_folders_without_solutions(tmp_path):
    result = invoke("release", "nowhere")
    assert result.exit_code == 2
    assert "'nowhere' does not exist" in result.output
    (tmp_path / "empty").mkdir()
    result = invoke("release", "empty")
    assert result.exit_code == 1
    assert "holds no notebook" in result.output


def test_no_formula_hides_in_a_module_that_the_package_does_not_import():
    code = (
        "import pkgutil, sys, dtlib.theory as theory\n"
        "names = {found.name for found in pkgutil.walk_packages(theory.__path__, 'dtlib.theory.')}\n"
        "loaded = set(sys.modules)\nassert names and names <= loaded, names - loaded"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
