"""The exercises of every chapter, as data. Nothing here is needed, or should be seen, where submissions run.

To add an exercise: a harness in ``dtlib/grading/harness/<stem>.py`` that runs the learner's function and returns plain
data, an `Exercise` with its checks here, its three cells in ``solutions/<stem>.ipynb`` (task, answer, check), and its
wrong answers in ``tests/grading/wrong/<id>.md``. A new chapter also stands in `STEMS`. Then ``dtlib release``.
"""

from __future__ import annotations

import importlib
from functools import cache

from dtlib.grading.exercise import Exercise

STEMS = ("memory", "collectives", "dp", "zero", "activations")


@cache
def all_exercises() -> dict[str, Exercise]:
    """Every exercise by its id, in the order of the chapters."""
    modules = [importlib.import_module(f"{__name__}.{stem}") for stem in STEMS]
    return {exercise.id: exercise for module in modules for exercise in module.EXERCISES}
