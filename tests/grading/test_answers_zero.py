"""The exercises of the chapter: the reference passes, other right answers too, each known mistake is named."""

from __future__ import annotations

from collections import Counter

import pytest

from dtlib.grading import all_exercises

from .answers import check_blank, check_reference, check_right, check_wrong, of_stem, right_of_stem, wrong_of_stem
from .bank import RightAnswer, WrongAnswer

STEM = "zero"
EXERCISES = of_stem(STEM)
WRONG = wrong_of_stem(STEM)
RIGHT = right_of_stem(STEM)
ON_RANKS = ("zero.3", "zero.4", "zero.5", "zero.6")


def test_there_are_seven_exercises_and_enough_mistakes_for_each():
    assert len(EXERCISES) == 7
    counts = Counter(exercise for exercise, _ in {(wrong.exercise, wrong.mistake) for wrong in WRONG})
    assert set(counts) == set(EXERCISES)
    assert min(counts.values()) >= 5
    assert min(counts[exercise] for exercise in ON_RANKS) >= 7
    assert min(Counter(right.exercise for right in RIGHT).values()) >= 2


def test_values_alone_earn_less_than_half_on_ranks():
    for exercise in ("zero.4", "zero.5", "zero.6"):
        checks = all_exercises()[exercise].checks
        of_values = sum(check.points for check in checks if check.kind in ("value", "gradient"))
        assert of_values < sum(check.points for check in checks) / 2
        assert {"memory", "traffic"} <= {check.kind for check in checks}


@pytest.mark.parametrize("exercise", EXERCISES)
def test_reference_passes(exercise: str):
    check_reference(exercise)


@pytest.mark.parametrize("right", RIGHT, ids=[f"{right.exercise}: {right.title}" for right in RIGHT])
def test_right_in_another_way_passes(right: RightAnswer):
    check_right(right)


@pytest.mark.parametrize("exercise", EXERCISES)
def test_blank_is_not_attempted(exercise: str):
    check_blank(exercise)


# Those that give the right values and are no ZeRO, and every third of the others; test_sandbox tries all of them.
REPLICATED = [wrong for wrong in WRONG if wrong.check in ("memory", "traffic", "order")]
SOME = [*REPLICATED, *[wrong for wrong in WRONG if wrong not in REPLICATED][::3]]


@pytest.mark.parametrize("wrong", SOME, ids=[f"{wrong.exercise}: {wrong.title}" for wrong in SOME])
def test_mistake_is_named(wrong: WrongAnswer):
    result = check_wrong(wrong)
    checks = {check.name: check for check in result.checks}
    if wrong.exercise in ON_RANKS and wrong.check in ("memory", "order"):  # what such an answer computes is right
        assert all(check.passed for check in checks.values() if check.kind in ("value", "gradient")), str(result)
