"""What people know of a class, laid over it: who is absent, who is late, what was judged by hand, and who is nobody."""

from __future__ import annotations

import csv
import os
import re
from datetime import UTC, datetime

import jsonschema
import pytest
from bs4 import BeautifulSoup
from click.testing import CliRunner

from dtlib.cli import main
from dtlib.grading.classroom import report
from dtlib.grading.classroom.gradebook import Gradebook, bare, read_by_hand, read_roster
from dtlib.grading.classroom.report.record import entry_of, learner_record
from dtlib.grading.classroom.shards import JoinError, join
from dtlib.grading.exercises.catalogue import all_exercises

from .classroom import PAPER, hand_in, load, reference, run

pytestmark = pytest.mark.usefixtures("home")

ENTRY = entry_of(all_exercises()[PAPER[0]])
FORMULA = "=cmd|' /C calc'!A0"
ROSTER = f"""id,name,email,deadline
ANNA,Anna A.,anna@example.org,
bob,{FORMULA},bob@example.org,2001-11-30
cleo,Cleo C.,cleo@example.org,
zoe,Zoe Z.,zoe@example.org,
::error,../../etc/passwd,@x,
"""
BY_HAND = "learner,exercise,points,comment\nbob,collectives.2,5,ask <b>me</b>\nANNA,collectives.1,,=1+1\n"


def at(group, learner, when):
    for path in (group / learner).iterdir():
        os.utime(path, (datetime.fromisoformat(when).timestamp(),) * 2)


@pytest.fixture
def graded(group, tmp_path):
    """A class of five as one machine graded it, handed in on three days."""
    for learner, when in (("anna", "2001-11-26T10:00Z"), ("bob", "2001-11-28T00:30Z"), ("cleo", "2001-11-28T00:30Z")):
        at(group, learner, when)
    run(group, tmp_path / "graded")
    return tmp_path / "graded"


def write(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def told(graded, tmp_path, *words, code=0):
    done = CliRunner().invoke(main.commands["report"], [str(graded), "--out", str(tmp_path / "told"), *map(str, words)])
    assert done.exit_code == code, done.output
    said = re.sub(r"\s*│\s*|\s+", " ", done.output)
    return said if code else {each["learner"]: each for each in load(tmp_path / "told/results.json")["learners"]}


def seeds_told(tmp_path):
    """Whose reports name the digest of a seed."""
    return {each.stem for each in (tmp_path / "told" / "reports").iterdir() if "with the digest" in each.read_text()}


def table(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def test_who_handed_in_nothing_is_absent_and_who_is_not_listed_is_told(graded, tmp_path):
    learners = told(graded, tmp_path, "--roster", write(tmp_path, "roster.csv", ROSTER))
    assert {name for name, each in learners.items() if each["status"] == "absent"} == {"zoe", "::error"}
    assert learners["anna"]["name"] == "Anna A.", "the same but for case"
    results = load(tmp_path / "told" / "results.json")
    assert results["unlisted"] == ["dan", "eve"]
    assert results["class"]["graded"] == 5, "who is absent is no zero in the mean"
    jsonschema.validate(results, report.schema())
    for path in (tmp_path / "told" / "learners").iterdir():
        jsonschema.validate(load(path), report.schema("learner"))
    assert seeds_told(tmp_path) == {"anna", "bob", "cleo", "dan", "eve"}, "nothing was drawn for the absent"
    said = (tmp_path / "told" / "report.md").read_text()
    assert re.search(r"Absent[^\n]*\(2\): ::error, zoe", said.replace("&#58;", ":"))
    assert "Not in the roster** (2): dan, eve" in said
    odd = said.partition("## Worth a look")[2].partition("## Walls")[0]
    assert re.findall(r"^- (\w+): .* is no valid JSON", odd, re.M) == ["eve"], "once, for all exercises"
    rows = {row[0]: row for row in table(tmp_path / "told" / "scores.csv")}
    assert (rows["zoe"][1], rows["dan"][1]) == ("absent", "graded")


def test_who_is_absent_and_judged_by_hand_in_everything_is_graded(graded, tmp_path):
    rows = "zoe,collectives.1,5,\nzoe,collectives.2,5,\nzoe,collectives.3,0,\n::error,collectives.1,5,\n"
    by_hand = write(tmp_path, "by hand.csv", f"learner,exercise,points,comment\n{rows}")
    learners = told(graded, tmp_path, "--roster", write(tmp_path, "roster.csv", ROSTER), "--by-hand", by_hand)
    assert (learners["zoe"]["status"], learners["::error"]["status"]) == ("graded", "absent")
    assert "zoe" not in seeds_told(tmp_path)
    assert load(tmp_path / "told" / "results.json")["class"]["graded"] == 6
    given = {row[3]: row[5] for row in table(tmp_path / "told" / "canvas.csv")[2:]}
    assert (given["zoe"], given["::error"]) == ("10", "")
    assert bare(load(tmp_path / "told" / "learners" / "zoe.json"))["status"] == "absent"


def test_a_report_of_one_machine_is_that_machines(graded, tmp_path):
    told(graded, tmp_path)
    for name in ("scores.csv", "report.md", "learners/bob.json"):
        one, other = ((folder / name).read_text() for folder in (graded, tmp_path / "told"))
        assert [line for line in one.splitlines() if "seal" not in line and "It took" not in line] == [
            line for line in other.splitlines() if "seal" not in line and "It took" not in line
        ]


def test_days_late_are_shown_and_deducted_on_demand_alone(graded, tmp_path):
    roster = write(tmp_path, "roster.csv", ROSTER)
    shown = told(graded, tmp_path, "--roster", roster, "--deadline", "2001-11-26T12:00Z")
    assert [shown[each]["late"]["days"] for each in ("anna", "bob", "cleo")] == [0, 0, 2], (
        "bob has a deadline of his own"
    )
    assert [shown[each]["points"] for each in ("anna", "bob", "cleo")] == [15, 8, 5]
    assert "late" not in shown["zoe"]
    dear = told(graded, tmp_path, "--deadline", "2001-11-27", "--late-penalty", "20")
    assert (dear["bob"]["late"]["days"], dear["bob"]["late"]["deducted"], dear["bob"]["points"]) == (1, 1, 7)
    assert dear["anna"]["points"] == 15, "a day alone ends when the day does"
    said = (tmp_path / "told" / "reports" / "bob.md").read_text()
    assert "1 day late: 1 point less. The deadline was 2001-11-27 (in UTC" in said
    assert table(tmp_path / "told" / "scores.csv")[0][5:7] == ["days_late", "deducted"]
    assert told(graded, tmp_path, "--deadline", "2001-01-01", "--late-penalty", "100")["bob"]["points"] == 0


def test_what_is_judged_by_hand_outlives_a_regrade(graded, group, tmp_path):
    by_hand = write(tmp_path, "by hand.csv", BY_HAND)
    roster = write(tmp_path, "roster.csv", ROSTER)
    for again in range(2):
        learners = told(graded, tmp_path, "--by-hand", by_hand, "--roster", roster)
        assert learners["bob"]["points"] == 10
        said = (tmp_path / "told" / "reports" / "bob.md").read_text()
        assert "judged by hand instead of 3" in said
        assert "Comment: ask &#60;b&#62;me&#60;/b&#62;" in said
        assert load(graded / "learners" / "bob.json")["points"] == 8, "the grader's own is as it was"
        record = load(tmp_path / "told" / "learners" / "bob.json")
        jsonschema.validate(record, report.schema("learner"))
        assert bare(record)["points"] == 8
        if not again:
            run(group, graded, fresh=True, seed=7)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("nobody,collectives.2,1,", "'nobody' is not"),
        ("bob,tp.1,1,", "not 'tp.1'"),
        ("bob,collectives.2,6,", "from 0 to the 5"),
        ("bob,collectives.2,-1,", "'-1'"),
        ("bob,collectives.2,2.5,", "'2.5'"),
        ("bob,collectives.2,1,,x", "more cells than columns"),
        ("bob,collectives.2,1,\nbob,collectives.2,2,", "twice"),
        ("anna,collectives.2,1,\nANNA,collectives.2,2,", "'ANNA' must have one row for collectives.2"),
    ],
)
def test_a_wrong_row_by_hand_is_refused_before_anything_is_written(graded, tmp_path, row, why):
    by_hand = write(tmp_path, "hand.csv", f"learner,exercise,points,comment\n{row}\n")
    roster = write(tmp_path, "roster.csv", ROSTER)
    assert why in told(graded, tmp_path, "--by-hand", by_hand, "--roster", roster, code=2)
    assert not (tmp_path / "told").exists()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("name\nanna\n", "must have the columns id"),
        ("id,shoe size\nanna,44\n", "a column 'shoe_size'"),
        ("id\nanna\nAnna\n", "line 3: id must be there, and no other row's"),
        ("id,deadline\nanna,tomorrow\n", "roster, 'anna': deadline must be a time such as"),
        ("id,deadline\nanna,9999-12-31\n", "roster, 'anna': deadline must be a time such as"),
        ("id,handed_in\nanna,early\n", "roster, 'anna': handed_in must be a time such as"),
        ("id,Name,name\nanna,A,B\n", "has name twice"),
        ("", "is empty there"),
        (";;\n", "is empty there"),
        ("id,,\nanna,,44\n", "more cells than columns with a name"),
        ('id\n"anna\n', "cannot be read as a table"),
    ],
)
def test_a_wrong_roster_is_refused(graded, tmp_path, text, why):
    assert why in told(graded, tmp_path, "--roster", write(tmp_path, "roster.csv", text), code=2)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--late-penalty", 10], "late_percent must come with a deadline"),
        (["--title", " "], "--title must not be empty"),
        (["--since", "nowhere"], "--since must be a folder that is there, not nowhere"),
    ],
)
def test_a_flag_that_would_do_nothing_is_refused(graded, tmp_path, words, why):
    assert why in told(graded, tmp_path, *words, code=2)


@pytest.mark.parametrize(("percent", "days", "deducted"), [(29, 1, 29), (0.7, 3, 2), (9.7, 10, 97), (60, 2, 100)])
def test_a_penalty_is_exact(percent, days, deducted):
    record = learner_record("anna", [{**ENTRY, "points": 100}], handed_in=f"2001-11-{10 + days}T00:00Z")
    book = Gradebook(deadline="2001-11-10T00:00Z", late_percent=percent)
    assert book.lay_over(record, None)["late"]["deducted"] == deducted


def test_a_day_alone_lasts_for_a_deadline_alone(graded):
    record = bare(load(graded / "learners" / "bob.json"))
    for deadline, days in (("2001-11-27T12:00Z", 0), ("2001-11-26T12:00Z", 1), ("2001-11-26", 0)):
        roster = {"bob": {"handed_in": "2001-11-27", "deadline": ""}}
        assert Gradebook(roster, deadline=deadline).lay_over(record, "bob")["late"]["days"] == days


def test_who_has_no_time_of_hand_in_is_told_where_there_is_a_deadline(graded, tmp_path):
    record = bare(load(graded / "learners" / "anna.json"))
    record["measured"]["handed_in"] = ""
    with pytest.raises(ValueError, match="handed_in must be known"):
        Gradebook(deadline="2001-11-27").lay_over(record, None)
    late = Gradebook({"anna": {"handed_in": "2001-11-28T01:00Z", "deadline": ""}}, deadline="2001-11-27T00:00Z")
    assert late.lay_over(record, "anna")["late"]["days"] == 2


@pytest.mark.parametrize("words", [["--deadline", "2001-11-27"], ["--roster", "roster.csv"]])
def test_a_folder_without_a_notebook_is_no_hand_in(group, tmp_path, words, monkeypatch):
    """Unless the roster knows of one; what lies there instead is told as before."""
    monkeypatch.chdir(tmp_path)
    (group / "cleo" / "collectives.ipynb").rename(group / "cleo" / "report.pdf")
    for learner in ("anna", "bob", "dan", "eve"):
        at(group, learner, "2001-11-27T12:00Z")
    run(group, tmp_path / "graded")
    write(tmp_path, "roster.csv", "id,handed_in\nanna,\nbob,\ncleo,\ndan,\neve,\n")
    told(tmp_path / "graded", tmp_path, *words)
    cleo, dan = (load(tmp_path / "told" / "learners" / f"{name}.json") for name in ("cleo", "dan"))
    assert (cleo["status"], dan["status"], "late" in cleo) == ("absent", "graded", False)
    assert "report.pdf" in (tmp_path / "told" / "reports" / "cleo.md").read_text()
    write(tmp_path, "roster.csv", "id,handed_in\ncleo,2001-11-28T01:00\n")
    told(tmp_path / "graded", tmp_path, "--deadline", "2001-11-27", "--roster", "roster.csv")
    cleo = load(tmp_path / "told" / "learners" / "cleo.json")
    assert (cleo["status"], cleo["late"]["days"]) == ("graded", 1)


def test_canvas_and_moodle_get_their_columns_and_no_formula(graded, tmp_path):
    roster, by_hand = write(tmp_path, "roster.csv", ROSTER), write(tmp_path, "hand.csv", BY_HAND)
    told(graded, tmp_path, "--roster", roster, "--by-hand", by_hand, "--title", "Week 1 (77)")
    canvas, moodle = (table(tmp_path / "told" / f"{name}.csv") for name in ("canvas", "moodle"))
    assert canvas[0] == ["Student", "ID", "SIS User ID", "SIS Login ID", "Section", "Week 1 (77)"]
    assert canvas[1] == ["    Points Possible", "", "", "", "", "15"]
    assert {row[3]: row[5] for row in canvas[2:]} == {"ANNA": "15", "bob": "10", "cleo": "5", "zoe": "", "::error": ""}
    assert moodle[0] == ["ID number", "Email address", "Full name", "Week 1 (77)", "Week 1 (77) feedback"]
    bob = next(row for row in moodle if row[0] == "bob")
    assert bob == ["bob", "bob@example.org", f"'{FORMULA}", "10", "collectives.2: ask <b>me</b>"]
    cells = [cell for row in canvas[1:] + moodle[1:] for cell in row]
    assert [each for each in cells if each.startswith(("=", "+", "-", "@", "\t"))] == []


def test_nobody_is_named_and_the_mapping_lies_apart(graded, group, tmp_path):
    hand_in(group, "mallory", {**reference("collectives.1"), "collectives-2": "# print: I am mallory\n"})
    (group / "mallory.ipynb").write_text("{broken")
    (group / "malory").mkdir()
    (group / "malory" / "Bob_Smith_essay.pdf").write_text("no notebook")
    run(group, graded)
    told(graded, tmp_path, "--roster", write(tmp_path, "roster.csv", ROSTER))  # an earlier report in the same folder
    listed = ROSTER.replace("deadline", "deadline,handed_in") + "mallory,Mal,,\nmalory,,,,2001-11-26\n"
    roster, secret = write(tmp_path, "roster.csv", listed), tmp_path / "secret"
    words = "--roster", roster, "--anonymous", secret, "--deadline", "2001-11-27"
    first = set(told(graded, tmp_path, *words))
    for path in (tmp_path / "told").rglob("*"):
        shown = path.name + (path.read_text() if path.is_file() else "")
        for name in ("anna", "ANNA", "bob", "Bob_Smith", "zoe", "mallory", "Mal", "example.org", "2001-11-28T"):
            assert name not in shown, (path, name)
    assert {path.name for path in (tmp_path / "told").glob("*.csv")} == {"scores.csv"}, "an earlier report's are gone"
    mapping = {row[1]: row[0] for row in table(secret / "mapping.csv")[1:]}
    assert set(mapping.values()) >= first
    assert mapping["mallory"] in first
    assert (secret / "salt").stat().st_mode & 0o077 == (secret / "mapping.csv").stat().st_mode & 0o077 == 0
    unlisted = set(told(graded, tmp_path, "--anonymous", secret))
    assert mapping["ANNA"] in unlisted, "in a roster or not, however it is written"
    assert set(told(graded, tmp_path, *words)) == first, "they are stable"
    assert set(told(graded, tmp_path, "--roster", roster, "--anonymous", tmp_path / "other")).isdisjoint(first)
    assert "apart from the results" in told(graded, tmp_path, "--anonymous", tmp_path / "told" / "x", code=2)


def test_the_page_of_the_class_links_each_learners_feedback_and_names_who_failed(out):
    soup = BeautifulSoup((out / "report.html").read_text(), "html.parser")
    links = {link["href"]: link.get_text() for link in soup.find_all("a")}
    assert set(links.values()) == {"=cleo()", "Gus", "anna", "bob", "dan", "eve", "fay", "gus (2)"}
    for href in links:
        page = (out / href.replace("%20", " ")).read_text()
        assert not re.search(r"(?:src|href)=|@import|url\(|https?:", page)
        assert "default-src 'none'" in page
    bob = BeautifulSoup((out / "feedback" / "bob.html").read_text(), "html.parser")
    assert bob.h1.get_text() == "bob"
    assert "8 of 15 points" in bob.get_text()
    rows = {each["exercise"]: each for each in load(out / "results.json")["statistics"]}
    assert rows["collectives.2"]["commonest_failure"]["learners"] == ["=cleo()", "bob", "eve"]
    assert "=cleo(), bob, eve" in soup.find_all("table")[1].get_text()


def test_rows_are_read_as_spreadsheets_write_them(tmp_path):
    path = write(tmp_path, "roster.csv", "\ufeffID,Name\r\n anna ,Anna\r\n")
    assert read_roster(path)["anna"]["name"] == "Anna"
    for text in ("\ufeffid;name;\r\nanna;Anna;\r\n;;\r\n\r\n", "id,name,,\nanna,Anna,,,\n,,,\n"):
        rows = read_roster(write(tmp_path, "roster.csv", text))
        assert (list(rows), rows["anna"]["name"]) == (["anna"], "Anna"), text
    for encoding in ("cp1252", "utf-16"):
        path.write_bytes("id,name\nanna,Änna\n".encode(encoding))
        with pytest.raises(ValueError, match="save it as CSV UTF-8"):
            read_roster(path)
    path = write(tmp_path, "hand.csv", '"Learner","Exercise","Comment"\r\n"anna","tp.1","two\nlines"\r\n')
    assert read_by_hand(path) == {
        ("anna", "tp.1"): {"learner": "anna", "exercise": "tp.1", "points": "", "comment": "two\nlines"}
    }


def test_a_time_without_a_zone_is_utc(graded):
    record = bare(load(graded / "learners" / "bob.json"))
    for deadline, days in (("2001-11-28T00:30", 0), ("2001-11-28T00:29:59+00:00", 1), ("2001-11-28T00:30+01:00", 1)):
        assert Gradebook(deadline=deadline).lay_over(record, None)["late"]["days"] == days
    assert datetime.fromisoformat(record["measured"]["handed_in"]) == datetime(2001, 11, 28, 0, 30, tzinfo=UTC)


def test_join_refuses_before_it_writes(graded, tmp_path):
    with pytest.raises(JoinError, match="'x' is not"):
        join([graded], tmp_path / "never", Gradebook(by_hand={("x", PAPER[0]): {"points": "1", "comment": ""}}))
    assert not (tmp_path / "never").exists()
