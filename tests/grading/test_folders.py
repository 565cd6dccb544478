"""Folders in every shape are searched, and each notebook is somebody's or named in a line."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from dtlib.grading.classroom.intake import Submission, find, folders, submissions
from dtlib.grading.classroom.intake.names import file_name, learner_of, printable

from .answers import ROOT
from .submitted import (
    BLANK_DP,
    COLLECTIVES,
    DP,
    STEMS,
    cells_of,
    functions,
    notebook,
    only,
    problem_of,
    read,
    write,
)

PACKED = "no notebook (.ipynb): it is packed, and counts once it is unpacked, into a folder"


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
        assert functions(read(zoe), "dp")[0] == "diagnose_backward"

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
            ("Al Dp_12345_assignsubmission_file_week 1", "Al Dp_12345"),
            ("_assignsubmission_file_dp", "assignsubmission_file"),
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
            ("alice", [f"alice.zip is {PACKED} alice"]),
            ("bob", ["bob_dp.pdf is no notebook (.ipynb)"]),
            ("carol", ["no notebook (.ipynb) is in the folder, only report.docx"]),
        ]
        assert (
            problem_of(read(found[1]), "dp")
            == "no notebook dp.ipynb was handed in (bob_dp.pdf is no notebook (.ipynb))"
        )
        with pytest.raises(ValueError, match=r"class.tar.gz' .is no notebook .*, into a folder class"):
            find(write(tmp_path / "class.tar.gz", "x"))

    def test_all_files_that_canvas_packs_of_a_learner_are_one_learners(self, tmp_path):
        names = ["adaž_12_101_dp.ipynb", "adaž_LATE_12_102_week 2-1.ipynb", "bo_13_103_dp.ipynb", "cy_14_104_dp.pdf"]
        for name in names:
            write(tmp_path / name)
        write(tmp_path / "README.md", "x")
        assert [each.learner for each in find(tmp_path)] == ["adaž_12", "bo_13", "cy_14"]

    def test_entries_of_text_and_files_of_others_leave_canvas_names_as_they_are(self, tmp_path):
        for name in (
            "adaž_12_101_dp.ipynb",
            "adaž_12_102_tp.ipynb",
            "bo_13_text.html",
            "cy_LATE_14_link.html",
            "dp.pdf",
        ):
            write(tmp_path / name)
        learners = [each.learner for each in find(tmp_path)]
        assert {"adaž_12", "bo_13", "cy_14"} < set(learners)
        assert len(learners) == 4

    def test_anonymous_files_of_canvas_are_one_learners(self, tmp_path):
        for name in ("anon_X3fa2_101_dp.ipynb", "LATE_anon_X3fa2_102_tp.ipynb", "anon_Zq_103_dp.ipynb"):
            write(tmp_path / name)
        assert [each.learner for each in find(tmp_path)] == ["anon_X3fa2", "anon_Zq"]

    @pytest.mark.parametrize("other", ["hw_2026_1127_bo.ipynb", "bo.ipynb"])
    def test_numbers_in_names_make_nobody_somebody_else(self, tmp_path, other):
        for name in ("hw_2026_1127_ada.ipynb", other):
            write(tmp_path / name)
        assert len(find(tmp_path)) == 2

    def test_hidden_things_are_passed_over(self, tmp_path):
        for name in (".dp.ipynb", ".ipynb_checkpoints/dp-checkpoint.ipynb", "__MACOSX/._dp.ipynb", "venv/x.ipynb"):
            write(tmp_path / name)
            write(tmp_path / "alice" / name)
        assert [(each.learner, each.paths) for each in find(tmp_path)] == [("alice", [])]

    @pytest.mark.parametrize("folder", ["missing", "text.txt/below", "pipe", "class.zip"])
    def test_refuses_what_is_no_folder(self, tmp_path, folder):
        write(tmp_path / "text.txt", "x")
        write(tmp_path / "class.zip", "PK")
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

    def test_unreadable(self, tmp_path, monkeypatch):
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
            write(tmp_path / name / "dp.ipynb", notebook(("dp-1", f"def diagnose_backward(): return {number}")))
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
