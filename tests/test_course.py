"""The table of the course: whoever adds a chapter to it is told which of its rooms are still empty."""

from __future__ import annotations

import importlib
import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from dtlib import course

ROOT = Path(__file__).parents[1]


def table(readme: str) -> dict[str, str]:
    """The chapters in the README: by stem, what each is said to derive and measure."""
    return dict(re.findall(r"^\| \*\*(\w+)\*\* \| (.+) \|$", readme, re.MULTILINE))


def contents(toc: str) -> list[tuple[str, str]]:
    """The numbered pages of the book: each its part and its stem."""
    parts = [part for part in yaml.safe_load(toc)["parts"] if part.get("numbered")]
    return [(part["caption"], Path(each["file"]).name) for part in parts for each in part["chapters"]]


def lacking(chapter: course.Chapter, root: Path = ROOT) -> Iterator[str]:
    """What a chapter of the table still lacks, one sentence a room."""
    stem = chapter.stem

    def somewhere(*patterns: str) -> bool:
        return any(path for pattern in patterns for path in root.glob(pattern))

    for room in set(chapter.rooms) & {"theory", "ranks"}:
        if not somewhere(f"dtlib/{room}/{stem}.py", f"dtlib/{room}/{stem}/__init__.py"):
            yield f"dtlib/{room}/{stem}.py does not exist"
        elif not re.search(rf'^\s*__all__ = .*"{stem}"', _text(root / "dtlib" / room / "__init__.py"), re.M | re.S):
            yield f"dtlib/{room}/__init__.py does not offer {stem}"
        if not somewhere(f"tests/{room}/test_{stem}*.py", f"tests/{room}/{stem}/test_*.py"):
            yield f"tests/{room} has no tests of {stem}"
    if "theory" in chapter.rooms and not any(
        re.search(rf'formula\(\s*"{stem}\.', _text(path)) for path in (root / "dtlib" / "theory").rglob("*.py")
    ):
        yield f"no formula is called {stem}.…"
    if "exercises" in chapter.rooms:
        if not re.search("EXERCISE = ", "".join(map(_text, root.glob(f"dtlib/grading/exercises/{stem}/*.py")))):
            yield f"dtlib/grading/exercises/{stem} has no EXERCISE"
        for folder in ("solutions", "exercises"):
            if not (root / folder / f"{stem}.ipynb").is_file():
                yield f"{folder}/{stem}.ipynb does not exist" + " (run dtlib release)" * (folder == "exercises")
    page = root / "chapters" / f"{stem}.ipynb"
    if not page.is_file() or not any(cell["cell_type"] == "code" for cell in json.loads(_text(page))["cells"]):
        yield f"chapters/{stem}.ipynb has no code"
    if stem not in [each for _, each in contents(_text(root / "_toc.yml"))]:
        yield f"_toc.yml does not have chapters/{stem}"
    if table(_text(root / "README.md")).get(stem) != chapter.line:
        yield f"README.md does not say of {stem}: {chapter.line}"
    if f"* - {chapter.title}\n" not in _text(root / "chapters" / "notation.md"):
        yield f"chapters/notation.md has no letters of {chapter.title}"


def _text(path: Path) -> str:
    return path.read_text("utf-8")


@pytest.mark.parametrize("chapter", course.CHAPTERS, ids=course.stems())
def test_no_room_of_a_chapter_is_empty(chapter):
    missing = list(lacking(chapter))
    assert not missing, "\n".join(missing)


def test_the_order_and_the_parts_are_the_books():
    parts, opened = [], ""
    for chapter in course.CHAPTERS:
        opened = chapter.part or opened
        parts.append((opened, chapter.stem))
    assert contents(_text(ROOT / "_toc.yml")) == parts
    assert tuple(table(_text(ROOT / "README.md"))) == course.stems()
    assert f"To come: {', '.join(course.TO_COME) or 'nothing'}." in _text(ROOT / "README.md")


def test_it_imports_nothing_of_the_library_and_no_torch():
    code = "import sys, dtlib.course; print([m for m in sys.modules if m.startswith(('dtlib.', 'torch', 'numpy'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "['dtlib.course']"


def test_unknown_rooms_and_stems_are_named():
    with pytest.raises(ValueError, match="room must be one of theory, ranks, exercises, not 'kitchen'"):
        course.stems("kitchen")
    with pytest.raises(ValueError, match=r"stem must be one of memory, .*, not 'moe'"):
        course.title("moe")


@pytest.fixture
def copy(tmp_path):
    """The files of the course that a new chapter touches."""
    for name in ("dtlib/course.py", "dtlib/theory/__init__.py", "dtlib/ranks/__init__.py", "_toc.yml", "README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "chapters").mkdir()
    shutil.copy(ROOT / "chapters" / "notation.md", tmp_path / "chapters")
    return tmp_path


def test_make_chapter_lays_out_the_rooms_and_what_is_empty_is_named(copy):
    tool = runpy.run_path(str(ROOT / "_ext" / "new_chapter.py"))
    tool["lay_out"]("bread", "baking in parallel", copy)
    made = runpy.run_path(str(copy / "dtlib" / "course.py"))["CHAPTERS"][-1]
    assert (made.stem, made.title) == ("bread", "baking in parallel")
    assert sorted(lacking(made, copy)) == [
        "dtlib/grading/exercises/bread has no EXERCISE",
        "exercises/bread.ipynb does not exist (run dtlib release)",
        "no formula is called bread.…",
        "tests/ranks has no tests of bread",
        "tests/theory has no tests of bread",
    ]
    for name in ("dtlib/theory/__init__.py", "dtlib/ranks/__init__.py", "dtlib/course.py"):
        compile(_text(copy / name), name, "exec")
    with pytest.raises(ValueError, match=r"STEM .bread. is in dtlib/course\.py already"):
        tool["lay_out"]("bread", "baking in parallel", copy)
    for path in (copy / "dtlib" / "course.py", copy / "README.md"):
        text = re.sub(r"TO_COME = .*", 'TO_COME = ("one", "two",)', _text(path))
        path.write_text(re.sub(r"To come: .*", "To come: one, two.", text), "utf-8")
    for stem, left in (("two", ("one",)), ("one", ())):
        tool["lay_out"](stem, f"what was {stem} to come", copy)
        assert f"\nTo come: {', '.join(left) or 'nothing'}.\n" in _text(copy / "README.md")
        assert runpy.run_path(str(copy / "dtlib" / "course.py"))["TO_COME"] == left
    for wrong in ("Bread", "two words", ""):
        with pytest.raises(ValueError, match="STEM must be one word in lower case"):
            tool["lay_out"](wrong, "baking", copy)


@pytest.mark.parametrize("stem", course.stems("ranks"))
def test_a_room_of_ranks_says_what_stands_on_the_page(stem):
    """The version that fits on a page stands there, where it is run and checked, and nowhere else."""
    room = importlib.import_module(f"dtlib.ranks.{stem}")
    assert "chapter's page" in room.__doc__


# Stems that take more than an evening.
LONG = {"collectives": 2000, "pp": 2050, "zero": 1800, "compression": 1650}


def lines(*patterns: str, root: Path = ROOT) -> int:
    """Lines of all Python files that the patterns find."""
    return sum(len(_text(path).splitlines()) for pattern in patterns for path in root.glob(pattern))


def rooms_of(stem: str) -> list[str]:
    return [f"dtlib/{room}/{stem}{end}" for room in ("theory", "ranks") for end in (".py", "/**/*.py")]


@pytest.mark.parametrize("stem", course.stems("theory"))
def test_theory_and_ranks_of_a_stem_are_read_in_an_evening(stem):
    assert 0 < lines(*rooms_of(stem)) <= LONG.get(stem, 1500)


def test_an_exercise_is_a_page_or_two_of_checks():
    stems = course.stems("exercises")
    each = [lines(str(path.relative_to(ROOT))) for stem in stems
            for path in (ROOT / "dtlib/grading/exercises" / stem).glob("[!_]*.py")]  # fmt: skip
    assert max(each) <= 270
    assert sum(each) / len(each) <= 120


def test_lines_are_counted_where_they_are(tmp_path):
    (tmp_path / "one.py").write_text("a\nb\n")
    assert lines("*.py", "two/*.py", root=tmp_path) == 2
