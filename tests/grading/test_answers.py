"""Every program of every bank: right answers earn all points, each wrong one is refused by its check for its mistake.

Each program runs once; of those that are weighed, in processes of their own, the first of each check: `make soak` has
them all. Behind walls go a few (`test_sandbox`), and what the walls are about.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dtlib.grading.checks import STEMS, all_exercises
from dtlib.grading.sandbox import Sandbox

from .answers import open_sandbox, tried_on, try_all


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with open_sandbox() as one:
        yield one


class Answers:
    """The exercises of one chapter: classes, so that two processes share the chapters."""

    stem = ""

    def test_the_bank_is_as_it_says(self, sandbox: Sandbox, subtests: pytest.Subtests):
        for name in (name for name in all_exercises() if name.startswith(f"{self.stem}.")):
            with subtests.test(name):
                wrong = try_all(sandbox, tried_on(name))
                assert not wrong, "\n\n".join(f"{each.complaint()}\n{each.program.source}" for each in wrong)


for _stem in STEMS:
    globals()[f"Test{_stem.title()}"] = type(f"Test{_stem.title()}", (Answers,), {"stem": _stem})
