"""Every program of every bank: right answers earn all points, each wrong one is refused by its check for its mistake.

Wrong ones run on the cases that it takes to name them; of those that are weighed, in processes of their own, the first
of each check. `make soak` runs all programs on all cases. Behind walls go a few (`test_sandbox`), and what the walls
are about. Forgers earn what their work has earned.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dtlib.grading.checks import STEMS, all_exercises
from dtlib.grading.exercise import Exercise
from dtlib.grading.result import Result
from dtlib.grading.sandbox import Sandbox

from . import forgers
from .answers import SEED, open_sandbox, tried_on, try_all


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with open_sandbox() as one:
        yield one


# Whoever asks the desk for every layer's key once more in backward has passed through every layer once more.
ASKED = {"activations.5": {"recompute"}}


def earned(result: Result) -> set[str]:
    """The checks that earned points."""
    return {each.name for each in result.checks if each.points}


def known(exercise: Exercise) -> set[str]:
    """The checks that whoever knows every right value may pass: values of exercises that ask for nothing but values."""
    if "world_size" in exercise.cases(SEED)[0]:
        return set()  # ranks that have not heard of each other earn nothing, whatever they know
    values = {check.name for check in exercise.checks if check.kind in ("value", "gradient")}
    return values | ASKED.get(exercise.id, set())


class Answers:
    """The exercises of one chapter: classes, so that two processes share the chapters."""

    stem = ""

    @pytest.mark.timeout(900)  # hundreds of programs
    def test_the_bank_is_as_it_says(self, sandbox: Sandbox, subtests: pytest.Subtests):
        tried = [each for name in self.names() for each in tried_on(name)]
        wrong = try_all(sandbox, tried)
        for name in self.names():
            with subtests.test(name):
                mine = [each for each in wrong if each.exercise.id == name]
                assert not mine, "\n\n".join(f"{each.complaint()}\n{each.program.source}" for each in mine)

    def test_no_forger_earns_more_than_its_work(
        self, sandbox: Sandbox, subtests: pytest.Subtests, tmp_path_factory: pytest.TempPathFactory
    ):
        for name in self.names():
            with subtests.test(name):
                self.forge(all_exercises()[name], sandbox, tmp_path_factory.mktemp("forgers"))

    def names(self) -> list[str]:
        return [name for name in all_exercises() if name.startswith(f"{self.stem}.")]

    def forge(self, exercise: Exercise, sandbox: Sandbox, folder: Path) -> None:
        results = forgers.tried(sandbox, exercise, folder)
        assert not earned(results["mirror"]), results["mirror"]
        if exercise.harness.startswith("paper."):
            return  # nothing is asked for but the answer: whoever knows it has earned it
        told = {check.name for check in exercise.checks if check.is_told}
        assert earned(results["oracle"]) <= known(exercise), results["oracle"]
        assert earned(results["silent"]) <= known(exercise) - told, results["silent"]


for _stem in STEMS:
    globals()[f"Test{_stem.title()}"] = type(f"Test{_stem.title()}", (Answers,), {"stem": _stem})
