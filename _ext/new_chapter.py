"""Lay out the empty rooms of a new chapter: ``make chapter STEM=batch TITLE="batch size"``.

It writes the chapter's row in ``dtlib/course.py``, its empty modules, its page with the headings of a lesson, the
notebook of its solutions, and its lines in the contents, the README and the page of letters. What is still to be
written, ``pytest tests/test_course.py`` says.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from nbformat import v4, writes

ROOT = Path(__file__).parents[1]
PARTS = (
    "The picture", "In small numbers", "The derivation", "The mechanism in code", "The measurement", "PyTorch's own",
    "Break it", "When it pays", "Worked problems", "Quick checks", "Takeaways",
)  # fmt: skip
"""The headings of a lesson."""
LINE = "what it derives and measures, in one line"
SETUP = "from dtlib import figures, lab, ranks, theory\n\nfigures.style.use()"


def lay_out(stem: str, title: str, root: Path = ROOT) -> None:
    """Make the rooms of a chapter at the end of the course. ``ValueError`` before anything is written."""
    if not re.fullmatch(r"[a-z][a-z0-9]*", stem):
        raise ValueError(f"STEM must be one word in lower case, not {stem!r}")
    if not title.strip():
        raise ValueError("TITLE must say the chapter's subject in words")
    table = (root / "dtlib" / "course.py").read_text("utf-8")
    if re.search(rf'Chapter\(\s*"{stem}"', table):
        raise ValueError(f"STEM {stem!r} is in dtlib/course.py already")
    insert(root / "dtlib" / "course.py", ")  # fmt: skip\n", f'    Chapter("{stem}", "{title}", "{LINE}"),\n')
    remove(root / "dtlib" / "course.py", stem)
    remove(root / "README.md", stem)
    for room in ("theory", "ranks"):
        offer(root / "dtlib" / room / "__init__.py", stem)
        write(root / "dtlib" / room / f"{stem}.py", f'"""{title[0].upper()}{title[1:]}."""\n')
    insert(root / "_toc.yml", "  - caption: Appendices\n", f"      - file: chapters/{stem}\n")
    insert(root / "README.md", "\nTo come: ", f"| **{stem}** | {LINE} |\n")
    notation = root / "chapters" / "notation.md"
    text = notation.read_text("utf-8")
    end = text.index("```", text.index("```{list-table}", text.index("## Letters of one chapter")) + 3)
    notation.write_text(f"{text[:end]}* - {title}\n  - $x$\n  - what it stands for\n{text[end:]}", "utf-8")
    cells = [v4.new_markdown_cell(f"# {title[0].upper()}{title[1:]}"), v4.new_code_cell(SETUP)]
    cells += [v4.new_markdown_cell(f"## {part}") for part in PARTS]
    notebook(root / "chapters" / f"{stem}.ipynb", stem, cells)
    notebook(root / "solutions" / f"{stem}.ipynb", stem, [v4.new_markdown_cell(f"# {title}"), v4.new_code_cell(SETUP)])


def insert(path: Path, before: str, line: str) -> None:
    """Write `line` before the first `before` of a file."""
    text = path.read_text("utf-8")
    at = text.index(before)
    path.write_text(text[:at] + line + text[at:], "utf-8")


def remove(path: Path, stem: str) -> None:
    """Take a stem out of those to come: in Python's tuple, or in words, the last of which leaves "nothing"."""
    head, to_come, rest = re.split(r"(TO_COME = .*|To come: .*)", path.read_text("utf-8"), maxsplit=1)
    left = re.sub(rf'"{stem}",? ?| {stem},|,? {stem}(?=\.)', "", to_come)
    path.write_text(head + left.replace("To come:.", "To come: nothing.") + rest, "utf-8")


def offer(path: Path, stem: str) -> None:
    """Let the ``__init__.py`` of a room import and offer a module."""
    text = path.read_text("utf-8")
    text = re.sub(r"^from \. import \(\n", f"from . import (\n    {stem},\n", text, count=1, flags=re.MULTILINE)
    text = re.sub(r"^from \. import (?!\()", f"from . import {stem}, ", text, count=1, flags=re.MULTILINE)
    path.write_text(re.sub(r"__all__ = \[", f'__all__ = ["{stem}", ', text, count=1), "utf-8")


def notebook(path: Path, stem: str, cells: list) -> None:  # type: ignore[type-arg]
    """Write a notebook whose cells have readable names."""
    for number, cell in enumerate(cells):
        cell["id"] = f"{stem}-{number}"
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    write(path, writes(v4.new_notebook(cells=cells, metadata=kernel)) + "\n")


def write(path: Path, text: str) -> None:
    """Write a file that is not there yet, and its folder."""
    if path.exists():
        raise ValueError(f"{path} exists already")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


if __name__ == "__main__":
    lay_out(*sys.argv[1:3])
