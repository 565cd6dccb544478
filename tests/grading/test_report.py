"""Reports for people: nothing that a learner wrote becomes structure, everything is told, all is bounded."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from bs4 import BeautifulSoup
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from dtlib.grading.classroom import fingerprint
from dtlib.grading.classroom.report import exports, pages, record, text
from dtlib.grading.exercises.catalogue import STEMS, all_exercises
from dtlib.grading.sandbox.walls import WALLS

from .classroom import PAPER, SEED, load
from .records import EVIL, exercise, graded, junit_of, learner

pytestmark = pytest.mark.usefixtures("home")


def rendered(markdown):
    html = MarkdownIt("gfm-like", {"linkify": False}).render(markdown)
    return BeautifulSoup(html, "html.parser")


def waiting(name, file="file"):
    entries = [record.entry_of(each) for each in all_exercises().values()]
    return record.standing(record.learner_record(name, entries), file)


def class_report(learners, **options):
    everything = list(all_exercises().values())
    group = record.class_record(SEED, everything, learners, {}, {"version": "1"})
    group |= {"state": "complete", "walls": dict.fromkeys(WALLS, ""), **options}
    odd = group.pop("odd", ())
    record.summarise(group)
    return tuple(pages.class_reports(group, everything, odd).values())


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
        told = [record.told(record.one_line(name), "collectives.1", name)]
        options = {"faults": told, "not_known": told, "odd": told, "alike": [[name, name]], "not_kept": name}
        markdown, page = class_report([waiting(name)], walls={"network": name}, **options)
        soups = rendered(markdown), BeautifulSoup(page, "html.parser")
        return [[tag.name for tag in soup.find_all(True)] for soup in soups], soups

    (shown, soups), (harmless, _) = shapes(evil), shapes("x")
    assert shown == harmless
    assert not any(soup.find_all(["img", "script"]) for soup in soups)
    assert not soups[0].find_all("a")
    assert {link["href"] for link in soups[1].find_all("a")} == {"feedback/file.html"}


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
    assert f"a seed with the digest `{record.digest_of(SEED)}`" in said
    assert f"Graded by dtlib {fingerprint.version()}." in said
    assert str(SEED) not in said
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
    assert first["commonest_failure"] == {
        "check": "(whole exercise)",
        "mistake": "died",
        "count": 1,
        "learners": ["Gus"],
    }
    assert (second["attempted"], second["passed"], second["partly_right"], second["not_known"]) == (4, 1, 2, 1)
    assert second["distribution"] == [4, 0, 0, 2, 0, 1]
    assert second["commonest_failure"]["check"] == "seconds"
    for trouble, told in (("hung", "hung"), ("died", "died")):
        entry = graded(all_exercises()["collectives.4"], trouble=trouble, no_result=["rounds"], mistake="")
        counts = record.Counts()
        counts.add(record.learner_record("x", [entry]))
        assert counts.row(all_exercises()["collectives.4"])["commonest_failure"]["mistake"].startswith(told)


def test_the_class_is_one_page_that_needs_nothing_else(out):
    page = (out / "report.html").read_text()
    soup = BeautifulSoup(page, "html.parser")
    assert soup.title.get_text() == "Class report"
    assert not re.search(r"src=|@import|url\(|https?:", page)
    assert {link["href"].partition("/")[0] for link in soup.find_all("a")} == {"feedback"}
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
    checks = tuple(replace(check, is_told=True) for check in exercise().checks)
    definition = replace(exercise(), checks=checks)
    said = pages.learner_report(record.learner_record("anna", [graded(definition)]))
    assert said.count("(told by the submission)") == sum(check.points > 0 for check in checks)


def test_the_report_of_a_large_class_stays_bounded(monkeypatch):
    monkeypatch.setattr(MarkdownIt, "render", lambda self, text: "")  # the page takes long, and is not looked at
    one = waiting("x")
    standings = [{**one, "learner": f"{number} " + "<*>" * 25} for number in range(1500)]
    told = [record.told("x" * 80, "collectives.1", "<" * 500)] * 5000
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
    counted = record.Counts()
    for mistake in ("sum for mean", "one step short", "one step short"):
        counted.add(record.learner_record("x", [graded(definition, mistake=mistake)]))
    counted.add(record.learner_record("y", [record.entry_of(definition)]))
    row = counted.row(definition)
    last = definition.checks[-1]
    mean = definition.points - last.points
    assert (row["graded"], row["attempted"], row["partly_right"], row["mean_points"]) == (3, 3, 3, mean)
    named = {"count": 2, "learners": ["x", "x"]}
    assert row["commonest_failure"] == {"check": last.name, "mistake": "one step short", **named}


# How files are written


def test_points_are_rounded_down():
    assert text.percent(2, 3) == 66.6
    assert text.percent(999_999, 1_000_000) == 99.9
    assert text.percent(1, 1) == 100
    assert text.bar(0.999) == "█████████░"
    assert text.bar(0.001) == "█░░░░░░░░░"
    assert [text.duration(each) for each in (0.25, 59.4, 200, 3900)] == ["0.2 s", "59 s", "3 min 20 s", "1 h 5 min"]
