"""What learners handed in, found and read on the trusted side: as text and nothing else.

**Input.** One notebook, or a folder with one sub-folder or one notebook a learner, mixed as you like:

- A sub-folder is a learner, and all notebooks in it are that learner's, up to four folders deep.
- A notebook beside them is of the learner that its name gives, without the chapter and marks of a copy:
  ``alice.ipynb``, ``alice_collectives.ipynb`` and ``dp-alice (1).ipynb`` are all of alice, as is a folder ``alice``.
- A notebook named after its chapter alone (``collectives.ipynb``) is of a learner named after the folder, so a folder
  that one learner works in can be graded as it is.

Links are not followed. Hidden files, checkpoints and ``__MACOSX`` are passed over.

**Chapter.** A notebook belongs to each chapter of which it has an exercise's cell, by id; without one, to each chapter
of which it defines a function; without one, to the chapter in its file name, if only to say what is wrong with it. A
cell that defines an exercise's function gets the exercise's id where no cell of the notebook has that. Of
two notebooks of one chapter the one with more answers counts (a function that does not raise ``NotImplementedError``);
of equals, the one with the chapter's plain name, the one less deep in folders, the first by name.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from . import handed_in
from .learners import NOTEBOOK_SUFFIX, learner_of, learner_of_folder, printable, safe_name
from .learners import distinct as _distinct
from .notebook_file import Cell, Content, NotANotebook, parse

__all__ = ["MAX_NOTEBOOK_BYTES", "Cell", "Found", "Notebook", "Submission", "find", "read", "safe_name"]

MAX_NOTEBOOK_BYTES = 20 * 2**20
MAX_NOTEBOOKS = 50  # of one learner
MAX_LEARNER_BYTES = 64 * 2**20
_MAX_NOTES = 30
_INSTEAD = {".7z", ".docx", ".gz", ".html", ".pdf", ".py", ".rar", ".tar", ".tgz", ".zip"}  # handed in by mistake
_BINDS = re.compile(
    r"^[ \t]*+(?:(?:async[ \t]+)?def[ \t]+(?P<defined>\w+)|(?P<assigned>[A-Za-z_]\w*)[ \t]*+=(?!=))", re.M
)


@dataclass(frozen=True)
class Notebook:
    """A notebook as far as it counts: its chapter, "" for none, and its code cells in order.

    `problem` says why nothing of it can be graded, "" where something can.
    """

    stem: str
    path: Path
    cells: tuple[Cell, ...]
    problem: str = ""


@dataclass(frozen=True)
class Submission:
    """What one learner handed in. `notes` tell what was passed over or looked odd; `digest` (SHA-256, hexadecimal)
    changes when, and only when, something that is graded changes.
    """

    learner: str
    notebooks: tuple[Notebook, ...]
    notes: tuple[str, ...]
    digest: str

    def cells(self, stem: str) -> tuple[Cell, ...]:
        """The code cells of the chapter's notebook, () where there is none."""
        return next((each.cells for each in self.notebooks if each.stem == stem and not each.problem), ())

    def problem(self, stem: str) -> str:
        """Why nothing of the chapter can be graded, in one line; "" where something can."""
        if any(each.stem == stem and not each.problem for each in self.notebooks):
            return ""
        for wanted in (stem, ""):
            told = [each.problem for each in self.notebooks if each.stem == wanted]
            if told:
                return "; ".join(told[:3]) + (f"; and {len(told) - 3} more" if len(told) > 3 else "")
        why = f" ({self.notes[0]})" if self.notes and not self.notebooks else ""
        return f"no notebook {stem}.ipynb was handed in{why}"


@dataclass(frozen=True)
class Found:
    """A learner and where that learner's notebooks are, not yet read. All `paths` are below `root`, without links."""

    learner: str
    paths: tuple[Path, ...]
    notes: tuple[str, ...] = ()
    root: Path | None = None


def find(folder: Path | str) -> list[Found]:
    """The learners of `folder` (or of one notebook), sorted by name; no file is opened, and no two names fold alike.

    Learners who handed in something else than a notebook are there too, with a note. Raises ``ValueError`` where
    `folder` does not exist, cannot be read, or holds more than 100,000 entries.
    """
    folder = Path(folder)
    try:
        if folder.is_file():
            stem = NOTEBOOK_SUFFIX.sub("", folder.name)
            notebook = folder.resolve()  # the instructor may name a link, learners may not
            return [Found(printable(stem) or "unnamed", (notebook,), root=notebook.parent)]
        entries = handed_in.entries(folder)
    except (OSError, handed_in.Refused) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(
            f"folder must be a notebook or a folder that can be read, not {str(folder)!r} ({why})"
        ) from None
    paths: dict[str, list[Path]] = {}
    notes: dict[str, list[str]] = {}
    own = learner_of_folder(folder.resolve().name) or "submission"
    stems = tuple(_known())
    is_one_learners = any(not learner_of(each.name, stems) for each in entries if _is_notebook(each))
    for each in entries:
        if each.is_folder:
            learner = learner_of_folder(each.name)
            below, told = handed_in.notebooks(folder, each.name)
        elif _is_notebook(each):
            learner, below, told = learner_of(each.name, stems) or own, [folder / each.name], []
        elif each.is_link or (Path(each.name).suffix.lower() in _INSTEAD and not is_one_learners):
            learner = learner_of(Path(each.name).stem, stems) or own
            what = "a link, which is not followed" if each.is_link else "no notebook (.ipynb)"
            below, told = [], [f"{printable(each.name)} is {what}"]
        else:
            continue
        paths.setdefault(learner, []).extend(below)
        notes.setdefault(learner, []).extend(told)
    shown = _distinct(paths)
    found = [Found(shown[each], tuple(_first(paths[each], notes[each])), tuple(notes[each]), folder) for each in paths]
    return sorted(found, key=lambda each: each.learner)


def read(found: Found) -> Submission:
    """Read what `find` found. Whatever was handed in, this does not raise: what cannot be read is a `problem`."""
    notes = list(found.notes)
    candidates: list[_Candidate] = []
    left = MAX_LEARNER_BYTES
    for path in found.paths[:MAX_NOTEBOOKS]:
        shown = _shown(path, found.root)
        try:
            data = handed_in.content(path, found.root, MAX_NOTEBOOK_BYTES)
            left -= len(data)
            if left < 0:
                raise NotANotebook("is not read: the notebooks before it are larger than 64 MiB together")
            candidates += _candidates(path, shown, parse(data), notes)
        except (NotANotebook, handed_in.Refused) as error:
            candidates.append(_Candidate(path, shown, _stem_of_name(path.name), problem=f"{shown} {error}"))
        except Exception as error:  # whatever it is, it costs nobody else anything
            problem = f"{shown} cannot be read ({type(error).__name__})"
            candidates.append(_Candidate(path, shown, _stem_of_name(path.name), problem=problem))
    notebooks = tuple(_choose(candidates, notes))
    if len(notes) > _MAX_NOTES:
        notes[_MAX_NOTES:] = [f"and {len(notes) - _MAX_NOTES} more notes of this kind"]
    return Submission(found.learner, notebooks, tuple(printable(each, 400) for each in notes), _digest(notebooks))


@dataclass(frozen=True)
class _Candidate:
    """A notebook under one of the chapters that it may stand for, before it is known which one counts."""

    path: Path
    shown: str
    stem: str
    cells: tuple[Cell, ...] = ()
    problem: str = ""

    def answers(self) -> int:
        return sum(_is_answered(self.cells, id, function) for id, function in _known().get(self.stem, {}).items())

    def rank(self) -> tuple[int, bool, int, str]:
        plain = self.path.name == f"{self.stem}.ipynb"
        return (-self.answers(), not plain, self.shown.count("/"), self.shown)


@cache
def _known() -> dict[str, dict[str, str]]:
    """For each chapter the function of each exercise's cell."""
    from .checks import all_exercises

    known: dict[str, dict[str, str]] = {}
    for exercise in all_exercises().values():
        known.setdefault(exercise.id.partition(".")[0], {})[exercise.id.replace(".", "-")] = exercise.function
    return known


def _is_notebook(entry: handed_in.Entry) -> bool:
    return not entry.is_folder and NOTEBOOK_SUFFIX.search(entry.name) is not None


def _first(paths: Sequence[Path], notes: list[str]) -> Iterator[Path]:
    """The notebooks to read, those that are named after a chapter first."""
    in_order = sorted(paths, key=lambda path: (not _stem_of_name(path.name), len(path.parts), str(path)))
    if len(in_order) > MAX_NOTEBOOKS:
        notes.append(f"there are {len(in_order)} notebooks, of which {MAX_NOTEBOOKS} are read")
    yield from in_order[:MAX_NOTEBOOKS]


def _shown(path: Path, root: Path | None) -> str:
    parts = path.relative_to(root).parts if root is not None and path.is_relative_to(root) else (path.name,)
    return printable("/".join(parts[1:] or parts))


def _stem_of_name(name: str) -> str:
    words = re.split(r"[\W_]+", NOTEBOOK_SUFFIX.sub("", name).casefold())
    return next((stem for stem in _known() if stem in words), "")


def _candidates(path: Path, shown: str, content: Content, notes: list[str]) -> Iterator[_Candidate]:
    notes += [f"{shown}: {each}" for each in content.notes[:5]]
    ids = [cell.id for cell in content.cells]
    stems = [stem for stem, exercises in _known().items() if exercises.keys() & set(ids)]
    if not stems:
        bound = set().union(*(_bound(cell.source) for cell in content.cells))
        stems = [stem for stem, exercises in _known().items() if set(exercises.values()) & bound]
    for stem in stems:
        for id in _known()[stem]:
            if ids.count(id) > 1:
                notes.append(f"{shown}: {ids.count(id)} cells have the id `{id}`, and the last that answers counts")
            if id in content.other_ids and id not in ids:
                notes.append(f"{shown}: cell `{id}` is no code cell, so what it holds does not count")
        yield _Candidate(path, shown, stem, tuple(_with_ids(content.cells, _known()[stem])))
    if not stems:
        what = "holds no code" if not any(cell.source.strip() for cell in content.cells) else "is of another course"
        names = [f"`{id}` with `{function}`" for each in _known().values() for id, function in list(each.items())[:1]]
        problem = f"{shown} {what}: it has no exercise of this one, such as {' or '.join(names[:2])}"
        yield _Candidate(path, shown, _stem_of_name(path.name), problem=problem)


def _with_ids(cells: Sequence[Cell], exercises: Mapping[str, str]) -> Iterator[Cell]:
    """`cells`, in which one that defines the function of an exercise gets its id where no cell has that id.

    So the exercises of a notebook without ids, too, are kept from each other when they run.
    """
    given = {cell.id for cell in cells}
    wanted = {function: id for id, function in exercises.items() if id not in given}
    for cell in cells:
        functions = [] if cell.id in exercises else [each["defined"] for each in _BINDS.finditer(cell.source)]
        yield next((Cell(wanted[each], cell.source) for each in functions if each in wanted), cell)


def _bound(source: str) -> set[str]:
    return {match["defined"] or match["assigned"] for match in _BINDS.finditer(source)}


def _is_answered(cells: Iterable[Cell], id: str, function: str) -> bool:
    return any(
        "NotImplementedError" not in cell.source
        for cell in cells
        if function in cell.source and function in _bound(cell.source)
    )


def _choose(candidates: Sequence[_Candidate], notes: list[str]) -> Iterator[Notebook]:
    """For each chapter the notebook that counts, or all of those that cannot be read; `notes` tells of the rest."""
    sound = [each for each in candidates if not each.problem]
    for stem in _known():
        ranked = sorted((each for each in sound if each.stem == stem), key=_Candidate.rank)
        for each in ranked[:1]:
            yield Notebook(stem, each.path, each.cells)
        for each in ranked[1:]:
            answers = f"{ranked[0].answers()} answers, against {each.answers()}"
            notes.append(f"{each.shown} is another notebook of chapter {stem}; {ranked[0].shown} counts ({answers})")
    fine = {each.stem for each in sound}
    for each in sorted((each for each in candidates if each.problem), key=lambda each: each.shown):
        if each.stem in fine or (not each.stem and fine):
            notes.append(each.problem)
        else:
            yield Notebook(each.stem, each.path, (), each.problem)


def _digest(notebooks: Iterable[Notebook]) -> str:
    graded = [[each.stem, each.problem, [[cell.id, cell.source] for cell in each.cells]] for each in notebooks]
    return hashlib.sha256(json.dumps(graded).encode()).hexdigest()
