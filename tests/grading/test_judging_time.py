"""Whatever comes back as an answer on paper, judging it takes the trusted process no time to speak of.

A text of a megabyte once took 23 seconds. Seconds here are the processor's, ten times what an idle machine takes.
"""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest

from dtlib.grading.exercises import plain
from dtlib.grading.exercises.catalogue import all_exercises
from dtlib.grading.exercises.seen import Observed

MOST_SECONDS = 4.0
ON_PAPER = [name for name, each in all_exercises().items() if each.harness.startswith("paper.")]
DEAR = ("memory.7", "dp.7")  # those that took longest


def as_much_as_fits(item: Any) -> list[Any]:
    return [item] * min(4000, plain.MAX_ANSWER_TEXT_BYTES // 2 // (len(json.dumps(item)) + 2) - 1)


LARGEST = {
    "texts": as_much_as_fits("x" * 1900),
    "numbers": as_much_as_fits(1),
    "pairs": as_much_as_fits(["F", 3]),
    "nested": as_much_as_fits([[[[1]]]]),
    "array": np.arange(plain.MAX_ANSWER_BYTES // 16 - 8.0),
    "a dictionary": {str(number): number for number in range(1200)},
}


def seconds(name: str, answer: Any) -> float:
    exercise = all_exercises()[name]
    said = {"answer": answer, "form": "bytes", "shortcut": [], "library": [], "built_in": [], "escaped": []}
    cases = [Observed(case, (said,)) for case in exercise.cases(3)]
    began = time.thread_time()
    exercise.judge(cases)
    return time.thread_time() - began


@pytest.mark.parametrize("name", [*DEAR, *(pytest.param(each, marks=pytest.mark.soak) for each in ON_PAPER)])
def test_the_largest_answers_are_judged_at_once(name: str):
    for what, answer in LARGEST.items():
        assert isinstance(plain.short(answer), type(answer)), f"{what} would not come back"
        assert seconds(name, answer) < MOST_SECONDS, what
        assert seconds(name, [answer, answer]) < 2 * MOST_SECONDS, what


def test_what_is_larger_does_not_come_back():
    for larger in (["x" * 1900] * 20, [[1] * 4000] * 4, [np.zeros(10**5)], np.zeros(10**6)):
        assert plain.short(larger)["not_plain"] == type(larger).__name__
    with pytest.raises(ValueError, match="bytes of text"):
        plain.unpack(plain.pack(["x" * 1900] * 20), plain.MAX_ANSWER_TEXT_BYTES)
