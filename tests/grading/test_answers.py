"""Every program of every bank: right answers earn all points, each wrong one is refused by its check for its mistake.

Wrong ones run on the cases that it takes to name them; of those that are weighed, in processes of their own, the first
of each check. Behind walls go a few (`test_sandbox`), and what the walls are about. Forgers, who try a few exercises
here, earn what their work has earned. `make soak` runs all programs on all cases, and all forgers.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dtlib.grading.exercises.catalogue import STEMS, all_exercises
from dtlib.grading.sandbox.runner import Sandbox

from . import forgers
from .answers import FEW, open_sandbox, tried_on, try_all


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with open_sandbox() as one:
        yield one


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
        for name in set(FEW) & set(self.names()):
            with subtests.test(name):
                forgers.refuse(sandbox, all_exercises()[name], tmp_path_factory.mktemp("forgers"))

    def names(self) -> list[str]:
        return [name for name in all_exercises() if name.startswith(f"{self.stem}.")]


for _stem in STEMS:
    globals()[f"Test{_stem.title()}"] = type(f"Test{_stem.title()}", (Answers,), {"stem": _stem})
