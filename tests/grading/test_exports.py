"""What programs read: JSON and its schemas, JUnit, Gradescope, tables; and files that are whole or not there."""

from __future__ import annotations

import csv
import json
import threading
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest

from dtlib.grading.classroom import report
from dtlib.grading.classroom.report import folder, text
from dtlib.grading.classroom.seals import Key
from dtlib.grading.exercises.catalogue import all_exercises

from .classroom import PAPER, load
from .records import EVIL, junit_of, learner

pytestmark = pytest.mark.usefixtures("home")


def test_the_json_is_what_its_schema_says(out):
    for name in ("results", "learner"):
        jsonschema.Draft202012Validator.check_schema(report.schema(name))
    jsonschema.validate(load(out / "results.json"), report.schema())
    learners = list((out / "learners").glob("*.json"))
    assert len(learners) == 8
    for path in learners:
        jsonschema.validate(load(path), report.schema("learner"))


def test_the_schema_refuses_other_data(out):
    data = load(out / "results.json")
    for change in ({"schema": "dtlib-grade/1"}, {"state": "done"}, {"learners": [{}]}, {"more": 1}, {"seed": -1}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**data, **change}, report.schema())


def test_every_field_of_the_schema_is_explained():
    def look(schema, path=""):
        for name, each in schema.get("properties", {}).items():
            assert each.get("description"), f"{path}/{name}"
            look(each, f"{path}/{name}")
            look(each.get("items", {}), f"{path}/{name}")

    for name in ("results", "learner"):
        look(report.schema(name), name)


# Texts of learners


def test_gradescope_gets_its_format(out):
    for path in (out / "gradescope").iterdir():
        data = load(path)
        assert data["score"] == sum(test["score"] for test in data["tests"])
        assert data["max_score"] == sum(test["max_score"] for test in data["tests"]) == 15
        assert data["visibility"] == "visible"
        assert data["stdout_visibility"] == "hidden"
        assert isinstance(data["execution_time"], int)
        for test in data["tests"]:
            assert set(test) == {"score", "max_score", "status", "name", "number", "output", "visibility"}
            assert test["status"] in ("passed", "failed")
            assert 0 <= test["score"] <= test["max_score"]
    bob = {test["number"]: test for test in load(out / "gradescope" / "bob.json")["tests"]}
    assert bob["2.1"]["name"].startswith("collectives.2 bytes: ")
    assert bob["2.2"]["status"] == "failed"
    assert bob["2.2"]["output"].startswith("Saw 0")


def test_junit_has_a_suite_a_learner_and_a_case_a_check(out):
    root = ElementTree.parse(out / "junit.xml").getroot()
    suites = {suite.get("name"): suite for suite in root}
    assert set(suites) == {"=cleo()", "Gus", "anna", "bob", "dan", "eve", "fay", "gus (2)"}
    num_checks = sum(len(all_exercises()[name].checks) for name in PAPER)
    assert {int(suite.get("tests")) for suite in suites.values()} == {num_checks}
    failures = {
        name: (suite.get("failures"), suite.get("skipped"), suite.get("errors")) for name, suite in suites.items()
    }
    assert failures["anna"] == ("0", "0", "0")
    assert failures["bob"] == ("1", "4", "0")
    assert failures["dan"] == ("0", str(num_checks), "0")
    assert failures["fay"][2] == str(len(all_exercises()["collectives.1"].checks))
    (case,) = [case for case in suites["bob"] if case.find("failure") is not None]
    assert (case.get("classname"), case.get("name")) == ("collectives.2", "seconds (value)")


@pytest.mark.parametrize("evil", EVIL)
def test_junit_is_xml_whatever_a_learner_writes(evil):
    root = junit_of([learner(evil, evil, evil)])
    assert len(root) == 1


def test_the_tables_are_for_spreadsheets_and_no_cell_is_a_formula(out):
    with (out / "scores.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["learner"] for row in rows] == ["'=cleo()", "Gus", "anna", "bob", "dan", "eve", "fay", "gus (2)"]
    assert rows[3] == {
        **{"learner": "bob", "status": "graded", "points": "8", "max_points": "15", "percent": "53.3"},
        **{"collectives.1": "5", "collectives.2": "3", "collectives.3": "0"},
    }
    assert text.cell("+1") == "'+1"
    assert text.cell("\t=1") == "'=1"


# For the instructor


def test_a_file_is_whole_or_as_it_was_before(tmp_path):
    with folder.Folder(tmp_path / "out", Key()) as place:
        path = place.path / "results.json"
        place.write_json(path, {"points": 1})
        seen = set()
        stop = threading.Event()

        def read():
            while not stop.is_set():
                seen.add(json.loads(path.read_text())["points"])

        reader = threading.Thread(target=read)
        reader.start()
        for number in range(2, 60):
            place.write_json(path, {"points": number, "more": "x" * 100_000})
        stop.set()
        reader.join()
        assert seen <= set(range(1, 60))
        with pytest.raises(ZeroDivisionError), place.writing(path) as file:
            file.write(f"half of {1 / 0}")
        assert load(path)["points"] == 59
        assert sorted(each.name for each in place.path.iterdir()) == [
            folder.LOCK,
            "feedback",
            "gradescope",
            "learners",
            "reports",
            "results.json",
        ]


def test_every_file_is_synced_before_it_takes_its_name(tmp_path, monkeypatch):
    happened = []
    fsync, rename = folder.os.fsync, Path.replace
    monkeypatch.setattr(folder.os, "fsync", lambda fd: (happened.append("sync"), fsync(fd)))
    monkeypatch.setattr(Path, "replace", lambda self, to: (happened.append("replace"), rename(self, to))[1])
    with folder.Folder(tmp_path / "out", Key()) as place:
        report.write_learner(place, "anna", learner())
    assert happened == ["sync", "replace"] * 4


def test_a_seal_covers_every_byte():
    key = Key()
    sealed = key.sealed(learner()).encode()
    assert key.opened(sealed) == learner()
    for at in range(0, len(sealed), 97):
        assert key.opened(sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :]) is None
    for wrong in (b"", b"{}", sealed[:-1], sealed + b"\n", sealed[1:]):
        assert key.opened(wrong) is None
