"""The exercises of every chapter, as data. Nothing here is needed, or should be seen, where submissions run."""

from __future__ import annotations

import importlib
from functools import cache

from dtlib.grading.exercise import Exercise

STEMS = ("collectives", "dp")


@cache
def all_exercises() -> dict[str, Exercise]:
    """Every exercise by its id, in the order of the chapters."""
    modules = [importlib.import_module(f"{__name__}.{stem}") for stem in STEMS]
    return {exercise.id: exercise for module in modules for exercise in module.EXERCISES}
