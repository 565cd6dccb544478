"""Which chapters a notebook stands for.

It belongs to each chapter of which it has an exercise's cell, by id; without one, to each chapter of which it defines a
function; without one, to the chapter in its file name, if only to say what is wrong with it. A cell that defines an
exercise's function gets the exercise's id where no cell of the notebook has that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache

from dtlib.grading import checks
from dtlib.grading.sandbox import Cell

from .names import NOTEBOOK_SUFFIX
from .notebook_file import Content


@cache
def known() -> dict[str, dict[str, str]]:
    """For each chapter the function of each exercise's cell, by the cell's id."""
    found: dict[str, dict[str, str]] = {}
    for exercise in checks.all_exercises().values():
        found.setdefault(exercise.id.partition(".")[0], {})[exercise.id.replace(".", "-")] = exercise.function
    return found


@cache
def _binds() -> re.Pattern[str]:
    names = "|".join(function for exercises in known().values() for function in exercises.values())
    defined = rf"(?:async[ \t]++)?def[ \t]++(?P<defined>{names})\b"
    return re.compile(rf"^[ \t]*+(?:{defined}|(?P<assigned>{names})[ \t]*+=(?!=))", re.M)


def stem_of_name(name: str) -> str:
    """The chapter in the name of a file, "" for none."""
    words = re.split(r"[\W_]+", NOTEBOOK_SUFFIX.sub("", name).casefold())
    return next((stem for stem in known() if stem in words), "")


def chapters_of(content: Content, notes: list[str]) -> Iterator[tuple[str, int, list[Cell]]]:
    """For each chapter that a notebook stands for: how many answers it holds, and its cells. `notes` tells what is odd.

    An answer is a function that does not raise ``NotImplementedError``. The text of a cell is searched once.
    """
    ids = [cell.id for cell in content.cells]
    bound = [_bound(cell.source) for cell in content.cells]
    pairs = list(zip(content.cells, bound, strict=True))
    answered = {name for cell, names in pairs if "NotImplementedError" not in cell.source for name in names}
    anywhere = set().union(*bound)
    stems = [stem for stem, exercises in known().items() if exercises.keys() & set(ids)]
    for stem in stems or [stem for stem, exercises in known().items() if anywhere & set(exercises.values())]:
        exercises = known()[stem]
        for id in exercises:
            if ids.count(id) > 1:
                notes.append(f"{ids.count(id)} cells have the id `{id}`, and the last that answers counts")
            if id in content.other_ids and id not in ids:
                notes.append(f"cell `{id}` is no code cell, so what it holds does not count")
        # So the exercises of a notebook without ids, too, are kept from each other when they run.
        lacking = {function: id for id, function in exercises.items() if id not in ids}
        cells = []
        for cell, names in pairs:
            new = [lacking[name] for name, is_def in names.items() if is_def and name in lacking]
            cells.append(Cell(new[0], cell.source) if new and cell.id not in exercises else cell)
        yield stem, len(answered & set(exercises.values())), cells


def no_chapter(content: Content) -> str:
    """What to say of a notebook that stands for no chapter; it goes on after the notebook's name."""
    what = "is of another course" if any(cell.source.strip() for cell in content.cells) else "holds no code"
    names = [f"`{id}` with `{function}`" for each in known().values() for id, function in list(each.items())[:1]]
    return f"{what}: it has no exercise of this one, such as {' or '.join(names[:2])}"


def _bound(source: str) -> Mapping[str, bool]:
    """The functions of exercises that a cell binds, and whether it is with ``def``."""
    bound: dict[str, bool] = {}
    for match in _binds().finditer(source):
        name = match["defined"] or match["assigned"]
        bound[name] = bound.get(name, False) or bool(match["defined"])
    return bound
