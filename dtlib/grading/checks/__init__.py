"""The exercises of every chapter, as data. Nothing here is needed, or should be seen, where submissions run.

An exercise is ``<stem>/<exercise>.py``, which has an ``EXERCISE``, and its bank ``<exercise>.md`` beside it; its three
cells (task, answer, check) stand in ``solutions/<stem>.ipynb``. A new chapter also stands in `STEMS`.
"""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path

from dtlib.grading import bank
from dtlib.grading.exercise import Exercise

STEMS = ("memory", "collectives", "dp", "zero", "activations")


@cache
def files() -> dict[str, Path]:
    """Where each exercise stands, without the suffix, by its id and in the order of the chapters."""
    found: dict[str, Path] = {}
    for stem in STEMS:
        paths = (path for path in (bank.CHECKS / stem).glob("*.py") if not path.name.startswith("_"))
        modules = {path: importlib.import_module(f"{__name__}.{stem}.{path.stem}") for path in paths}
        mine = {module.EXERCISE.id: path.with_suffix("") for path, module in modules.items()}
        found |= dict(sorted(mine.items(), key=lambda pair: int(pair[0].partition(".")[2])))
    return found


@cache
def all_exercises() -> dict[str, Exercise]:
    """Every exercise by its id, in the order of the chapters."""
    shared, shipped = bank.read(bank.CHECKS / "shared.md"), bank.shipped()
    found = {}
    for name, path in files().items():
        module = importlib.import_module(f"{__name__}.{path.parent.name}.{path.name}")
        own = bank.read(path.with_suffix(".md"))
        found[name] = bank.equipped(module.EXERCISE, own, shared, shipped.get(name, ()))
    return found
