"""Reads the bank of wrong answers, and the reference answers out of the solutions notebooks."""

from __future__ import annotations

import json
import linecache
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BANK = Path(__file__).parent / "wrong"
_SECTION = re.compile(
    r"^## (?P<title>[^\n]+)\n- check: (?P<check>[^\n]+)\n- mistake: (?P<mistake>[^\n]+)\n"
    r"\n+```python\n(?P<source>.*?)^```$",
    re.M | re.S,
)


@dataclass(frozen=True)
class WrongAnswer:
    """An answer that must be rejected, on the check and for the mistake that it names."""

    exercise: str
    title: str
    check: str
    mistake: str
    source: str


def wrong_answers() -> list[WrongAnswer]:
    """The whole bank."""
    found = []
    for path in sorted(BANK.glob("*.*.md")):
        text = path.read_text(encoding="utf-8")
        sections = [WrongAnswer(exercise=path.stem, **match.groupdict()) for match in _SECTION.finditer(text)]
        assert len(sections) == _num_headings(text), f"a section of {path.name} cannot be read"
        found += sections
    return found


@dataclass(frozen=True)
class RightAnswer:
    """An answer that must earn all points, though it differs from the reference."""

    exercise: str
    title: str
    source: str


def right_answers() -> list[RightAnswer]:
    """All answers that are right in another way."""
    found = []
    for path in sorted((Path(__file__).parent / "right").glob("*.*.md")):
        text = path.read_text(encoding="utf-8")
        sections = re.findall(r"^## ([^\n]+)\n\n```python\n(.*?)^```$", text, re.M | re.S)
        assert len(sections) == _num_headings(text), f"a section of {path.name} cannot be read"
        found += [RightAnswer(path.stem, title, source) for title, source in sections]
    return found


def _num_headings(text: str) -> int:
    return len(re.findall(r"^## ", text, re.M))


def cells(stem: str, folder: str = "solutions") -> dict[str, str]:
    """The sources of a notebook's cells by id."""
    notebook = json.loads((ROOT / folder / f"{stem}.ipynb").read_text(encoding="utf-8"))
    return {cell["id"]: "".join(cell["source"]) for cell in notebook["cells"]}


def namespace(*sources: str) -> dict[str, Any]:
    """What a notebook holds after it ran `sources`, one cell each."""
    space: dict[str, Any] = {"__name__": "__main__"}
    for source in sources:
        name = f"<cell {abs(hash(source))}>"  # a file of its own for each cell, as in a notebook
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        exec(compile(source, name, "exec"), space)
    return space


def reference_namespace(stem: str) -> dict[str, Any]:
    """What the solutions notebook of a chapter holds after all of its cells but the checks ran."""
    all_cells = cells(stem)
    wanted = ["setup", *(name for name in all_cells if re.fullmatch(rf"{stem}-\d+", name))]
    return namespace(*(all_cells[name] for name in wanted))
