"""What `make test` and `make soak` say of their own length."""

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_guards" name="test_rooms" time="10"/>
<testcase classname="tests.grading.test_answers.TestDp" name="test_it" time="60"/>
<testcase classname="tests.book.test_browser" name="test_page[chapters/zero.html]" time="30"/>
</testsuite></testsuites>"""


@pytest.fixture
def minutes(tmp_path):
    tool = runpy.run_path(str(ROOT / "_ext" / "minutes.py"))
    tool["measured"].__globals__["NOTES"] = tmp_path
    (tmp_path / "unit.json").write_text(json.dumps({"seconds": 50.0}))
    (tmp_path / "unit.xml").write_text(REPORT)
    (tmp_path / "book.json").write_text(json.dumps({"seconds": 100.0}))
    return tool


def test_parts_are_scaled_to_what_the_step_took_and_known_by_their_chapter(minutes):
    found = minutes["measured"]()
    assert found["unit", "tests.test_guards", None] == pytest.approx(5)
    assert found["unit", "tests.grading.test_answers.TestDp", "dp"] == pytest.approx(30)
    assert found["unit", "tests.book.test_browser", "zero"] == pytest.approx(15)
    assert sum(seconds for (step, *_), seconds in found.items() if step == "book") == pytest.approx(100)


def test_the_last_line_is_what_all_chapters_would_take(minutes, capsys):
    minutes["show"]()
    said = capsys.readouterr().out
    chapters, each = len(minutes["STEMS"]), 145 / len(minutes["STEMS"])
    assert f"2.5 min with {chapters} chapters of {each:.0f} s each" in said
    assert f"with 18 it would be {(5 + 18 * each) / 60:.1f} min." in said
    assert "30.0 s  unit: tests.grading.test_answers.TestDp" in said


def test_a_step_that_fails_fails(minutes, tmp_path):
    assert minutes["run"]("lint", ["false"]) == 1
    assert json.loads((tmp_path / "lint.json").read_text())["seconds"] > 0


@pytest.mark.parametrize(
    ("name", "chapter"),
    [
        ("tests.ranks.zero.test_zero", "zero"),
        ("chapters.dp", "dp"),
        ("tests.lab.test_wire", None),
        ("TestZeroed", None),
    ],
)
def test_a_chapter_is_known_by_a_word(minutes, name, chapter):
    assert minutes["chapter_of"](name) == chapter


@pytest.fixture
def soak():
    return runpy.run_path(str(ROOT / "_ext" / "soak.py"))


def test_rooms_that_were_soaked_apart_are_joined(soak, tmp_path):
    for room, load in (("ranks", 2.2), ("lab", 8.0)):
        (tmp_path / room).mkdir()
        (tmp_path / room / "facts.json").write_text(json.dumps({"seconds": 60, "load": load, "commit": "abc"}))
        (tmp_path / room / "junit.xml").write_text(REPORT.replace('time="60"/>', 'time="60"><failure/></testcase>'))
    rows = soak["table"](tmp_path).splitlines()
    assert len(rows) == 2 + 2 * 3
    assert "| lab | test_answers | 0 | 1 | 0 | 0.6 | 8 | abc |" in rows
    assert "| ranks | test_guards | 1 | 0 | 0 | 0.1 | 2 | abc |" in rows


def test_every_room_that_has_what_takes_long_is_soaked(soak):
    tests = ROOT / "tests"
    long = {
        path.relative_to(tests).parts[0]
        for path in tests.rglob("test_*.py")
        if "pytest.mark." + "soak" in path.read_text("utf-8")
    }
    assert long == set(soak["ROOMS"]) - {"busy", "seeds"}
