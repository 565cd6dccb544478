"""A notebook that was handed in gives its cells, or one sentence on why it does not."""

from __future__ import annotations

import json
import os
import re

import pytest

from dtlib.grading.classroom.intake import find, folders, submissions
from dtlib.grading.classroom.intake.notebooks import MAX_CODE_CHARS, MAX_VALUES, chapters_of, parse
from dtlib.grading.classroom.intake.submissions import MAX_NOTEBOOK_BYTES
from dtlib.grading.exercises.catalogue import all_exercises
from dtlib.grading.sandbox.runner import Cell

from .answers import ROOT
from .submitted import BLANK_DP, COLLECTIVES, DP, cells_of, functions, notebook, of, only, problem_of, read, write


class TestChapter:
    def test_by_ids_whatever_the_name(self, tmp_path):
        assert functions(of(tmp_path, DP, "collectives.ipynb"), "dp")[0] == "diagnose_backward"

    def test_by_functions_where_there_are_no_ids(self, tmp_path):
        content = notebook("def helper():\n    pass", "async def diagnose_backward(): pass")
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
        submission = of(tmp_path, notebook("import pandas", ("week-1", "def solve(): diagnose_backward()")), name)
        assert problem_of(submission, "dp") == (
            f"{name} is of another course: it has no exercise of this one, such as"
            " `memory-1` with `fastest_cards` or `collectives-1` with `holds_after`"
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
            "dp.ipynb is another notebook of chapter dp; sub/dp-Copy1.ipynb counts (7 answers, against 0)",
        )

    @pytest.mark.parametrize("left", ["    raise NotImplementedError\n", "# was: raise NotImplementedError\n"])
    def test_an_answer_above_the_line_that_raises_is_one(self, tmp_path, left):
        write(tmp_path / "alice" / "dp.ipynb", BLANK_DP)
        answer = f"def diagnose_backward(\n    events,\n):\n    return 1\n{left}"
        write(tmp_path / "alice" / "dp (1).ipynb", notebook(("dp-1", answer)))
        assert only(tmp_path).notes == [
            "dp.ipynb is another notebook of chapter dp; dp (1).ipynb counts (1 answers, against 0)"
        ]

    def test_nobody_has_answered_in_a_notebook_as_it_was_handed_out(self):
        for path in sorted((ROOT / "exercises").glob("*.ipynb")):
            (chapter,) = chapters_of(parse(path.read_bytes()), [])
            assert (chapter.stem, chapter.answers) == (path.stem, 0)

    def test_of_equals_the_plain_name_counts_whatever_the_times(self, tmp_path):
        names = ["a/dp.ipynb", "dp.ipynb", "dp (1).ipynb", "a.ipynb"]
        for times in (range(4), reversed(range(4))):
            for name, time in zip(names, times, strict=True):
                path = write(tmp_path / "alice" / name, notebook(("dp-1", f"def diagnose_backward(): return {name!r}")))
                os.utime(path, (time, time))
            submission = only(tmp_path)
            assert cells_of(submission, "dp")[0].source == "def diagnose_backward(): return 'dp.ipynb'"
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
        submission = of(
            tmp_path, notebook(("dp-1", "def diagnose_backward(): 1"), ("dp-1", "def diagnose_backward(): 2"))
        )
        assert tuple(submission.notes) == ("dp.ipynb: 2 cells have the id `dp-1`, and the last that answers counts",)
        assert [each.source for each in cells_of(submission, "dp")] == [
            "def diagnose_backward(): 1",
            "def diagnose_backward(): 2",
        ]

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
        assert ids == ["", "dp-1", "", "dp-2", "", "dp-3", "", "dp-4", "", "dp-5", "", "dp-6", "", "dp-7", ""]
        two = "def accumulate(): 3\ndef diagnose_backward(): 4"
        content = notebook(("dp-1", "def diagnose_backward(): 1"), "def diagnose_backward(): 2", two, "x = 1")
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
        content = json.dumps(notebook(("dp-1", "def diagnose_backward(): 'é'")), ensure_ascii=False).encode("latin-1")
        submission = of(tmp_path, content)
        assert cells_of(submission, "dp")[0].source == "def diagnose_backward(): 'é'"

    def test_lone_surrogates_can_be_written(self, tmp_path):
        submission = of(tmp_path, notebook(("dp-1", "def diagnose_backward(): '\ud800 \U0001f98a'")))
        assert cells_of(submission, "dp")[0].source == "def diagnose_backward(): '\ufffd \U0001f98a'"

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
