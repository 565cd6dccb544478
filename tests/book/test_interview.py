"""The page of questions: each is asked where the table says, and answered as the page promises.

Three sentences, one number in bold, no digit that was not computed, an assertion, a link to a chapter.
"""

from __future__ import annotations

import ast
import csv
import re
from itertools import pairwise

import pytest

from dtlib import course

from .test_pattern import ROOT, Chapter, cell, source, tags

PAGE = ROOT / "chapters" / "interview.ipynb"
WORDS = r"(?:ZeRO|[Ss]tage|Llama|NVLink) \d|GPT-3|1F1B|[AH]100|FSDP2|(?:bf|fp|int)\d+|\d+B|[a-z]-\d\d"
NAMES = re.compile(rf"\b(?:{WORDS})\b")
"""Words of the field that have a digit, and no number."""


def questions() -> dict[str, dict[str, str]]:
    with (ROOT / "chapters/data/questions.csv").open(encoding="utf-8", newline="") as file:
        return {row["id"]: row for row in csv.DictReader(file)}


def heading(row: dict[str, str]) -> str:
    level = int(row["level"])
    return f"(q-{row['id']})=\n### {row['title']} {'★' * level}{'☆' * (3 - level)}\n"


def bare_digits(text: str) -> list[str]:
    """Numbers in a template that nothing computes: those outside its fields, its formulas and the field's words."""
    return re.findall(r"\S*\d\S*", NAMES.sub("", re.sub(r"\{[^}]*\}|\$[^$]*\$", "", text)))


def texts(code: str) -> list[tuple[str, str, dict[str, str]]]:
    """The calls of `answer` and `say` in a cell, each with its text and its further words."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("answer", "say"):
            words = {
                each.arg: each.value.value
                for each in node.keywords
                if each.arg in ("see", "wrong") and isinstance(each.value, ast.Constant)
            }
            strings = [each.value for each in node.args if isinstance(each, ast.Constant)]
            found.append((ast.unparse(node.func), strings[-1] if strings else "", words))
    return found


def faults(each: dict) -> list[str]:
    """Where an answer is not what the page promises."""
    called = [one for one in texts(source(each)) if one[0] == "answer"]
    if len(called) != 1:
        return ["no answer, or several"]
    _, text, words = called[0]
    found = [f"{number}: a number that nothing computes" for number in bare_digits(text + words.get("wrong", ""))]
    sentences = len(re.findall(r"[.!?](?=\s|$)", text))
    if sentences != 3:
        found.append(f"{sentences} sentences, and not three")
    bold = re.findall(r"\*\*(.+?)\*\*", text)
    if len(bold) != 1 or "{" not in bold[0]:
        found.append("not one computed number in bold")
    if not words.get("see") or not set(words["see"].split()) <= {*course.stems(), "errata"}:
        found.append("no link to a chapter")
    if "wrong" in words and not re.match(r"[a-z]-\d\d: ", words["wrong"]):
        found.append("a text is called wrong, and no claim of the errata is named")
    if not re.search(r"^ *assert ", source(each), re.MULTILINE):
        found.append("nothing is asserted")
    if "hide-cell" not in tags(each):
        found.append("not folded")
    return found


def test_every_question_is_asked_in_its_place_and_answered():
    cells, asked, section = Chapter.read(PAGE).cells, [], ""
    table = questions()
    for before, after in pairwise(cells):
        if match := re.match(r"## (.*)\n", source(before)):
            section = match[1]
        if match := re.match(r"\(q-(\S+)\)=\n", source(before)):
            row = table[match[1]]
            assert source(before).startswith(heading(row))
            assert section == row["subject"]
            assert f'"{match[1]}"' in source(after)
            assert faults(after) == [], match[1]
            asked.append(match[1])
    assert asked == list(table)


def test_what_breaks_is_read_on_in_its_chapter():
    answers = {cell["id"].removeprefix("interview-"): texts(source(cell)) for cell in Chapter.read(PAGE).of("code")}
    asked = [name for name, row in questions().items() if row["subject"] == "When it breaks"]
    assert asked == ["c-n4", "t-i6", "t-i7"]
    for name in asked:
        assert answers[name][0][2]["see"].split()[0] == "reliability"


def test_questions_stand_by_subject_and_level():
    places = [(row["subject"], int(row["level"])) for row in questions().values()]
    subjects = list(dict.fromkeys(subject for subject, _ in places))
    assert places == sorted(places, key=lambda place: (subjects.index(place[0]), place[1]))


def test_no_number_of_the_plan_stands_without_a_cell():
    for each in Chapter.read(PAGE).of("code"):
        for call, text, _ in texts(source(each)):
            assert call == "answer" or bare_digits(text) == [], each["id"]


def given(text: str, more: str = "", check: str = "assert x", folded: bool = True) -> dict:
    code = f"x = 1\n{check}\nanswer('e-q1', {text!r}, see='zero'{more}, x=x)"
    return cell(code, **({"tags": ["hide-cell"]} if folded else {}))


SOUND = "It is **{x:.1f} s** under ZeRO 3. That is $2(N-1)/N$. And so on."


def test_a_sound_answer_has_no_fault():
    assert faults(given(SOUND, ", wrong='e-05: It has {x}.'")) == []


@pytest.mark.parametrize(
    ("each", "fault"),
    [
        (given(SOUND + " And more."), "4 sentences"),
        (given(SOUND.replace("{x:.1f}", "1.5")), "1.5: a number that nothing computes"),
        (given(SOUND.replace("**", "")), "in bold"),
        (given(SOUND.replace("And", "**{x}**, and")), "in bold"),
        (given(SOUND, ", wrong='It has {x}.'"), "no claim"),
        (given(SOUND, ", wrong='e-05: It has 41.'"), "41.: a number"),
        (given(SOUND, check="x"), "nothing is asserted"),
        (given(SOUND, folded=False), "not folded"),
        (cell("x = 1"), "no answer"),
        (cell(source(given(SOUND)).replace("'zero'", "'nowhere'"), tags=["hide-cell"]), "no link"),
    ],
)
def test_each_fault_is_found(each, fault):
    assert any(fault in one for one in faults(each)), faults(each)
