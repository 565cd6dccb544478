"""Whatever cases are drawn, a mistake on paper is recognised as the one it is, and the reference passes."""

from __future__ import annotations

import pytest

from dtlib.grading import Exercise, Result, Run, all_exercises, plain
from dtlib.grading.harness import resolve

from .bank import WrongAnswer, cells, namespace, reference_namespace, wrong_answers

SEEDS = range(60)
ON_PAPER = [exercise for exercise in all_exercises().values() if exercise.harness == "paper.call"]
WRONG = [wrong for wrong in wrong_answers() if all_exercises()[wrong.exercise] in ON_PAPER]


def judged(exercise: Exercise, space: dict, seed: int) -> Result:
    """The verdict without processes: these answers are known and harmless."""
    harness = resolve(exercise.harness)
    observed = [(case, harness(space[exercise.function], case)) for case in exercise.cases(seed)]
    return exercise.judge([Run(case, (plain.unpack(plain.pack(data)),)) for case, data in observed])


@pytest.mark.parametrize("exercise", ON_PAPER, ids=lambda exercise: exercise.id)
def test_reference_passes_for_every_seed(exercise: Exercise):
    space = reference_namespace(exercise.id.partition(".")[0])
    for seed in SEEDS:
        assert judged(exercise, space, seed).status == "pass", f"seed {seed}"


@pytest.mark.parametrize("wrong", WRONG, ids=[f"{wrong.exercise}: {wrong.title}" for wrong in WRONG])
def test_mistake_is_named_for_every_seed(wrong: WrongAnswer):
    exercise = all_exercises()[wrong.exercise]
    space = namespace(cells(wrong.exercise.partition(".")[0])["setup"], wrong.source)
    for seed in SEEDS:
        (told,) = [check for check in judged(exercise, space, seed).checks if check.name == wrong.check]
        assert (told.passed, told.mistake) == (False, wrong.mistake), f"seed {seed}: {told.message}"
