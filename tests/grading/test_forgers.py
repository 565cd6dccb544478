"""No forger earns a point that its work has not earned, in any exercise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dtlib.grading.checks import all_exercises
from dtlib.grading.exercise import Exercise
from dtlib.grading.result import Result
from dtlib.grading.sandbox import Sandbox

from .answers import SEED, open_sandbox
from .forgers import tried


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with open_sandbox() as one:
        yield one


def earned(result: Result) -> dict[str, int]:
    """The points of each check that earned any."""
    return {each.name: each.points for each in result.checks if each.points}


# Whoever asks the desk for every layer's key once more in backward has passed through every layer once more.
ASKED = {"activations.5": {"recompute"}}


def known(exercise: Exercise) -> set[str]:
    """The checks that whoever knows every right value may pass: values of exercises that ask for nothing but values."""
    if "world_size" in exercise.cases(SEED)[0]:
        return set()  # ranks that have not heard of each other earn nothing, whatever they know
    values = {check.name for check in exercise.checks if check.kind in ("value", "gradient")}
    return values | ASKED.get(exercise.id, set())


@pytest.mark.parametrize("name", list(all_exercises()))
def test_nobody_earns_more_than_its_work(name: str, sandbox: Sandbox, tmp_path: Path):
    exercise = all_exercises()[name]
    results = tried(sandbox, exercise, SEED, tmp_path)
    assert results["reference"].status == "pass", results["reference"]
    assert not earned(results["mirror"]), results["mirror"]
    for kind in ("oracle", "silent"):
        told = {check.name for check in exercise.checks if check.is_told}
        if exercise.harness.startswith("paper."):
            continue  # nothing is asked for but the answer: whoever knows it has earned it
        assert earned(results[kind]).keys() <= known(exercise) - (told if kind == "silent" else set()), results[kind]
