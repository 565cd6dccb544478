"""Reads the bank of hostile submissions (see ``hostile/README.md``) and hands them in as learners would."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtlib.grading.exercises.catalogue import all_exercises

from .answers import ROOT, cells

BANK = Path(__file__).parent / "hostile"
_SECTION = re.compile(
    r"^## (?P<title>[^\n]+)\n- exercise: (?P<exercise>[^\n]+)\n"
    r"(- handed in: (?P<handed_in>[^\n]+)\n)?- wall: (?P<wall>[^\n]+)\n"
    r"- reason: (?P<reason>[^\n]+)\n- control: (?P<control>[^\n]+)\n\n```python\n(?P<source>.*?)^```$",
    re.M | re.S,
)
HARMS = ("full marks", "hangs", "no verdict", "process left", "file left", "results changed", "memory", "huge report")
READ_WHOLE = ("sparse file", "nested brackets", "link to the solutions", "linked folder", "pipe")
SPARSE_BYTES = 500 * 2**20


@dataclass(frozen=True)
class Control:
    """A run without the wall: `kind` is naive, notebook or without, `style` the other words, `harm` one of `HARMS`."""

    kind: str
    style: str
    harm: str


@dataclass(frozen=True)
class Hostile:
    """A hostile submission: what it tries, on which exercise, what stops it, what the reason must say, and its code."""

    title: str
    exercise: str
    handed_in: str
    wall: str
    reason: str
    controls: tuple[Control, ...]
    source: str

    @property
    def stem(self) -> str:
        return self.exercise.partition(".")[0]

    @property
    def cell_id(self) -> str:
        return self.exercise.replace(".", "-")

    def cell(self, knows: dict[str, Any]) -> str:
        """The code of the answer cell: what the case knows, `right`, `fork`, `begin_child`, and then its own lines."""
        function = all_exercises()[self.exercise].function
        reference = cells(self.stem)[self.cell_id].replace(f"def {function}(", "def right(", 1)
        known = "".join(f"{name} = {value!r}\n" for name, value in knows.items())
        return f"{known}\n\n{reference}\n\n{_PROCESSES}\n\n{self.source}"


_PROCESSES = """\
def fork():
    import ctypes

    pid = ctypes.PyDLL(None).fork()  # as os.fork, but nothing in Python hears of it
    if pid < 0:
        raise BlockingIOError("no process was granted")
    return pid


def begin_child(seconds):
    import ctypes
    import signal

    ctypes.CDLL(None).prctl(15, MARK.encode(), 0, 0, 0)  # the name by which the test finds this process
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(seconds)
"""


def hostile_submissions() -> list[Hostile]:
    """The whole bank."""
    found = []
    for path in sorted(BANK.glob("*.md")):
        if path.name == "README.md":
            continue
        text = path.read_text(encoding="utf-8")
        sections = [match.groupdict() for match in _SECTION.finditer(text)]
        assert len(sections) == len(re.findall(r"^## ", text, re.M)), f"a section of {path.name} cannot be read"
        for section in sections:
            controls = tuple(_control(each) for each in section.pop("control").split("; "))
            handed_in = section.pop("handed_in") or "answer"
            assert handed_in in WAYS, f"{section['title']}: no way {handed_in!r}"
            found.append(Hostile(**section, handed_in=handed_in, controls=controls))
    assert len({hostile.title for hostile in found}) == len(found)
    return found


def _control(text: str) -> Control:
    where, _, harm = text.partition(": ")
    assert harm in HARMS, f"no harm is called {harm!r}"
    kind, _, style = where.partition(" ")
    return Control(kind, style, harm)


def hand_in(hostile: Hostile, folder: Path, knows: dict[str, Any]) -> None:
    """Put the submission into `folder`, a learner's own: right answers everywhere else."""
    WAYS[hostile.handed_in](hostile, folder, hostile.cell(knows))


def reference_notebook(stem: str) -> dict[str, Any]:
    """The notebook with all the right answers."""
    return json.loads((ROOT / "solutions" / f"{stem}.ipynb").read_text(encoding="utf-8"))


def _with(hostile: Hostile, sources: dict[str, str], tags: tuple[str, ...] = ()) -> str:
    notebook = reference_notebook(hostile.stem)
    for cell in notebook["cells"]:
        if cell["id"] in sources:
            cell["source"] = sources[cell["id"]].splitlines(keepends=True)
            if tags:
                cell["metadata"]["tags"] = list(tags)
    return json.dumps(notebook)


def _path(hostile: Hostile, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{hostile.stem}.ipynb"


def _answer(hostile: Hostile, folder: Path, cell: str) -> None:
    _path(hostile, folder).write_text(_with(hostile, {hostile.cell_id: cell}))


def _check_cell(hostile: Hostile, folder: Path, cell: str) -> None:
    function = all_exercises()[hostile.exercise].function
    wrong = f"def {function}(*arguments):\n    return 0.0, 0.0\n"
    sources = {hostile.cell_id: wrong, f"{hostile.cell_id}-check": hostile.source}
    _path(hostile, folder).write_text(_with(hostile, sources))


def _skip_tags(hostile: Hostile, folder: Path, cell: str) -> None:
    check = f"grading.check({hostile.exercise!r})\n1 / 0"
    tags = ("nbval-skip", "raises-exception", "skip-execution")
    _path(hostile, folder).write_text(_with(hostile, {hostile.cell_id: cell, f"{hostile.cell_id}-check": check}, tags))


def _sparse(hostile: Hostile, folder: Path, cell: str) -> None:
    with open(_path(hostile, folder), "wb") as file:
        file.write(b'{"cells": [')
        file.truncate(SPARSE_BYTES)


def _nested(hostile: Hostile, folder: Path, cell: str) -> None:
    _path(hostile, folder).write_text('{"nbformat": 4, "cells": ' + "[" * 200_000 + "]" * 200_000 + "}")


def _linked_file(hostile: Hostile, folder: Path, cell: str) -> None:
    _path(hostile, folder).symlink_to(ROOT / "solutions" / f"{hostile.stem}.ipynb")


def _linked_folder(hostile: Hostile, folder: Path, cell: str) -> None:
    folder.rmdir() if folder.exists() else folder.parent.mkdir(parents=True, exist_ok=True)
    folder.symlink_to(ROOT / "solutions")


def _pipe(hostile: Hostile, folder: Path, cell: str) -> None:
    os.mkfifo(_path(hostile, folder))


WAYS: dict[str, Callable[[Hostile, Path, str], None]] = {
    "answer": _answer,
    "check cell": _check_cell,
    "skip tags": _skip_tags,
    "sparse file": _sparse,
    "nested brackets": _nested,
    "link to the solutions": _linked_file,
    "linked folder": _linked_folder,
    "pipe": _pipe,
}
