"""What a release is made of, and what of it works in an environment that has nothing else."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import runpy
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WITHOUT_TORCH = ("click", "numpy", "rich", "markdown-it-py", "mdurl", "pygments")
"""What ``pip install`` of the wheel brings with it, and what that brings."""


@pytest.fixture(scope="module")
def dist():
    return SimpleNamespace(**runpy.run_path(str(ROOT / "_ext" / "dist.py")))


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """A copy of what a release is built of, with a book of two files."""
    copy = tmp_path_factory.mktemp("course")
    for name in ("dtlib", "exercises"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CITATION.cff", "CHANGELOG.md"):
        shutil.copy(ROOT / name, copy)
    shutil.copy(ROOT / "requirements.txt", copy)
    html = copy / "_build" / "html"
    (html / "_static").mkdir(parents=True)
    (html / "index.html").write_text('<link rel="stylesheet" href="_static/book.css">')
    (html / "_static" / "book.css").write_text("a{}")
    (html / ".buildinfo").write_text("of the builder")
    (copy / "_build" / "book.pdf").write_bytes(b"%PDF-")
    return copy


@pytest.fixture(scope="module")
def made(dist, course):
    """The files of a release by name."""
    return {path.name: path for path in dist.make(course / "_build" / "html", course / "_build" / "dist", course)}


def test_a_release_is_the_wheel_the_book_the_exercises_and_their_checksums(dist, made):
    here = dist.version()
    assert set(made) == {
        f"dtlib_course-{here}-py3-none-any.whl", f"dtlib_course-{here}.tar.gz", f"dtlib-book-{here}.zip",
        f"dtlib-exercises-{here}.zip", f"dtlib-book-{here}.pdf", "SHA256SUMS",
    }  # fmt: skip
    sums = dict(reversed(line.split()) for line in made["SHA256SUMS"].read_text().splitlines())
    assert sums == {
        name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in made.items() if name != "SHA256SUMS"
    }


def test_the_book_opens_from_its_folder(dist, made, tmp_path):
    archive = made[f"dtlib-book-{dist.version()}.zip"]
    with zipfile.ZipFile(archive) as book:
        assert {name.split("/")[0] for name in book.namelist()} == {archive.stem}
        book.extractall(tmp_path)
    folder = tmp_path / archive.stem
    (sheet,) = re.findall(r'href="([^"]+)"', (folder / "index.html").read_text())
    assert (folder / sheet).is_file()
    assert (folder / "LICENSE").is_file()
    assert not list(folder.rglob(".*"))


def test_learners_get_the_exercises_and_no_answer(dist, made):
    with zipfile.ZipFile(made[f"dtlib-exercises-{dist.version()}.zip"]) as archive:
        names = {Path(name).name for name in archive.namelist()}
        assert {path.name for path in (ROOT / "exercises").glob("*.ipynb")} <= names
    with zipfile.ZipFile(made[f"dtlib_course-{dist.version()}-py3-none-any.whl"]) as wheel:
        assert not [name for name in wheel.namelist() if name.endswith(".md") and "exercises" in name]
        assert {name.split("/")[0] for name in wheel.namelist()} == {
            "dtlib",
            f"dtlib_course-{dist.version()}.dist-info",
        }


def test_the_same_files_give_the_same_archive(dist, made, course, tmp_path):
    name = f"dtlib-book-{dist.version()}.zip"
    os.utime(course / "_build" / "html" / "index.html", (0, 0))
    dist.pack(course / "_build" / "html", tmp_path / name, tuple(course / each for each in dist.BESIDE))
    assert (tmp_path / name).read_bytes() == made[name].read_bytes()


def test_without_a_book_there_is_no_release(dist, course, tmp_path):
    with pytest.raises(SystemExit, match="run `make book` first"):
        dist.make(tmp_path, tmp_path / "out", course)


@pytest.mark.parametrize(
    ("tag", "changelog", "told"),
    [
        ("v9.9", "## {} \n\nText.\n", "the tag must be v"),
        ("v{}", "## 0.0.1\n\nText.\n", "must have a section '## "),
        ("v{}", "## {}\n\n## 0.0.1\n\nText.\n", "must have a section '## "),
    ],
)
def test_a_tag_without_its_version_or_its_notes_is_refused(dist, tmp_path, tag, changelog, told):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "CHANGELOG.md").write_text(changelog.format(dist.version()))
    with pytest.raises(SystemExit, match=told):
        dist.notes(tag.format(dist.version()), tmp_path)


def test_the_version_stands_in_one_place(dist):
    here = dist.version()
    assert importlib.metadata.version("dtlib-course") == here, "run `make setup`"
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == here
    said = dist.notes(f"v{here}")
    assert said
    assert "\n## " not in said


@pytest.fixture(scope="module")
def alone(dist, made, tmp_path_factory):
    """The scripts of an environment into which the wheel was installed, with what it asks for and nothing else."""
    folder = tmp_path_factory.mktemp("alone")
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    wheel = made[f"dtlib_course-{dist.version()}-py3-none-any.whl"]
    command = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python"]
    command += ["install", "--no-deps", "--no-index", "--quiet", "--disable-pip-version-check", wheel]
    subprocess.run(command, check=True)
    for name in WITHOUT_TORCH:
        for file in importlib.metadata.files(name) or ():
            top = file.parts[0]
            if not (packages / top).exists() and top not in ("..", "__pycache__"):
                (packages / top).symlink_to(Path(str(file.locate())).parents[len(file.parts) - 1] / top)
    return folder / "bin"


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["dtlib", "--version"], "dtlib, version "),
        (["dtlib", "memory", "llama3-70b", "--dp", "64", "--zero", "3"], "GiB"),
        (["dtlib", "plan", "llama3-8b", "--gpus", "64"], "dp"),
        (["python", "-c", "from dtlib import theory; print(theory.collectives.ring_all_reduce_bytes(8.0, 4))"], "12.0"),
    ],
)
def test_the_wheel_alone_computes(alone, tmp_path, command, told):
    done = subprocess.run([alone / command[0], *command[1:]], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert told in done.stdout


def test_the_wheel_alone_explains_a_plan(alone, tmp_path):
    planned = subprocess.run([alone / "dtlib", "plan", "llama3-8b", "--gpus", "64", "--json"], capture_output=True)
    (tmp_path / "plan.json").write_bytes(planned.stdout)
    done = subprocess.run([alone / "dtlib", "explain", "plan.json"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "memory.training_flops_per_token" in done.stdout


def test_the_wheel_alone_says_which_extra_the_rest_needs(alone, tmp_path, made):
    wide = os.environ | {"COLUMNS": "300"}
    done = subprocess.run([alone / "dtlib", "doctor"], capture_output=True, text=True, cwd=tmp_path, env=wide)
    assert (done.returncode, done.stderr) == (0, "")
    said = " ".join(done.stdout.split())
    assert "✓ theory" in said
    assert "– extra lab not installed" in said
    assert "torch" in said
    (wheel,) = [name for name in made if name.endswith(".whl")]
    assert re.search(rf"pip install 'dtlib-course\[lab\] @ file://\S+{re.escape(wheel)}'", said)
    assert "does not run here" not in said
    done = subprocess.run([alone / "python", "-c", "import torch"], capture_output=True, text=True, cwd=tmp_path)
    assert "No module named 'torch'" in done.stderr, "the environment has more than the wheel asks for"
