"""Whatever is handed in is found and read: never a crash, never blocked, nothing lost without a line that says so."""

from __future__ import annotations

import json
import os
import random
import re
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dtlib.grading.checks import all_exercises
from dtlib.grading.intake import Submission, find, folders, submissions
from dtlib.grading.intake.names import distinct, file_name, learner_of, printable
from dtlib.grading.intake.notebooks import MAX_CODE_CHARS, MAX_VALUES, parse
from dtlib.grading.intake.submissions import MAX_NOTEBOOK_BYTES
from dtlib.grading.sandbox import Cell

from .answers import ROOT

STEMS = ("collectives", "dp")
DP = (ROOT / "solutions" / "dp.ipynb").read_bytes()
COLLECTIVES = (ROOT / "solutions" / "collectives.ipynb").read_bytes()
BLANK_DP = (ROOT / "exercises" / "dp.ipynb").read_bytes()
REFUSED_TO_ROOT = pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")


def notebook(*cells, **others) -> dict:
    """A notebook of code cells, given as source or (id, source)."""
    pairs = [("", each) if isinstance(each, str) else each for each in cells]
    code = [{"cell_type": "code", "id": id, "metadata": {}, "outputs": [], "source": source} for id, source in pairs]
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": code, **others}


def write(path: Path, content: bytes | str | dict | list = DP) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not isinstance(content, bytes):
        content = (content if isinstance(content, str) else json.dumps(content)).encode()
    path.write_bytes(content)
    return path


def read(submission: Submission) -> Submission:
    submission.read(tempfile.TemporaryFile())  # noqa: SIM115  the submission keeps it
    return submission


def problem_of(submission: Submission, stem: str) -> str:
    return submission.problem(stem)[0]


def cells_of(submission: Submission, stem: str) -> list[Cell]:
    return [] if problem_of(submission, stem) else submission.cells(stem)


def only(folder: Path) -> Submission:
    (found,) = find(folder)
    return read(found)


def of(tmp_path: Path, content, name: str = "dp.ipynb") -> Submission:
    write(tmp_path / "alice" / name, content)
    return only(tmp_path)


def functions(submission: Submission, stem: str) -> list[str]:
    return re.findall(r"^def (\w+)", "\n".join(each.source for each in cells_of(submission, stem)), re.M)


class TestFind:
    def test_one_notebook(self, tmp_path):
        (found,) = find(write(tmp_path / "alice.ipynb"))
        assert (found.learner, found.notes) == ("alice", [])
        assert problem_of(read(found), "dp") == ""

    def test_a_link_that_the_instructor_names_is_followed(self, tmp_path):
        write(tmp_path / "far" / "alice.ipynb")
        (tmp_path / "near").symlink_to(tmp_path / "far")
        (tmp_path / "one.ipynb").symlink_to(tmp_path / "far" / "alice.ipynb")
        assert problem_of(only(tmp_path / "near"), "dp") == ""
        assert problem_of(only(tmp_path / "one.ipynb"), "dp") == ""
        assert only(tmp_path / "one.ipynb").learner == "one"

    def test_a_folder_a_learner(self, tmp_path):
        for name in ("dp.ipynb", "collectives.ipynb"):
            write(tmp_path / "zoë" / name, DP if name.startswith("dp") else COLLECTIVES)
        write(tmp_path / "bob" / "exercises" / "dp.ipynb")
        (tmp_path / "carol").mkdir()
        bob, carol, zoe = find(tmp_path)
        assert [each.learner for each in (bob, carol, zoe)] == ["bob", "carol", "zoë"]
        assert problem_of(read(bob), "dp") == ""
        assert problem_of(read(bob), "collectives") == "no notebook collectives.ipynb was handed in"
        assert problem_of(read(carol), "dp") == (
            "no notebook dp.ipynb was handed in (no notebook (.ipynb) is in the folder)"
        )
        assert read(zoe).stems == {"collectives", "dp"}
        assert functions(read(zoe), "dp")[0] == "sgd_step"

    def test_a_file_a_learner(self, tmp_path):
        names = ["alice_collectives.ipynb", "dp-alice (1).ipynb", "bob.ipynb", "Dave.IPYNB", "eve_dp.ipynb.txt"]
        for name in names:
            write(tmp_path / name, COLLECTIVES if "collectives" in name else DP)
        write(tmp_path / "bob" / "collectives.ipynb", COLLECTIVES)
        found = find(tmp_path)
        assert [each.learner for each in found] == ["Dave", "alice", "bob", "eve"]
        for each in found:
            assert problem_of(read(each), "dp") == ""
            assert (problem_of(read(each), "collectives") == "") == (each.learner in ("alice", "bob"))

    def test_the_folder_of_one_learner(self, tmp_path):
        write(tmp_path / "fork" / "dp.ipynb")
        write(tmp_path / "fork" / "collectives.ipynb", COLLECTIVES)
        write(tmp_path / "fork" / "collectives-Copy1.ipynb", COLLECTIVES)
        write(tmp_path / "fork" / "tools.py", "x = 1")
        submission = only(tmp_path / "fork")
        assert submission.learner == "fork"
        assert problem_of(submission, "dp") == problem_of(submission, "collectives") == ""
        assert [each.learner for each in find(ROOT / "exercises")] == ["exercises"]

    @pytest.mark.parametrize(
        ("name", "learner"),
        [
            ("alice", "alice"),
            ("alice_collectives", "alice"),
            ("collectives_alice", "alice"),
            ("alice-dp-final", "alice_final"),
            ("Alice Smith_12345_assignsubmission_file_dp", "Alice Smith_12345"),
            ("smithalice_LATE_12_34_dp-1", "smithalice_LATE_12_34_1"),
            ("team_3_dp", "team_3"),
            ("dp_3", "3"),
            ("dp_team_12", "team_12"),
            ("alice (1)", "alice (1)"),
            ("alice_DP (2)", "alice"),
            ("adpk", "adpk"),
            ("dp", ""),
            ("dp (1)", ""),
            ("dp-Copy1", ""),
            ("dp_solutions", ""),
            ("_dp_", ""),
        ],
    )
    def test_learner_in_a_name(self, name, learner):
        assert learner_of(f"{name}.ipynb", STEMS) == learner

    def test_learner_of_a_folder(self):
        assert learner_of("Alice Smith_12345_assignsubmission_file_") == "Alice Smith_12345"
        assert learner_of("x.ipynb") == "x"
        assert learner_of("_") == "_"

    def test_what_is_no_notebook_is_told(self, tmp_path):
        for name in ("alice.zip", "bob_dp.pdf", "grades.csv", "README.md"):
            write(tmp_path / name, "x")
        write(tmp_path / "carol" / "report.docx", "x")
        found = find(tmp_path)
        assert [(each.learner, each.notes) for each in found] == [
            ("alice", ["alice.zip is no notebook (.ipynb)"]),
            ("bob", ["bob_dp.pdf is no notebook (.ipynb)"]),
            ("carol", ["no notebook (.ipynb) is in the folder, only report.docx"]),
        ]
        assert (
            problem_of(read(found[0]), "dp") == "no notebook dp.ipynb was handed in (alice.zip is no notebook (.ipynb))"
        )

    def test_hidden_things_are_passed_over(self, tmp_path):
        for name in (".dp.ipynb", ".ipynb_checkpoints/dp-checkpoint.ipynb", "__MACOSX/._dp.ipynb", "venv/x.ipynb"):
            write(tmp_path / name)
            write(tmp_path / "alice" / name)
        assert [(each.learner, each.paths) for each in find(tmp_path)] == [("alice", [])]

    @pytest.mark.parametrize("folder", ["missing", "text.txt/below", "pipe"])
    def test_refuses_what_is_no_folder(self, tmp_path, folder):
        write(tmp_path / "text.txt", "x")
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(ValueError, match="submissions must be a notebook or a folder"):
            find(tmp_path / folder)

    def test_empty_folder(self, tmp_path):
        assert find(tmp_path) == []

    def test_never_opens_a_file(self, tmp_path, monkeypatch):
        write(tmp_path / "alice.ipynb")
        write(tmp_path / "bob" / "dp.ipynb")
        opened = []
        real = os.open

        def watched(path, *rest, **named):
            opened.append(path)
            return real(path, *rest, **named)

        monkeypatch.setattr(os, "open", watched)
        assert len(find(tmp_path)) == 2
        assert not [each for each in opened if "ipynb" in str(each)]


class TestStrangeFolders:
    def test_links_are_not_followed(self, tmp_path):
        write(tmp_path / "outside" / "dp.ipynb")
        inside = tmp_path / "in"
        write(inside / "alice" / "notes.txt", "x")
        (inside / "alice" / "dp.ipynb").symlink_to(tmp_path / "outside" / "dp.ipynb")
        (inside / "alice" / "loop").symlink_to(".")
        (inside / "alice" / "endless.ipynb").symlink_to("/dev/zero")
        (inside / "alice" / "dangling.ipynb").symlink_to("nowhere")
        (inside / "bob").symlink_to(tmp_path / "outside")
        (inside / "carol.ipynb").symlink_to(tmp_path / "outside" / "dp.ipynb")
        alice, bob, carol = map(read, find(inside))
        assert problem_of(alice, "dp") == "dp.ipynb is a link, which is not followed"
        assert tuple(alice.notes) == ("loop is a link, which is not followed",)
        assert "endless.ipynb is a link" in problem_of(alice, "collectives")
        assert problem_of(bob, "dp") == "no notebook dp.ipynb was handed in (bob is a link, which is not followed)"
        assert problem_of(carol, "dp") == "carol.ipynb is a link, which is not followed"
        assert not any(cells_of(each, "dp") for each in (alice, bob, carol))

    def test_nothing_changes_between_the_look_and_the_reading(self, tmp_path):
        write(tmp_path / "outside" / "dp.ipynb")
        for name in ("alice", "bob"):
            write(tmp_path / "in" / name / "sub" / "dp.ipynb", BLANK_DP)
        alice, bob = find(tmp_path / "in")
        path = tmp_path / "in" / "alice" / "sub" / "dp.ipynb"
        path.unlink()
        path.symlink_to(tmp_path / "outside" / "dp.ipynb")
        (tmp_path / "in" / "bob" / "sub").rename(tmp_path / "away")
        (tmp_path / "in" / "bob" / "sub").symlink_to(tmp_path / "outside")
        assert "is a link" in problem_of(read(alice), "dp")
        assert "cannot be opened" in problem_of(read(bob), "dp")
        climbing = tmp_path / "in" / ".." / "outside" / "dp.ipynb"
        assert "cannot be opened" in problem_of(read(Submission("eve", climbing.parent, [climbing])), "dp")

    def test_pipes_sockets_and_folders_never_block(self, tmp_path, monkeypatch):
        folder = tmp_path / "alice"
        folder.mkdir()
        os.mkfifo(folder / "dp.ipynb")
        (folder / "x.ipynb").mkdir()
        write(folder / "x.ipynb" / "collectives.ipynb", COLLECTIVES)
        monkeypatch.chdir(folder)  # the path of a socket must be short
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("collectives_2.ipynb")
            submission = only(tmp_path)
        assert problem_of(submission, "dp") == "dp.ipynb is a pipe"
        assert problem_of(submission, "collectives") == ""
        assert "collectives_2.ipynb is a socket" in submission.notes

    def test_a_pipe_that_takes_the_place_of_a_file(self, tmp_path, monkeypatch):
        path = write(tmp_path / "dp.ipynb")
        ordinary = os.stat_result((stat.S_IFREG | 0o600, 0, 0, 1, 0, 0, 10, 0, 0, 0))
        path.unlink()
        os.mkfifo(path)
        monkeypatch.setattr(folders.os, "stat", lambda *args, **named: ordinary)
        with pytest.raises(folders.Refused, match="is a pipe"):
            folders.content(path, 1000)

    def test_a_device(self):
        with pytest.raises(folders.Refused, match="is a device"):
            folders.content(Path("/dev/zero"), 1000)

    def test_a_file_that_grows_while_it_is_read(self, tmp_path, monkeypatch):
        path = write(tmp_path / "dp.ipynb", b"x" * 2000)
        small = os.stat_result((stat.S_IFREG | 0o600, 0, 0, 1, 0, 0, 10, 0, 0, 0))
        monkeypatch.setattr(folders.os, "stat", lambda *args, **named: small)
        monkeypatch.setattr(folders.os, "fstat", lambda opened: small)
        with pytest.raises(folders.Refused, match="is larger than 0 MiB"):
            folders.content(path, 1000)

    @REFUSED_TO_ROOT
    def test_unreadable(self, tmp_path):
        write(tmp_path / "alice" / "dp.ipynb").chmod(0)
        write(tmp_path / "bob" / "dp.ipynb")
        (tmp_path / "bob").chmod(0)
        alice, bob = map(read, find(tmp_path))
        (tmp_path / "bob").chmod(0o700)
        assert problem_of(alice, "dp") == "dp.ipynb cannot be opened (Permission denied)"
        assert "cannot be opened (Permission denied)" in problem_of(bob, "dp")

    def test_unreadable_for_whoever_runs_this(self, tmp_path, monkeypatch):
        write(tmp_path / "alice" / "sub" / "dp.ipynb")
        write(tmp_path / "bob" / "dp.ipynb")
        for name in ("open", "scandir"):
            real = getattr(os, name)

            def refuse(path, *rest, real=real):
                if str(path).endswith(("sub", "bob/dp.ipynb")):
                    raise PermissionError(13, "Permission denied", path)
                return real(path, *rest)

            monkeypatch.setattr(folders.os, name, refuse)
        alice, bob = map(read, find(tmp_path))
        assert "sub cannot be opened (Permission denied)" in alice.notes
        assert problem_of(bob, "dp") == "dp.ipynb cannot be opened (Permission denied)"

    @pytest.mark.parametrize(
        "name",
        [
            "a\nb",
            "a\rb",
            "‮cod.exe",
            "a\x1b[31mb",
            "\udcff\udcfe",
            "é" * 100,
            "名前 🦊",
            " a ",
            "...",
            "-rf",
            "'; drop table",
            "a\\b",
            "<script>",
            "x" * 200,
            "\u200b",
            "CON",
        ],
    )
    def test_names(self, tmp_path, lacking, name):
        folder = tmp_path / (name if not name.startswith(".") else f"x{name}")
        try:
            write(folder / "dp.ipynb")
            write(folder / "exer\ncises" / "collectives_\x07.ipynb", "{")
        except (OSError, UnicodeEncodeError):
            lacking("this file system has no such names")
        (found,) = find(tmp_path)
        submission = read(found)
        assert problem_of(submission, "dp") == ""
        assert submission.learner == printable(submission.learner)
        for text in (found.learner, problem_of(submission, "collectives"), *submission.notes):
            assert text.isprintable()
            text.encode()
        safe = file_name(submission.learner)
        assert safe == Path(safe).name
        write(tmp_path / "results" / f"{safe}.json", "{}")

    def test_learners_whose_names_look_alike_stay_apart(self, tmp_path):
        names = ["a\nb", "a b", "A B", "a  b", "a\x01b", "a\x02b", "e\u0301", "\u00e9", "ﬁ", "fi"]
        for number, name in enumerate(names):
            write(tmp_path / name / "dp.ipynb", notebook(("dp-1", f"def sgd_step(): return {number}")))
        found = find(tmp_path)
        assert len({each.learner.casefold() for each in found}) == len(names)
        assert len({file_name(each.learner).casefold() for each in found}) == len(names)
        assert len({read(each).digest for each in found}) == len(names)

    def test_thousands_of_files(self, tmp_path, monkeypatch):
        for number in range(300):
            write(tmp_path / "alice" / f"{number:03}.ipynb", "{}")
            write(tmp_path / "alice" / f"{number:03}.txt", "x")
        write(tmp_path / "alice" / "z" / "dp.ipynb")
        (found,) = find(tmp_path)
        assert found.paths[0].name == "dp.ipynb"
        assert len(found.paths) == submissions.MAX_NOTEBOOKS
        assert tuple(found.notes) == ("there are 301 notebooks, of which 50 are read",)
        submission = read(found)
        assert problem_of(submission, "dp") == ""
        assert len(submission.notes) == 31
        assert submission.notes[-1] == "and 20 more notes of this kind"
        monkeypatch.setattr(folders, "MAX_ENTRIES", 100)
        (found,) = find(tmp_path)
        assert found.paths == []
        assert "holds more than" in problem_of(read(found), "dp")

    def test_deep_folders(self, tmp_path):
        folder = tmp_path / "alice"
        write(folder / "1" / "2" / "3" / "4" / "dp.ipynb")
        write(folder / "1" / "2" / "3" / "4" / "5" / "collectives.ipynb", COLLECTIVES)
        submission = only(tmp_path)
        assert problem_of(submission, "dp") == ""
        assert problem_of(submission, "collectives") == "no notebook collectives.ipynb was handed in"
        assert tuple(submission.notes) == ("1/2/3/4/5 lies too many folders deep, so it is not read",)

    def test_all_notebooks_together_are_bounded(self, tmp_path, monkeypatch):
        monkeypatch.setattr(submissions, "MAX_LEARNER_BYTES", len(COLLECTIVES) + 10)
        write(tmp_path / "alice" / "collectives.ipynb", COLLECTIVES)
        write(tmp_path / "alice" / "dp.ipynb")
        submission = only(tmp_path)
        assert problem_of(submission, "collectives") == ""
        assert "is not read" in problem_of(submission, "dp")


class TestChapter:
    def test_by_ids_whatever_the_name(self, tmp_path):
        assert functions(of(tmp_path, DP, "collectives.ipynb"), "dp")[0] == "sgd_step"

    def test_by_functions_where_there_are_no_ids(self, tmp_path):
        content = notebook("def helper():\n    pass", "async def sgd_step(): pass")
        assert problem_of(of(tmp_path, content, "homework.ipynb"), "dp") == ""
        content = notebook("accumulate = make()")
        assert problem_of(of(tmp_path, content, "homework.ipynb"), "dp") == ""

    def test_both_chapters_in_one_notebook(self, tmp_path):
        both = json.loads(DP)
        both["cells"] += json.loads(COLLECTIVES)["cells"]
        submission = of(tmp_path, both, "all.ipynb")
        assert problem_of(submission, "dp") == problem_of(submission, "collectives") == ""
        assert cells_of(submission, "dp") == cells_of(submission, "collectives")

    @pytest.mark.parametrize("name", ["dp.ipynb", "homework.ipynb"])
    def test_another_course(self, tmp_path, name):
        submission = of(tmp_path, notebook("import pandas", ("week-1", "def solve(): sgd_step()")), name)
        assert problem_of(submission, "dp") == (
            f"{name} is of another course: it has no exercise of this one, such as"
            " `memory-1` with `llama_parameters` or `collectives-1` with `holds_after`"
        )
        assert cells_of(submission, "dp") == []

    @pytest.mark.parametrize(
        "content", [notebook(), notebook("", " \n"), {**notebook(), "cells": [{"cell_type": "raw"}]}]
    )
    def test_no_code(self, tmp_path, content):
        assert "dp.ipynb holds no code" in problem_of(of(tmp_path, content), "dp")

    def test_of_two_notebooks_the_one_with_more_answers_counts(self, tmp_path):
        write(tmp_path / "alice" / "dp.ipynb", BLANK_DP)
        write(tmp_path / "alice" / "sub" / "dp-Copy1.ipynb", DP)
        submission = only(tmp_path)
        assert "raise NotImplementedError" not in "".join(each.source for each in cells_of(submission, "dp"))
        assert tuple(submission.notes) == (
            "dp.ipynb is another notebook of chapter dp; sub/dp-Copy1.ipynb counts (6 answers, against 0)",
        )

    def test_of_equals_the_plain_name_counts_whatever_the_times(self, tmp_path):
        names = ["a/dp.ipynb", "dp.ipynb", "dp (1).ipynb", "a.ipynb"]
        for times in (range(4), reversed(range(4))):
            for name, time in zip(names, times, strict=True):
                path = write(tmp_path / "alice" / name, notebook(("dp-1", f"def sgd_step(): return {name!r}")))
                os.utime(path, (time, time))
            submission = only(tmp_path)
            assert cells_of(submission, "dp")[0].source == "def sgd_step(): return 'dp.ipynb'"
            assert len(submission.notes) == 3

    def test_a_broken_notebook_beside_a_good_one_is_told(self, tmp_path):
        write(tmp_path / "alice" / "dp.ipynb")
        write(tmp_path / "alice" / "dp_old.ipynb", "{")
        write(tmp_path / "alice" / "x.ipynb", "")
        submission = only(tmp_path)
        assert problem_of(submission, "dp") == ""
        assert sorted(each.split(" is ")[0] for each in submission.notes) == ["dp_old.ipynb", "x.ipynb"]
        assert problem_of(submission, "collectives") == "no notebook collectives.ipynb was handed in"


class TestCells:
    def test_added_and_deleted(self, tmp_path):
        told = json.loads(DP)
        told["cells"] = [each for each in told["cells"] if each["id"] not in ("dp-2", "setup")]
        told["cells"].insert(0, notebook("x = 1")["cells"][0])
        submission = of(tmp_path, told)
        assert cells_of(submission, "dp")[0] == Cell("", "x = 1")
        assert not {"dp-2", "setup"} & {each.id for each in cells_of(submission, "dp")}

    def test_duplicated_id(self, tmp_path):
        submission = of(tmp_path, notebook(("dp-1", "def sgd_step(): 1"), ("dp-1", "def sgd_step(): 2")))
        assert tuple(submission.notes) == ("dp.ipynb: 2 cells have the id `dp-1`, and the last that answers counts",)
        assert [each.source for each in cells_of(submission, "dp")] == ["def sgd_step(): 1", "def sgd_step(): 2"]

    def test_turned_into_text(self, tmp_path):
        told = json.loads(DP)
        next(each for each in told["cells"] if each["id"] == "dp-3")["cell_type"] = "markdown"
        submission = of(tmp_path, told)
        assert tuple(submission.notes) == ("dp.ipynb: cell `dp-3` is no code cell, so what it holds does not count",)

    @pytest.mark.parametrize("version", [(4, 4), (4, 0), (3, 0), (2, 0)])
    def test_old_versions(self, tmp_path, version):
        told = json.loads(DP)
        told["nbformat"], told["nbformat_minor"] = version
        for each in told["cells"]:
            del each["id"]
            each["metadata"] = {}
            if version[0] < 4 and each["cell_type"] == "code":
                each["input"] = each.pop("source")
        if version[0] < 4:
            told["worksheets"] = [{"cells": told["cells"][:5]}, {"cells": told.pop("cells")[5:]}]
        submission = of(tmp_path, told, "alice.ipynb")
        assert problem_of(submission, "dp") == ""
        assert functions(submission, "dp") == [each.function for id, each in all_exercises().items() if id[:2] == "dp"]

    def test_cells_without_ids_get_those_of_their_functions(self, tmp_path):
        told = json.loads(DP)
        for each in told["cells"]:
            del each["id"]
            each["metadata"] = {}
        ids = [each.id for each in cells_of(of(tmp_path, told), "dp")]
        assert ids == ["", "dp-1", "", "dp-2", "", "dp-3", "", "dp-4", "", "dp-5", "", "dp-6", ""]
        two = "def accumulate(): 3\ndef sgd_step(): 4"
        content = notebook(("dp-1", "def sgd_step(): 1"), "def sgd_step(): 2", two, "x = 1")
        assert [each.id for each in cells_of(of(tmp_path, content), "dp")] == ["dp-1", "", "dp-5", ""]

    def test_ids_of_nbgrader_where_a_program_gave_new_ones(self, tmp_path):
        told = json.loads(DP)
        for number, each in enumerate(told["cells"]):
            each["id"] = f"random{number}"
        assert [each.id for each in cells_of(of(tmp_path, told), "dp")][1:3] == ["dp-1", "dp-1-check"]
        copied = json.loads(DP)
        copied["cells"].append({**copied["cells"][3], "id": "copy"})
        assert cells_of(of(tmp_path, copied), "dp")[-1].id == "copy", "the id stands elsewhere"

    def test_windows_line_ends(self, tmp_path):
        windows = DP.replace(b"\\n", b"\\r\\n").replace(b"\n", b"\r\n")
        assert windows != DP
        assert of(tmp_path, windows).digest == of(tmp_path, DP).digest

    @pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
    def test_encodings(self, tmp_path, encoding):
        assert cells_of(of(tmp_path, DP.decode().encode(encoding)), "dp") == cells_of(of(tmp_path, DP), "dp")

    def test_latin_1(self, tmp_path):
        content = json.dumps(notebook(("dp-1", "def sgd_step(): 'é'")), ensure_ascii=False).encode("latin-1")
        submission = of(tmp_path, content)
        assert cells_of(submission, "dp")[0].source == "def sgd_step(): 'é'"

    def test_lone_surrogates_can_be_written(self, tmp_path):
        submission = of(tmp_path, notebook(("dp-1", "def sgd_step(): '\ud800 \U0001f98a'")))
        assert cells_of(submission, "dp")[0].source == "def sgd_step(): '\ufffd \U0001f98a'"

    def test_tags_and_metadata_change_nothing(self, tmp_path):
        told = json.loads(DP)
        for each in told["cells"]:
            each["metadata"] = {"tags": ["skip-execution", "remove-cell"], "nbgrader": {"grade": False}}
        assert of(tmp_path, told).digest == of(tmp_path, DP).digest

    @pytest.mark.parametrize(
        "cell",
        [
            None,
            7,
            "text",
            [],
            {},
            {"cell_type": 7},
            {"cell_type": "code"},
            {"cell_type": "code", "source": None},
            {"cell_type": "code", "source": 7},
            {"cell_type": "code", "source": ["a", 7, None]},
            {"cell_type": "code", "source": {"a": "b"}},
            {"cell_type": "code", "id": ["dp-1"], "source": "x"},
            {"cell_type": "code", "id": "a\nb", "source": "x"},
            {"cell_type": "code", "id": "x" * 65, "source": "x"},
            {"cell_type": "code", "metadata": 7, "source": "x"},
            {"cell_type": "code", "metadata": {"nbgrader": [], "id": {}}, "source": "x"},
            {"cell_type": "code", "metadata": {"nbgrader": {"grade_id": 7}}, "source": "x"},
            {"cell_type": "markdown", "id": {}, "source": "x"},
        ],
    )
    def test_a_strange_cell_costs_no_other(self, tmp_path, cell):
        told = json.loads(DP)
        told["cells"].insert(0, cell)
        told["cells"].append(cell)
        submission = of(tmp_path, told)
        assert problem_of(submission, "dp") == ""
        assert set(cells_of(of(tmp_path, DP), "dp")) <= set(cells_of(submission, "dp"))


class TestProblems:
    @pytest.mark.parametrize(
        ("content", "told"),
        [
            ("", "is empty"),
            (" \n\t ", "is empty"),
            ("{", "is no valid JSON (Expecting property name enclosed in double quotes, at line 1, column 2)"),
            ("\x00\x01\x02", "is no valid JSON"),
            (b"\xff\xfe\x00", "is no valid JSON"),
            (b"\xff" * 100, "JSON"),
            ("[]", "is JSON, but no notebook"),
            ("7", "is JSON, but no notebook"),
            ("NaN", "is JSON, but no notebook"),
            ("null", "is JSON, but no notebook"),
            ("true", "is JSON, but no notebook"),
            ('"cells"', "is JSON, but no notebook"),
            ("1" * 100_000, "is JSON, but no notebook"),
            ("1e999999999", "is JSON, but no notebook"),
            ("{}", "is JSON, but no notebook: it has no list of cells"),
            ('{"cells": {}}', "is JSON, but no notebook: it has no list of cells"),
            ('{"cells": null, "worksheets": 7}', "is JSON, but no notebook"),
            ('{"worksheets": [7, {}, {"cells": 7}, {"cells": [7]}]}', "holds no code"),
            ("[" * 100_000, "nested too deeply"),
            ('{"a":' * 100_000, "nested too deeply"),
            ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
            ("[" + "[]," * MAX_VALUES + "[]]", f"holds more than {MAX_VALUES} values, which no notebook needs"),
            (json.dumps(notebook(*["x" * 2**20] * 3)), f"holds more than {MAX_CODE_CHARS} characters of code"),
            (b"PK\x03\x04abc", "is a zip archive, not a notebook"),
            ("%PDF-1.4", "is a PDF, not a notebook"),
            ("\n<!DOCTYPE html><html>", "is a web page"),
            ("version https://git-lfs.github.com/spec/v1", "is a pointer of Git LFS"),
            (DP.replace(b'"cells"', b'<<<<<<< HEAD\n=======\n>>>>>>> b\n"cells"'), "merge conflict"),
            (DP[: len(DP) // 2], "is no valid JSON"),
        ],
        ids=range(29),
    )
    def test_are_told_in_one_line(self, tmp_path, content, told):
        for name in ("dp.ipynb", "homework.ipynb"):
            submission = of(tmp_path, content, name)
            problem = problem_of(submission, "dp")
            assert problem.startswith("dp.ipynb " if name == "dp.ipynb" else "homework.ipynb ") or "; " in problem
            assert told in problem
            assert problem.isprintable()
            assert len(problem) < 400
            assert cells_of(submission, "dp") == []
            (tmp_path / "alice" / name).unlink()

    def test_500_mb_are_refused_before_they_are_read(self, tmp_path, monkeypatch):
        path = write(tmp_path / "alice" / "dp.ipynb", "")
        os.truncate(path, 500 * 2**20)
        monkeypatch.setattr(folders.os, "fdopen", None)
        assert problem_of(only(tmp_path), "dp") == (
            "dp.ipynb is 500 MiB large, and notebooks of more than 20 MiB are not read"
        )

    def test_large_outputs_are_fine_up_to_the_bound(self, tmp_path):
        told = json.loads(DP)
        told["cells"][2]["outputs"] = [{"data": {"image/png": "A" * (MAX_NOTEBOOK_BYTES - 100_000)}}]
        assert of(tmp_path, told).digest == of(tmp_path, DP).digest

    def test_duplicate_keys_are_read_as_jupyter_reads_them(self, tmp_path):
        content = f'{{"cells": 7, "cells": {json.dumps(notebook(("dp-1", "x = 1"))["cells"])}}}'
        assert cells_of(of(tmp_path, content), "dp")[0].source == "x = 1"

    def test_several_are_told_together(self, tmp_path):
        for number in range(5):
            write(tmp_path / "alice" / f"{number}.ipynb", "")
        told = problem_of(only(tmp_path), "dp")
        assert told == "0.ipynb is empty; 1.ipynb is empty; 2.ipynb is empty; and 2 more"

    def test_a_fault_of_ours_costs_one_notebook(self, tmp_path, monkeypatch):
        def fails(data):
            raise MemoryError

        monkeypatch.setattr(submissions, "parse", fails)
        assert problem_of(of(tmp_path, DP), "dp") == "dp.ipynb cannot be read (MemoryError)"

    def test_gone_since(self, tmp_path):
        path = write(tmp_path / "alice" / "dp.ipynb")
        (found,) = find(tmp_path)
        path.unlink()
        assert problem_of(read(found), "dp") == "dp.ipynb cannot be opened (No such file or directory)"


class TestDigest:
    def test_depends_on_what_is_graded_alone(self, tmp_path):
        first = of(tmp_path / "1", DP)
        write(tmp_path / "2" / "bob" / "sub" / "alice.ipynb", json.dumps(json.loads(DP), indent=7))
        os.utime(tmp_path / "2" / "bob" / "sub" / "alice.ipynb", (1, 1))
        assert only(tmp_path / "2").digest == first.digest
        assert re.fullmatch("[0-9a-f]{64}", first.digest)

    def test_changes_with_every_cell_and_every_problem(self, tmp_path):
        contents = [DP, BLANK_DP, COLLECTIVES, DP.replace(b"dp-1", b"dp-9"), "", "{", notebook(("dp-1", ""))]
        assert len({of(tmp_path / str(n), each).digest for n, each in enumerate(contents)}) == len(contents)

    def test_cells_do_not_run_into_each_other(self, tmp_path):
        pairs = [[("dp-1", "ab"), ("dp-2", "c")], [("dp-1", "a"), ("dp-2", "bc")], [("dp-1", "abc"), ("dp-2", "")]]
        assert len({of(tmp_path / str(n), notebook(*each)).digest for n, each in enumerate(pairs)}) == 3


class TestSafeName:
    @pytest.mark.parametrize("name", ["alice", "Müller", "smithalice_LATE_12", "a.b-c.org", "名前", "x"])
    def test_ordinary_names_stay(self, name):
        assert file_name(name) == name

    @pytest.mark.parametrize(
        "name",
        [
            "",
            ".",
            "..",
            ".hidden",
            "-x",
            "a b",
            "a/b",
            "a\\b",
            "a:b",
            "CON",
            "nul.txt",
            "a.",
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
    st.sampled_from(["code", "markdown", "dp-1", "setup", "def sgd_step(): pass", "\ud800"]),
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
        "import sys, tempfile\nfrom dtlib.grading.intake import find\n"
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
