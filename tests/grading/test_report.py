import csv
import json
import threading
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest
from bs4 import BeautifulSoup
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from dtlib.grading import all_exercises, report
from dtlib.grading.checks import STEMS
from dtlib.grading.grader import grade
from dtlib.grading.judging import Graded
from dtlib.grading.report import class_md, folder, gradescope, junit, learner_md, record, results, statistics, text
from dtlib.grading.result import CheckResult, Result

from .classroom import HALF, NONE, PAPER, SEED, WALLS, FakeSandbox, hand_in, load, reference, troubled

EVIL = (
    "</p><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<!-- ",
    "# a heading",
    "[a link](https://evil.example)",
    "![a picture](https://evil.example/x.png)",
    "[ref]: https://evil.example",
    "[ref][ref] [^1]",
    "https://evil.example www.evil.example ftp://evil.example a@evil.example",
    "`code` ``more`` ```",
    "```\n# out of the fence\n```",
    "~~~\n# out of the fence\n~~~",
    "| a | b |\n|---|---|\n| c | d |",
    "**bold** __bold__ *it* _it_ ~~no~~",
    "$x$ $$y$$ \\(z\\)",
    "@somebody #1 :tada:",
    "&lt;b&gt; &#60;b&#62;",
    "\\`not code\\`",
    "line\nbreak\r\nand\rmore\u2028lines",
    "\x00\x07\x1b[31mred\x1b[0m\x1b]0;title\x07 \ud800 \ufffe \u202eback",
    "a`b<b>c</b>`d`",
    "x" * 100_000,
)


def rendered(markdown):
    html = MarkdownIt("gfm-like", {"linkify": False}).render(markdown)
    return BeautifulSoup(html, "html.parser")


def exercise(hidden=()):
    """collectives.6 with some of its checks hidden."""
    found = all_exercises()["collectives.6"]
    return replace(found, checks=tuple(replace(each, visible=each.name not in hidden) for each in found.checks))


def graded(definition, message="Saw this; expected that.", mistake="", printed=""):
    """A verdict in which the last check of an exercise fails."""
    checks = [
        CheckResult(each.name, each.kind, each.description, each.points, each.points, True)
        for each in definition.checks
    ]
    checks[-1] = replace(checks[-1], points=0, passed=False, message=message, mistake=mistake)
    outcome = Result(definition.id, definition.title, "fail", message, tuple(checks))
    return Graded(outcome, printed=printed, seconds=1.5, peak_resident_bytes=2**20, trouble="")


def learner(name="anna", message="Saw this; expected that.", printed="", notes=(), hidden=(), **options):
    definition = exercise(hidden)
    pairs = [(definition, graded(definition, message, printed=printed, **options))]
    return record.learner_record(name, "0" * 64, notes, SEED, pairs, dict.fromkeys(WALLS, ""))


def group(standings, **options):
    exercises = [{"id": each.id, "title": each.title, "points": each.points} for each in all_exercises().values()]
    about = {"version": "1", "fingerprint": "0" * 64}
    options = {"state": "complete", "walls": dict.fromkeys(WALLS, ""), **options}
    return results.Class(SEED, exercises, about, {}, {each.learner: each for each in standings}, **options)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """The results of a small class."""
    base = tmp_path_factory.mktemp("class")
    handed_in = base / "submissions"
    hand_in(handed_in, "anna", reference(*PAPER))
    hand_in(handed_in, "bob", {**reference("collectives.1"), "collectives-2": "# print: Hello\n" + HALF})
    hand_in(handed_in, "=cleo()", {**reference("collectives.1"), "collectives-2": HALF})
    hand_in(handed_in, "dan")
    hand_in(handed_in, "eve", {"collectives-2": NONE, **troubled("collectives.1", "limit", "1 GB printed")})
    hand_in(handed_in, "fay", troubled("collectives.1", "fault", "we fell over"))
    walls = {**dict.fromkeys(WALLS, ""), "network": "the kernel <refuses>"}
    grade(handed_in, base / "out", exercises=PAPER, seed=SEED, sandbox=FakeSandbox(walls), jobs=1)
    return base / "out"


# JSON


def test_the_json_is_what_its_schema_says(out):
    for name in ("results", "learner"):
        jsonschema.Draft202012Validator.check_schema(results.schema(name))
    jsonschema.validate(load(out / "results.json"), results.schema())
    learners = list((out / "learners").glob("*.json"))
    assert len(learners) == 6
    for path in learners:
        jsonschema.validate(load(path), results.schema("learner"))


def test_the_schema_refuses_other_data(out):
    data = load(out / "results.json")
    for change in ({"schema": "dtlib-grade/2"}, {"state": "done"}, {"learners": [{}]}, {"more": 1}, {"seed": -1}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**data, **change}, results.schema())


def test_every_field_of_the_schema_is_explained():
    def look(schema, path=""):
        for name, each in schema.get("properties", {}).items():
            plain = {"status", "points", "max_points", "passed", "schema", "checks", "class"}
            assert each.get("description") or name in plain, f"{path}/{name}"
            look(each, f"{path}/{name}")
            look(each.get("items", {}), f"{path}/{name}")

    for name in ("results", "learner"):
        look(results.schema(name), name)


# Texts of learners


@pytest.mark.parametrize("evil", EVIL)
def test_nothing_of_a_learners_becomes_structure_in_a_report(evil):
    harmless = rendered(learner_md.learner_report(learner("x", "x", "x", notes=["x"])))
    shown = rendered(learner_md.learner_report(learner(evil, evil, evil, notes=[evil])))

    def shape(soup):
        names = [tag.name for tag in soup.find_all(True)]
        return [name for name in names if name not in ("code", "br")]

    assert shape(shown) == shape(harmless)
    assert not shown.find_all(["a", "img", "script"])


@pytest.mark.parametrize("evil", EVIL)
def test_nothing_of_a_learners_becomes_structure_in_the_report_of_the_class(evil):
    def report(name):
        each = record.waiting(name, "file", list(all_exercises().values()))
        faults = [results.Fault(record.one_line(name), "collectives.1", name)]
        return class_md.class_report(group([each], faults=faults, walls={"network": name}))

    harmless, shown = rendered(report("x")), rendered(report(evil))
    assert [tag.name for tag in shown.find_all(True)] == [tag.name for tag in harmless.find_all(True)]


@given(st.text(max_size=60), st.text(max_size=60), st.text(max_size=200))
def test_whatever_a_learner_writes_the_files_stay_whole(name, message, printed):
    one = learner(name, message, printed, notes=[message])
    json.dumps(one, ensure_ascii=False).encode()
    soup = rendered(learner_md.learner_report(one))
    assert len(soup.find_all("h2")) == 1
    assert not soup.find_all(["a", "img", "script"])
    suites = junit_of([one])
    assert suites[0].get("tests") == "6"
    json.dumps(gradescope.gradescope_results(one), ensure_ascii=False).encode()


def test_no_address_is_made_a_link():
    for evil in EVIL:
        said = text.markdown(evil) + text.prose(evil).replace("`", "")
        assert "://" not in said
        assert "www." not in said
        assert "@" not in said


def test_names_and_messages_stay_readable():
    assert text.markdown("ring_all_reduce on 2 ranks") == "ring_all_reduce on 2 ranks"
    assert text.markdown("Saw [-6, 57.75, …]; expected [1]") == "Saw [-6, 57.75, …]; expected [1]"
    assert text.prose("what does `tensor = x` do?") == "what does `tensor = x` do?"
    assert text.prose("`a` and `b`") == "`a` and `b`"
    assert text.markdown("Zoë Müller-Lüdenscheidt") == "Zoë Müller-Lüdenscheidt"


def test_texts_are_bounded():
    one = learner("n" * 10**6, "m" * 10**6, "p\n" * 10**6, notes=["o" * 10**6] * 1000)
    assert len(json.dumps(one)) < 40_000
    assert len(learner_md.learner_report(one)) < 40_000
    assert text.clean("a" * 10**8, 10) == "a" * 10 + "…"


def test_terminal_sequences_and_what_turns_text_around_are_removed():
    assert text.clean("\x1b[31mred\x1b[0m \u202eevil\x00\r\nnext\rlast") == "red �evil�\nnext\nlast"


# For the learner


def test_the_report_of_a_learner_tells_points_reasons_and_how_to_repeat(out):
    said = (out / "reports" / "bob.md").read_text()
    assert said.startswith(learner_md.MARK)
    assert "**8 of 15 points** · 53.3 %" in said
    assert "- ✓ **bytes** (3/3)" in said
    assert "- ✗ **seconds** (0/2)" in said
    assert "Saw 0; expected" in said
    assert "```text\nHello\n```" in said
    assert f'`grading.check("collectives.2", seed={SEED})`' in said
    assert "own formula" not in said, "a condition that is met is worth no line"
    assert "1 GB printed" in next((out / "reports").glob("eve.md")).read_text()


def test_hidden_checks_give_nothing_away():
    secret = "Saw 42; expected the secret."
    one = learner(message=secret, mistake="secret mistake", hidden=("rounds",))
    described = {check.name: check.description for check in exercise().checks}["rounds"]
    said = learner_md.learner_report(one)
    sent = json.dumps(gradescope.gradescope_results(one), ensure_ascii=False)
    for shown in (said, sent):
        assert "secret" not in shown
        assert described not in shown
        assert "rounds" in shown
    (hidden,) = [each for each in gradescope.gradescope_results(one)["tests"] if each["visibility"] != "visible"]
    assert (hidden["score"], hidden["max_score"], hidden["output"]) == (0, 2, "")
    assert secret in json.dumps(one), "the instructor's record tells it"


def test_a_check_behind_a_gate_is_marked_as_not_counted():
    definition = exercise()
    verdict = graded(definition)
    gate, *rest = verdict.result.checks
    gate = replace(gate, points=0, passed=False, message="Saw a collective.")
    behind = [replace(each, points=0, counted=False, message="") for each in rest]
    verdict = replace(verdict, result=replace(verdict.result, checks=(gate, *behind)))
    one = record.learner_record("anna", "0" * 64, (), SEED, [(definition, verdict)], {})
    said = learner_md.learner_report(one)
    assert said.count("\n- – ") == 5
    assert "not counted" in said
    assert {test["status"] for test in gradescope.gradescope_results(one)["tests"]} == {"failed"}


# For other programs


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


def junit_of(records):
    import io

    file = io.StringIO()
    junit.begin(file)
    for each in records:
        junit.add(file, each)
    junit.end(file)
    return ElementTree.fromstring(file.getvalue().encode("utf-8"))


def test_junit_has_a_suite_a_learner_and_a_case_a_check(out):
    root = ElementTree.parse(out / "junit.xml").getroot()
    suites = {suite.get("name"): suite for suite in root}
    assert set(suites) == {"=cleo()", "anna", "bob", "dan", "eve", "fay"}
    num_checks = sum(len(all_exercises()[name].checks) for name in PAPER)
    assert {int(suite.get("tests")) for suite in suites.values()} == {num_checks}
    failures = {
        name: (suite.get("failures"), suite.get("skipped"), suite.get("errors")) for name, suite in suites.items()
    }
    assert failures["anna"] == ("0", "0", "0")
    assert failures["bob"] == ("1", "3", "0")
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
    assert [row["learner"] for row in rows] == ["'=cleo()", "anna", "bob", "dan", "eve", "fay"]
    assert rows[2] == {
        **{"learner": "bob", "status": "graded", "points": "8", "max_points": "15", "percent": "53.3"},
        **{"collectives.1": "5", "collectives.2": "3", "collectives.3": "0"},
    }
    with (out / "statistics.csv").open(newline="", encoding="utf-8") as file:
        rows = {row["exercise"]: row for row in csv.DictReader(file)}
    second = rows["collectives.2"]
    assert (second["points"], second["graded"], second["attempted"], second["passed"]) == ("5", "6", "4", "1")
    told = (second["commonest_failure_check"], second["commonest_failure_count"])
    assert told == ("seconds", "3")
    for path in (out / "scores.csv", out / "statistics.csv"):
        with path.open(newline="", encoding="utf-8") as file:
            assert not [cell for row in csv.reader(file) for cell in row if cell.startswith(("=", "+", "-", "@"))]
    assert text.cell("+1") == "'+1"
    assert text.cell("\t=1") == "'=1"


# For the instructor


def test_the_report_of_the_class_tells_everything(out):
    said = (out / "report.md").read_text()
    soup = rendered(said)
    headings = [tag.get_text() for tag in soup.find_all(["h1", "h2"])]
    assert headings == [
        "Class report",
        "⚠ The grader itself failed",
        "Distribution",
        "Learners",
        "Exercises",
        "Worth a look",
        "Walls around the submissions",
        "This run",
    ]
    learners, exercises, walls = soup.find_all("table")
    rows = [[cell.get_text() for cell in row.find_all("td")] for row in learners.find_all("tr")[1:]]
    assert rows[2] == ["bob", "8 / 15", "53.3", "✓", "3/5", "○"]
    assert [row[0] for row in rows] == ["=cleo()", "anna", "bob", "dan", "eve", "fay"]
    assert rows[5][3] == "⚠"
    assert len(exercises.find_all("tr")) == 4
    assert "1 wall did not stand" in said
    assert "the kernel <refuses>" in walls.get_text()
    assert f"--seed {SEED}" in said
    assert "we fell over" in said
    assert "- eve · collectives.1: 1 GB printed" in said


def test_the_report_of_a_large_class_stays_bounded():
    exercises = list(all_exercises().values())
    standings = [record.waiting(f"{number} " + "<*>" * 30, str(number), exercises) for number in range(20_000)]
    faults = [results.Fault("x" * 80, "collectives.1", "<" * 500)] * 5000
    large = group(standings, faults=faults, walls=dict.fromkeys(WALLS, "<" * 5000))
    entry = {"trouble": "tampered", "reason": "<" * 2000, "id": "collectives.1"}
    for _ in range(1000):
        large.look_at({"learner": "<" * 80, "exercises": [entry]})
    said = class_md.class_report(large)
    assert "- and 970 more" in said
    assert len(said.encode()) < class_md.MAX_BYTES
    assert "all of them stand in `scores.csv`" in said
    assert len(rendered(said).find_all("h2")) >= 3


def test_many_exercises_are_shown_by_chapter(monkeypatch):
    monkeypatch.setattr(class_md, "_MAX_COLUMNS", 5)
    exercises = list(all_exercises().values())
    head = class_md.class_report(group([record.waiting("anna", "anna", exercises)]))
    assert f"| learner | points | % | {' | '.join(STEMS)} |" in head


def test_statistics_name_the_commonest_failure():
    definition = exercise()
    counted = statistics.Statistics([definition])
    for mistake in ("sum for mean", "one step short", "one step short"):
        verdict = graded(definition, mistake=mistake)
        counted.add(record.learner_record("x", "0" * 64, (), SEED, [(definition, verdict)], {}))
    counted.add(record.waiting_record("y", [definition]))
    (row,) = counted.rows()
    assert (row["graded"], row["attempted"], row["passed"], row["mean_points"]) == (3, 3, 0, 9.0)
    assert row["commonest_failure"] == {"check": "rounds", "mistake": "one step short", "count": 2}


# How files are written


def test_a_file_is_whole_or_as_it_was_before(tmp_path):
    with folder.Folder(tmp_path / "out") as place:
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
    with folder.Folder(tmp_path / "out") as place:
        report.write_learner(place, "anna", learner())
    assert happened == ["sync", "replace"] * 3


def test_a_record_that_was_changed_is_noticed():
    one = learner()
    assert record.is_whole(one, "0" * 64)
    assert not record.is_whole({**one, "points": 11}, "0" * 64)
    assert not record.is_whole(one, "1" * 64)
    assert not record.is_whole({}, "0" * 64)
    assert not record.is_whole(None, "0" * 64)


def test_points_are_rounded_down():
    assert text.percent(2, 3) == 66.6
    assert text.percent(999_999, 1_000_000) == 99.9
    assert text.percent(1, 1) == 100
    assert text.bar(0.999) == "█████████░"
    assert text.bar(0.001) == "█░░░░░░░░░"
    assert [text.duration(each) for each in (0.25, 59.4, 200, 3900)] == ["0.2 s", "59 s", "3 min 20 s", "1 h 5 min"]
