"""Whatever is handed in is found and read: never a crash, never blocked, nothing lost without a line that says so."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dtlib.grading.classroom.intake import Submission, find, folders
from dtlib.grading.classroom.intake.names import distinct, file_name, learner_of, printable
from dtlib.grading.classroom.intake.notebooks import parse

from .submitted import COLLECTIVES, DP, STEMS, cells_of, notebook, problem_of, read, write


class TestSafeName:
    @pytest.mark.parametrize("name", ["alice", "Müller", "smithalice_LATE_12", "a.b-c.org", "名前", "x"])
    def test_ordinary_names_stay(self, name):
        assert file_name(name) == name

    @pytest.mark.parametrize(
        "name",
        [
            *[".", "..", ".hidden", "-x", "a/b", "a\\b", "a:b", "CON", "nul.txt", "a."],
            "",
            "a b",
            "x" * 101,
            "é" * 51,
            "a\nb",
        ],
    )
    def test_others_get_a_digest(self, name):
        assert re.fullmatch(r"[\w-]{1,40}-[0-9a-f]{16}", file_name(name))

    def test_nobody_can_take_the_name_that_another_gets(self):
        taken = file_name("a/b")
        assert file_name(taken) != taken

    @given(st.sets(st.text(max_size=30), max_size=30))
    @example({"a", "A", "a (2)", "A (2)"})
    @example({"ß", "ss", "SS", "ẞ"})
    def test_no_two_learners_share_a_file(self, names):
        shown, alike = distinct(names)
        assert all(len(group) > 1 and set(group) <= set(shown.values()) for group in alike)
        assert shown.keys() == names
        files = {file_name(each).casefold() for each in shown.values()}
        assert len(files) == len(names)
        for each in files:
            assert each == Path(each).name
            assert each not in ("", ".", "..")
            assert len(each.encode()) <= 220

    @given(st.text(max_size=300), st.integers(2, 200))
    def test_what_is_shown_is_printable(self, text, most):
        shown = printable(text, most)
        assert shown.isprintable()
        assert printable(shown, 1000) == shown


KEYS = st.sampled_from(
    ["cells", "worksheets", "cell_type", "id", "source", "input", "metadata", "nbgrader", "grade_id"]
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(st.characters(), max_size=8),
    st.sampled_from(["code", "markdown", "dp-1", "setup", "def diagnose_backward(): pass", "\ud800"]),
)
JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS | st.text(max_size=3), inner, max_size=6)
)
CELL = st.fixed_dictionaries({}, optional=dict.fromkeys(["cell_type", "id", "source", "input", "metadata"], JSON))


class TestAnything:
    def reads(self, folder: Path, content: bytes) -> None:
        path = write(folder / "dp.ipynb", content)
        submission = read(Submission("alice", folder, [path]))
        for stem in STEMS:
            json.dumps(cells_of(submission, stem), ensure_ascii=False).encode()
            assert problem_of(submission, stem).isprintable()
        for text in submission.notes:
            assert text.isprintable()
        assert read(Submission("bob", folder, [path])).digest == submission.digest

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(JSON)
    def test_json(self, tmp_path, value):
        self.reads(tmp_path, json.dumps(value).encode())

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.lists(CELL | JSON, max_size=5), st.booleans())
    def test_cells(self, tmp_path, cells, old):
        value = {"worksheets": [{"cells": cells}]} if old else {"cells": cells}
        self.reads(tmp_path, json.dumps(value).encode())

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.binary(max_size=200))
    def test_bytes(self, tmp_path, content):
        self.reads(tmp_path, content)

    def test_damaged_notebooks(self, tmp_path):
        chance = random.Random(7)
        for _ in range(200):
            damaged = bytearray(DP)
            for _ in range(chance.randrange(1, 20)):
                at = chance.randrange(len(damaged))
                damaged[at : at + chance.randrange(3)] = chance.randbytes(chance.randrange(3))
            self.reads(tmp_path, bytes(damaged))

    @given(st.binary(max_size=100))
    def test_parse_gives_cells_or_the_reason(self, content):
        try:
            parse(content)
        except folders.Refused as error:
            reason = str(error)
        else:
            reason = "it was a notebook"
        assert reason


def test_nothing_of_a_submission_is_evaluated_and_torch_stays_out(tmp_path):
    write(tmp_path / "alice" / "dp.ipynb")
    code = (
        "import sys, tempfile\nfrom dtlib.grading.classroom.intake import find\n"
        "def watch(event, args):\n"
        "    if event in ('exec', 'compile') and args[-1 if event == 'compile' else 0] is not None:\n"
        "        name = getattr(args[0], 'co_filename', '') if event == 'exec' else str(args[1])\n"
        "        if 'lib/python' not in name and '/dtlib/' not in name and not name.startswith('<'): print(name)\n"
        "    if event.startswith(('pickle', 'subprocess', 'os.exec', 'socket')): print(event)\n"
        "sys.addaudithook(watch)\n"
        f"(found,) = find(__import__('pathlib').Path({str(tmp_path)!r}))\n"
        "with tempfile.TemporaryFile() as spool:\n    found.read(spool)\n"
        "assert found.problem('dp') == ('', True)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


def test_learners_alike_are_told_and_each_notebook_is_opened_once(tmp_path, monkeypatch):
    for name in ("alice", "Alice", "bob"):
        write(tmp_path / name / "dp.ipynb")
    opened = []
    real = os.open
    monkeypatch.setattr(folders.os, "open", lambda *args: (opened.append(str(args[0])), real(*args))[1])
    found = [read(each) for each in find(tmp_path)]
    assert [(each.learner, list(each.alike)) for each in found] == [
        ("Alice", ["Alice", "alice (2)"]),
        ("alice (2)", ["Alice", "alice (2)"]),
        ("bob", []),
    ]
    assert all(each.cells("dp") == each.cells("dp") for each in found)
    opened = sorted(each for each in opened if "ipynb" in each)
    assert opened == sorted(str(tmp_path / name / "dp.ipynb") for name in ("alice", "Alice", "bob"))


def test_a_name_of_many_copies_takes_no_time():
    assert learner_of("dp" + " copy" * 2000 + "!.ipynb", STEMS)


def test_all_of_a_folder_can_be_one_learners(tmp_path):
    """As Gradescope has it, where a second notebook must not become a second learner."""
    write(tmp_path / "submission" / "dp.ipynb")
    write(tmp_path / "submission" / "my notes.ipynb", notebook("x = 1"))
    write(tmp_path / "submission" / "more" / "collectives.ipynb", COLLECTIVES)
    assert len(find(tmp_path / "submission")) > 1
    (found,) = find(tmp_path / "submission", one_learner=True)
    assert found.learner == "submission"
    assert read(found).stems == {"dp", "collectives"}
