"""The exercises of the chapter: the reference passes, other right answers too, each known mistake is named."""

from __future__ import annotations

from collections import Counter

import pytest

from .answers import (
    check_blank,
    check_reference,
    check_right,
    check_wrong,
    of_stem,
    right_of_stem,
    tried_in_a_notebook,
    wrong_of_stem,
)
from .bank import RightAnswer, WrongAnswer

STEM = "collectives"
EXERCISES = of_stem(STEM)
WRONG = wrong_of_stem(STEM)
TRIED = tried_in_a_notebook(WRONG)
RIGHT = right_of_stem(STEM)


def test_there_are_five_exercises_and_five_mistakes_for_each():
    assert len(EXERCISES) >= 5
    counts = Counter(exercise for exercise, _ in {(wrong.exercise, wrong.mistake) for wrong in WRONG})
    assert set(counts) == set(EXERCISES)
    assert min(counts.values()) >= 5


@pytest.mark.parametrize("exercise", EXERCISES)
def test_reference_passes(exercise: str):
    check_reference(exercise)


@pytest.mark.parametrize("right", RIGHT, ids=[f"{right.exercise}: {right.title}" for right in RIGHT])
def test_right_in_another_way_passes(right: RightAnswer):
    check_right(right)


@pytest.mark.parametrize("exercise", EXERCISES)
def test_blank_is_not_attempted(exercise: str):
    check_blank(exercise)


@pytest.mark.parametrize("wrong", TRIED, ids=[f"{wrong.exercise}: {wrong.title}" for wrong in TRIED])
def test_mistake_is_named(wrong: WrongAnswer):
    check_wrong(wrong)
