import csv
import json
import re
import threading
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest
from bs4 import BeautifulSoup
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from dtlib.grading import report
from dtlib.grading.checks import STEMS, all_exercises
from dtlib.grading.grader import grade
from dtlib.grading.report import exports, folder, pages, record, results, text
from dtlib.grading.seals import Key
from dtlib.grading.walls import WALLS

from .classroom import HALF, NONE, PAPER, SEED, FakeSandbox, hand_in, load, reference, troubled

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


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Where the key of this machine lies meanwhile."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def rendered(markdown):
    html = MarkdownIt("gfm-like", {"linkify": False}).render(markdown)
    return BeautifulSoup(html, "html.parser")


def exercise(hidden=()):
    """collectives.6 with some of its checks hidden."""
    found = all_exercises()["collectives.6"]
    return replace(found, checks=tuple(replace(each, visible=each.name not in hidden) for each in found.checks))


def graded(definition, message="Saw this; expected that.", mistake="", printed="", **more):
    """A verdict in which the last check of an exercise fails."""
    checks = [each.result("pass") for each in definition.checks]
    checks[-1] = definition.checks[-1].result("fail", message=message, mistake=mistake)
    measured = {"printed": printed, "seconds": 1.5, "peak_bytes": 2**20}
    return record.entry_of(definition, "partly right", checks, measured=measured, **more)


def learner(name="anna", message="Saw this; expected that.", printed="", notes=(), hidden=(), **options):
    entries = [graded(exercise(hidden), message, printed=printed, **options)]
    return record.learner_record(name, entries, notes, seed=SEED, walls=dict.fromkeys(WALLS, ""))


def waiting(name, file="file"):
    entries = [record.entry_of(each) for each in all_exercises().values()]
    return record.standing(record.learner_record(name, entries), file)


def class_report(learners, **options):
    everything = list(all_exercises().values())
    group = results.class_record(SEED, everything, learners, {}, {"version": "1"})
    group |= {"state": "complete", "walls": dict.fromkeys(WALLS, ""), **options}
    odd = group.pop("odd", ())
    results.summarise(group)
    return tuple(pages.class_reports(group, everything, odd).values())


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
    hand_in(handed_in, "gus", troubled("collectives.1", "hung", "nothing moved"))
    hand_in(
        handed_in,
        "Gus",
        {**troubled("collectives.1", "died", "it was killed"), **troubled("collectives.2", "not known", "too slow")},
    )
    walls = {**dict.fromkeys(WALLS, ""), "network": "the kernel <refuses>"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(base / "data"))
        grade(handed_in, base / "out", exercises=PAPER, seed=SEED, sandbox=FakeSandbox(walls), jobs=1)
    return base / "out"


# JSON


def test_the_json_is_what_its_schema_says(out):
    for name in ("results", "learner"):
        jsonschema.Draft202012Validator.check_schema(results.schema(name))
    jsonschema.validate(load(out / "results.json"), results.schema())
    learners = list((out / "learners").glob("*.json"))
    assert len(learners) == 8
    for path in learners:
        jsonschema.validate(load(path), results.schema("learner"))


def test_the_schema_refuses_other_data(out):
    data = load(out / "results.json")
    for change in ({"schema": "dtlib-grade/1"}, {"state": "done"}, {"learners": [{}]}, {"more": 1}, {"seed": -1}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**data, **change}, results.schema())


def test_every_field_of_the_schema_is_explained():
    def look(schema, path=""):
        for name, each in schema.get("properties", {}).items():
            assert each.get("description"), f"{path}/{name}"
            look(each, f"{path}/{name}")
            look(each.get("items", {}), f"{path}/{name}")

    for name in ("results", "learner"):
        look(results.schema(name), name)


# Texts of learners


@pytest.mark.parametrize("evil", EVIL)
def test_nothing_of_a_learners_becomes_structure_in_a_report(evil):
    harmless = rendered(pages.learner_report(learner("x", "x", "x", notes=["x"])))
    shown = rendered(pages.learner_report(learner(evil, evil, evil, notes=[evil])))

    def shape(soup):
        names = [tag.name for tag in soup.find_all(True)]
        return [name for name in names if name not in ("code", "br")]

    assert shape(shown) == shape(harmless)
    assert not shown.find_all(["a", "img", "script"])


@pytest.mark.parametrize("evil", EVIL)
def test_nothing_of_a_learners_becomes_structure_in_the_report_of_the_class(evil):
    def shapes(name):
        told = [results.told(record.one_line(name), "collectives.1", name)]
        options = {"faults": told, "not_known": told, "odd": told, "alike": [[name, name]], "not_kept": name}
        markdown, page = class_report([waiting(name)], walls={"network": name}, **options)
        soups = rendered(markdown), BeautifulSoup(page, "html.parser")
        return [[tag.name for tag in soup.find_all(True)] for soup in soups], soups

    (shown, soups), (harmless, _) = shapes(evil), shapes("x")
    assert shown == harmless
    assert not any(soup.find_all(["a", "img", "script"]) for soup in soups)


@settings(max_examples=30)
@given(st.text(max_size=60), st.text(max_size=60), st.text(max_size=200))
def test_whatever_a_learner_writes_the_files_stay_whole(name, message, printed):
    one = learner(name, message, printed, notes=[message])
    json.dumps(one, ensure_ascii=False).encode()
    soup = rendered(pages.learner_report(one))
    assert len(soup.find_all("h2")) == 1
    assert not soup.find_all(["a", "img", "script"])
    suites = junit_of([one])
    assert suites[0].get("tests") == str(len(exercise().checks))
    json.dumps(exports.gradescope_results(one), ensure_ascii=False).encode()


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
    assert len(pages.learner_report(one)) < 40_000
    assert text.clean("a" * 10**8, 10) == "a" * 10 + "…"


def test_terminal_sequences_and_what_turns_text_around_are_removed():
    assert text.clean("\x1b[31mred\x1b[0m \u202eevil\x00\r\nnext\rlast") == "red �evil�\nnext\nlast"


# For the learner


def test_the_report_of_a_learner_tells_points_reasons_and_how_to_repeat(out):
    said = (out / "reports" / "bob.md").read_text()
    assert said.startswith(pages.MARK)
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
    said = pages.learner_report(one)
    sent = json.dumps(exports.gradescope_results(one), ensure_ascii=False)
    for shown in (said, sent):
        assert "secret" not in shown
        assert described not in shown
        assert "rounds" in shown
    (hidden,) = [each for each in exports.gradescope_results(one)["tests"] if each["visibility"] != "visible"]
    assert (hidden["score"], hidden["max_score"], hidden["output"]) == (0, 2, "")
    assert secret in json.dumps(one), "the instructor's record tells it"


def test_a_check_behind_a_gate_is_marked_as_not_counted():
    gate, *rest = exercise().checks
    behind = [each.result("not counted") for each in rest]
    checks = [gate.result("fail", message="Saw a collective."), *behind]
    one = record.learner_record("anna", [record.entry_of(exercise(), "fail", checks)])
    said = pages.learner_report(one)
    assert said.count("\n- – ") == len(behind)
    assert "not counted" in said
    assert {test["status"] for test in exports.gradescope_results(one)["tests"]} == {"failed"}


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
    document = exports.JUNIT[0] + "".join(map(exports.suite, records)) + exports.JUNIT[1]
    return ElementTree.fromstring(document.encode("utf-8"))


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
    assert [row["learner"] for row in rows] == ["'=cleo()", "Gus", "anna", "bob", "dan", "eve", "fay", "gus (2)"]
    assert rows[3] == {
        **{"learner": "bob", "status": "graded", "points": "8", "max_points": "15", "percent": "53.3"},
        **{"collectives.1": "5", "collectives.2": "3", "collectives.3": "0"},
    }
    assert text.cell("+1") == "'+1"
    assert text.cell("\t=1") == "'=1"


# For the instructor


def test_the_report_of_the_class_tells_everything(out):
    said = (out / "report.md").read_text()
    soup = rendered(said)
    assert [tag.get_text() for tag in soup.find_all(["h1", "h2"])] == [
        "Class report",
        "⚠ The grader itself failed",
        "? Not known",
        "Names that look alike",
        "Learners",
        "Exercises",
        "Worth a look",
        "Walls around the submissions",
        "This run",
    ]
    learners, exercises = soup.find_all("table")
    rows = [[cell.get_text() for cell in row.find_all("td")] for row in learners.find_all("tr")[1:]]
    assert [row[0] for row in rows] == ["=cleo()", "Gus", "anna", "bob", "dan", "eve", "fay", "gus (2)"]
    assert rows[1] == ["Gus", "0 / 15", "0", "✗", "?", "○"]
    assert rows[3] == ["bob", "8 / 15", "53.3", "✓", "3/5", "○"]
    assert rows[6][3] == "⚠"
    assert len(exercises.find_all("tr")) == 4
    for text_of in (
        "the kernel <refuses>",
        f"--seed {SEED}",
        "fay · collectives.1: RuntimeError: we fell over",
        "eve · collectives.1: This exercise earns nothing",
        "1 GB printed",
        "Gus · gus (2)",
        "Gus · collectives.2: What this earns is not known: too slow.",
    ):
        assert text_of in soup.get_text()


def test_statistics_name_hung_and_died_and_count_what_is_partly_right(out):
    rows = {each["exercise"]: each for each in load(out / "results.json")["statistics"]}
    first, second = rows["collectives.1"], rows["collectives.2"]
    assert (first["attempted"], first["passed"], first["graded"]) == (6, 3, 7)
    assert first["commonest_failure"] == {"check": "(whole exercise)", "mistake": "died", "count": 1}
    assert (second["attempted"], second["passed"], second["partly_right"], second["not_known"]) == (4, 1, 2, 1)
    assert second["distribution"] == [4, 0, 0, 2, 0, 1]
    assert second["commonest_failure"]["check"] == "seconds"
    for exercise, told in (("hung", "hung"), ("died", "died")):
        entry = graded(all_exercises()["collectives.4"], trouble=exercise, no_result=["rounds"], mistake="")
        counts = results.Counts([all_exercises()["collectives.4"]])
        counts.add(record.learner_record("x", [entry]))
        assert counts.rows()[0]["commonest_failure"]["mistake"].startswith(told)


def test_the_class_is_one_page_that_needs_nothing_else(out):
    page = (out / "report.html").read_text()
    soup = BeautifulSoup(page, "html.parser")
    assert soup.title.get_text() == "Class report"
    assert not re.search(r"(?:src|href)=|@import|url\(|https?:", page)
    assert not soup.find_all(["script", "link", "img", "iframe", "object"])
    assert "default-src 'none'" in soup.find("meta", {"http-equiv": True})["content"]
    assert "prefers-color-scheme" in page or "light dark" in page
    pictures = soup.find_all("svg")
    assert len(pictures) == len(PAPER)
    assert pictures[1]["aria-label"] == "0 points: 4, 3 points: 2, 5 points: 1"
    bars = [bar for bar in pictures[1].find_all("rect") if "all" not in bar.get("class", [])]
    heights = [float(bar["height"]) for bar in bars]
    assert heights[0] == max(heights) > heights[3] > heights[5] > heights[1]
    assert [each.get_text() for each in soup.find_all("h2")] == [
        each.get_text() for each in rendered((out / "report.md").read_text()).find_all("h2")
    ]


def test_a_slow_machine_is_told():
    measured = {"kept": 0, "seconds": 99, "jobs": 2, "cpu_seconds": 50.0, "starved_seconds": 400.0}
    for page in class_report([waiting("anna")], measured=measured):
        assert "The machine was slow" in page
        assert "computed 50 s and waited 6 min 40 s for a processor" in page
    assert "slow" not in class_report([waiting("anna")], measured={**measured, "starved_seconds": 49.0})[0]


def test_what_the_submission_tells_itself_is_marked():
    told = [
        (each, check) for each in all_exercises().values() for check in each.checks if check.is_told and check.points
    ]
    said = class_report([waiting("anna")])[0]
    for each, check in told:
        assert f"{each.id} *{text.markdown(check.name)}* ({check.points} of {each.points})" in said
    checks = tuple(replace(check, is_told=True) for check in exercise().checks)
    definition = replace(exercise(), checks=checks)
    said = pages.learner_report(record.learner_record("anna", [graded(definition)]))
    assert said.count("(told by the submission)") == sum(check.points > 0 for check in checks)


def test_the_report_of_a_large_class_stays_bounded(monkeypatch):
    monkeypatch.setattr(MarkdownIt, "render", lambda self, text: "")  # the page takes long, and is not looked at
    one = waiting("x")
    standings = [{**one, "learner": f"{number} " + "<*>" * 25} for number in range(1500)]
    told = [results.told("x" * 80, "collectives.1", "<" * 500)] * 5000
    walls = dict.fromkeys(WALLS, "<" * 5000)
    said = class_report(standings, faults=told, odd=told, not_known=told, walls=walls)[0]
    assert "- and 4970 more" in said
    assert len(said.encode()) < pages.MAX_BYTES
    assert "all of them stand in `scores.csv`" in said
    assert said.count("\n## ") >= 5


def test_many_exercises_are_shown_by_chapter(monkeypatch):
    monkeypatch.setattr(pages, "_MAX_COLUMNS", 5)
    assert f"| learner | points | % | {' | '.join(STEMS)} |" in class_report([waiting("anna")])[0]


def test_statistics_name_the_commonest_failure():
    definition = exercise()
    counted = results.Counts([definition])
    for mistake in ("sum for mean", "one step short", "one step short"):
        counted.add(record.learner_record("x", [graded(definition, mistake=mistake)]))
    counted.add(record.learner_record("y", [record.entry_of(definition)]))
    (row,) = counted.rows()
    last = definition.checks[-1]
    mean = definition.points - last.points
    assert (row["graded"], row["attempted"], row["partly_right"], row["mean_points"]) == (3, 3, 3, mean)
    assert row["commonest_failure"] == {"check": last.name, "mistake": "one step short", "count": 2}


# How files are written


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
    assert happened == ["sync", "replace"] * 3


def test_a_seal_covers_every_byte():
    key = Key()
    sealed = key.sealed(learner()).encode()
    assert key.opened(sealed) == learner()
    for at in range(0, len(sealed), 97):
        assert key.opened(sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :]) is None
    for wrong in (b"", b"{}", sealed[:-1], sealed + b"\n", sealed[1:]):
        assert key.opened(wrong) is None


def test_points_are_rounded_down():
    assert text.percent(2, 3) == 66.6
    assert text.percent(999_999, 1_000_000) == 99.9
    assert text.percent(1, 1) == 100
    assert text.bar(0.999) == "█████████░"
    assert text.bar(0.001) == "█░░░░░░░░░"
    assert [text.duration(each) for each in (0.25, 59.4, 200, 3900)] == ["0.2 s", "59 s", "3 min 20 s", "1 h 5 min"]
