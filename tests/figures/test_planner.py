"""The planner on a page says what the planner answers, in the words of the command."""

from __future__ import annotations

import json
import re
from html import unescape

import pytest

from dtlib import figures
from dtlib.cli import told
from dtlib.theory import hardware, planner
from dtlib.theory.units import format_seconds


def ask(name, card, gpus):
    try:
        return planner.search(name, planner.Machine(accelerator=hardware.accelerator(card), gpus=gpus), keep=3)
    except ValueError as error:
        return str(error)


CHOICES = [(name, card, gpus) for name in ("gpt2-1.5b", "llama3-70b") for card in ("A100", "H100") for gpus in (8, 64)]
ANSWERS = {choice: ask(*choice) for choice in CHOICES}


def test_the_page_holds_every_answer_in_the_order_of_its_controls():
    page = figures.planner(ANSWERS, start=CHOICES[1]).html()
    held = json.loads(re.search(r'<script type="application/json">(.*?)</script>', page)[1].replace("<\\/", "</"))
    assert re.findall(r'<option value="([^"]+)"', page) == ["gpt2-1.5b", "llama3-70b", "A100", "H100", "8", "64"]
    assert len(held["answers"]) == len(CHOICES)
    for answer, fragment in zip(ANSWERS.values(), held["answers"], strict=True):
        text = unescape("".join(held["marks"].get(letter, letter) for letter in fragment))
        assert len(text) > 1.3 * len(fragment) or isinstance(answer, str)
        if isinstance(answer, str):
            assert answer in text
            assert "do (dp" in text
            continue
        for sentence in told.sentences(answer):
            assert f"<li>{sentence}</li>" in text
        for each in answer.plans:
            assert "".join(f"<td>{cell}</td>" for cell in told.row(answer, each)) in text
        for name, amount, _ in (*told.terms(answer.best)[0], *told.terms(answer.best)[1]):
            assert f">{name}</th><td>{amount}</td>" in text
    assert any(isinstance(answer, str) for answer in ANSWERS.values())


def test_the_best_plan_is_told_in_words():
    answer = ANSWERS["llama3-70b", "H100", 64]
    p, said = answer.best.plan, told.in_words(answer)
    assert said in told.sentences(answer)
    assert (
        f"takes {format_seconds(answer.best.time.total)} at an MFU of {answer.mfu(answer.best):.1%}: dp {p.dp}, "
        in said
    )
    assert (f"tp {p.tp} with sequence parallelism" in said) == p.sequence_parallel
    rest = f"cp {p.cp}, ZeRO {p.zero}, {p.micro_batches} micro-batches of {p.micro_batch} sequence"
    again = {"none": "nothing computed again", "full": "each layer computed again"}[p.recompute]
    assert rest in said
    assert said.endswith(f" a rank, {again}.")


def test_the_first_choice_is_there_without_a_script():
    page = figures.planner(ANSWERS, start=CHOICES[1], caption="a < b").html()
    before = page[: page.index("<script")]
    assert "a &lt; b" in before
    assert told.sentences(ANSWERS[CHOICES[1]])[0] in before
    assert re.findall(r"<option value=\"([^\"]+)\" selected>", page) == ["gpt2-1.5b", "A100", "64"]


def test_a_missing_combination_and_an_unknown_start_are_refused():
    with pytest.raises(
        ValueError, match=r"answers must have every combination .*\('gpt2-1.5b', 'A100', 8\) is missing"
    ):
        figures.planner({choice: each for choice, each in ANSWERS.items() if choice != CHOICES[0]}, start=CHOICES[1])
    with pytest.raises(ValueError, match=r"start must be one of answers, not \('tiny', 'A100', 8\)"):
        figures.planner(ANSWERS, start=("tiny", "A100", 8))
