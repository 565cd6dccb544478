"""The exercises of every chapter. Their folders are not needed, and not seen, where submissions run.

An exercise is ``<stem>/<exercise>.py``, which has an ``EXERCISE``, and its bank ``<exercise>.md`` beside it; its three
cells (task, answer, check) stand in ``solutions/<stem>.ipynb``. The banks hold right answers too: of them
``dtlib release`` ships to learners the feedback, and on paper the wrong programs.
"""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path

from dtlib import course
from dtlib.grading.exercises import bank
from dtlib.grading.exercises.exercise import Exercise

STEMS = course.stems("exercises")


@cache
def bare() -> dict[str, tuple[Path, Exercise]]:
    """Of each exercise by its id, in the order of the chapters, where it stands (without the suffix), and itself.

    It knows no mistake of its bank yet.
    """
    found: dict[str, tuple[Path, Exercise]] = {}
    for stem in STEMS:
        mine = []
        for path in (bank.HERE / stem).glob("*.py"):
            if not path.name.startswith("_"):
                module = importlib.import_module(f"{__package__}.{stem}.{path.stem}")
                mine.append((path.with_suffix(""), module.EXERCISE))
        mine.sort(key=lambda pair: int(pair[1].id.partition(".")[2]))
        found |= {exercise.id: (path, exercise) for path, exercise in mine}
    return found


@cache
def all_exercises() -> dict[str, Exercise]:
    """Every exercise by its id, in the order of the chapters, with what ``dtlib release`` shipped of its bank.

    Raises `BankError` where that does not fit the exercise any more.
    """
    banks = bank.shipped()
    empty = bank.Bank(())
    return {
        name: bank.equipped(exercise, banks.get(name, empty), banks["shared"]) for name, (_, exercise) in bare().items()
    }
