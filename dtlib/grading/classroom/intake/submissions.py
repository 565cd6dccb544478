"""What learners handed in, found and read on the trusted side.

**Input.** One notebook, or a folder with one sub-folder or one notebook a learner, mixed as you like:

- A sub-folder is a learner, and all notebooks in it are that learner's, up to four folders deep.
- A notebook beside them is of the learner that its name gives, without the chapter and marks of a copy:
  ``alice.ipynb``, ``alice_collectives.ipynb`` and ``dp-alice (1).ipynb`` are all of alice, as is a folder ``alice``.
- A notebook named after its chapter alone (``collectives.ipynb``) is of a learner named after the folder, so a folder
  that one learner works in can be graded as it is. `find` can also be told that all of the folder is one learner's.
- The names of files that Canvas and Moodle pack are understood, once they are unpacked: all files of a learner count.

Links are not followed. Hidden files, checkpoints and ``__MACOSX`` are passed over.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from dtlib.grading.exercises.blanks import is_untouched
from dtlib.grading.sandbox.runner import Cell

from . import folders
from .folders import Refused
from .names import distinct, instead, learner_of, of_canvas, printable
from .notebooks import chapters_of, known, parse, stem_of_name

Place = tuple[int, int]
MAX_NOTEBOOK_BYTES = 20 * 2**20
MAX_NOTEBOOKS = 50  # of one learner
MAX_LEARNER_BYTES = 64 * 2**20
_MOST_NOTES = 30
_INSTEAD = {".7z", ".docx", ".gz", ".html", ".pdf", ".py", ".rar", ".tar", ".tgz", ".zip"}  # handed in by mistake


@dataclass
class Submission:
    """What one learner handed in: the `paths` of notebooks in `folder`, and what of them counts, once it was `read`.

    Of two notebooks of one chapter the one with more answers counts; of equals, the one with the chapter's plain name,
    the one less deep in folders, the first by name.

    `notes` tell what was passed over or looked odd, `alike` the names of learners, this one among them, that differ in
    case or form alone. `digest` (SHA-256) changes when, and only when, something that is graded changes.
    `handed_in` is when the newest notebook was written, in UTC. Nobody has begun the exercises that are `untouched`
    (see `blanks`). A `fault` is the grader's own.
    """

    learner: str
    folder: Path
    paths: Sequence[Path]
    notes: list[str] = field(default_factory=list)
    alike: Sequence[str] = ()
    digest: str = ""
    handed_in: str = ""
    untouched: frozenset[str] = frozenset()
    fault: Exception | None = None
    _places: dict[str, Place] = field(default_factory=dict)  # of the cells in the spool, by chapter
    _problems: dict[str, list[str]] = field(default_factory=dict)  # by chapter, "" where none is known
    _spool: BinaryIO = field(init=False)

    def read(self, spool: BinaryIO) -> None:
        """Read each notebook, once, and keep in the file `spool`, not in memory, what counts of it.

        What cannot be read is a problem, and nothing that was handed in makes this raise: a full disk would, say.
        """
        found: dict[str, list[tuple[int, bool, int, str, Place]]] = {}
        problems: list[tuple[str, str]] = []
        left = MAX_LEARNER_BYTES
        self.handed_in = _newest(self.paths)
        for path in self.paths:
            shown = printable("/".join(path.relative_to(self.folder).parts))
            told: list[str] = []
            try:
                data = folders.content(path, MAX_NOTEBOOK_BYTES)
                left -= len(data)
                if left < 0:
                    raise Refused("is not read: the notebooks before it are larger than 64 MiB together")
                content = parse(data)
                told += content.notes[:5]
                chapters = chapters_of(content, told)
            except Refused as error:
                problems.append((stem_of_name(path.name), f"{shown} {error}"))
            except Exception as error:  # whatever it is, it costs nobody else anything
                problems.append((stem_of_name(path.name), f"{shown} cannot be read ({type(error).__name__})"))
            else:
                for stem, answers, cells in chapters:
                    place = spool.tell(), spool.write(json.dumps(cells).encode())
                    rank = (-answers, path.name != f"{stem}.ipynb", shown.count("/"), shown, place)
                    found.setdefault(stem, []).append(rank)
            self.notes += [f"{shown}: {each}" for each in told]
        spool.flush()
        self._spool = spool
        for stem in sorted(found):
            (best, _, _, shown, self._places[stem]), *others = sorted(found[stem])
            for answers, _, _, other, _ in others:
                why = f"{shown} counts ({-best} answers, against {-answers})"
                self.notes.append(f"{other} is another notebook of chapter {stem}; {why}")
        exercises = [id.replace("-", ".") for stem in self._places for id in known()[stem]]
        whole = {stem: self.cells(stem) for stem in self._places}
        self.untouched = frozenset(each for each in exercises if is_untouched(each, whole[each.partition(".")[0]]))
        for stem, text in problems:
            if stem in found or (found and not stem):
                self.notes.append(text)
            else:
                self._problems.setdefault(stem, []).append(text)
        if len(self.notes) > _MOST_NOTES:
            self.notes[_MOST_NOTES:] = [f"and {len(self.notes) - _MOST_NOTES} more notes of this kind"]
        self.notes = [printable(each, 400) for each in self.notes]
        graded = hashlib.sha256(json.dumps([list(self._places), self._problems]).encode())
        for stem in self._places:
            graded.update(hashlib.sha256(self._kept(stem)).digest())
        self.digest = graded.hexdigest()

    @property
    def stems(self) -> set[str]:
        """The chapters of which a notebook came in, whether it can be read or not."""
        return {*self._places, *self._problems} - {""}

    def cells(self, stem: str) -> list[Cell]:
        """The code cells of the chapter's notebook, of which there is one."""
        return [Cell(*each) for each in json.loads(self._kept(stem))]

    def is_run(self, exercise: str) -> bool:
        """Whether anything has to run for the verdict on an exercise: it was begun, and can be read."""
        return not (self.fault or exercise in self.untouched or self.problem(exercise.partition(".")[0])[0])

    def _kept(self, stem: str) -> bytes:
        first, length = self._places[stem]
        return os.pread(self._spool.fileno(), length, first)  # threads do not share where they are in it

    def problem(self, stem: str) -> tuple[str, bool]:
        """Why nothing of the chapter can be graded, in one line ("": something can), and whether anything came in."""
        if stem in self._places:
            return "", True
        if told := self._problems.get(stem) or self._problems.get("", []):
            return "; ".join(told[:3]) + (f"; and {len(told) - 3} more" if len(told) > 3 else ""), True
        why = f" ({self.notes[0]})" if self.notes and not self.stems else ""
        return f"no notebook {stem}.ipynb was handed in{why}", False


def _newest(paths: Sequence[Path]) -> str:
    times = []
    for path in paths:
        with contextlib.suppress(OSError, ValueError, OverflowError):
            times.append(datetime.fromtimestamp(path.lstat().st_mtime, UTC))
    return f"{max(times):%Y-%m-%dT%H:%M:%SZ}" if times else ""


def find(submissions: Path, *, one_learner: bool = False) -> list[Submission]:
    """The submissions in a folder (or that notebook), by learner; no file is opened, and no two names look alike.

    With `one_learner` all of the folder is of one learner, who is named after it. Who handed in something else than a
    notebook is there too, with a note. Raises ``ValueError`` where there is no such folder, or it cannot be read or
    holds more than 100,000 entries.
    """
    try:
        top = submissions.resolve(strict=True)  # the instructor may name a link, learners may not
        if top.suffix.lower() in _INSTEAD and top.is_file():
            raise Refused(f"is {instead(top.name)}")
        if top.is_file():
            return [Submission(printable(learner_of(submissions.name)) or "unnamed", top.parent, [top])]
        listed = folders.entries(top)
    except (OSError, RuntimeError, Refused) as error:
        why = getattr(error, "strerror", None) or error
        told = f"a notebook or a folder that can be read, not {str(submissions)!r} ({why})"
        raise ValueError(f"submissions must be {told}") from None
    own = learner_of(top.name) or "submission"
    parts = [(own, top, *folders.notebooks(top))] if one_learner else _by_entry(top, listed, own)
    found: dict[str, Submission] = {}
    for name, folder, paths, notes in parts:
        first = found.setdefault(name, Submission(name, folder, []))
        if first.folder != folder:  # some notebooks of hers lie in a folder, and others beside it
            first.folder = top
        first.paths = [*first.paths, *paths]
        first.notes += notes
    shown, alike = distinct(found)
    groups = {name: group for group in alike for name in group}
    for name, each in found.items():
        each.learner, each.alike = shown[name], groups.get(shown[name], ())
        if len(each.paths) > MAX_NOTEBOOKS:
            each.notes.append(f"there are {len(each.paths)} notebooks, of which {MAX_NOTEBOOKS} are read")
        order = sorted(each.paths, key=lambda path: (not stem_of_name(path.name), len(path.parts), str(path)))
        each.paths = order[:MAX_NOTEBOOKS]
    return sorted(found.values(), key=lambda each: each.learner)


def _by_entry(
    top: Path, listed: Sequence[os.DirEntry[str]], own: str
) -> Iterator[tuple[str, Path, Sequence[Path], Sequence[str]]]:
    """For each entry that is a learner's: the learner, where, the notebooks in it, and what there is to say."""
    stems = tuple(known())
    files = [each.name for each in listed if Path(each.name).suffix.lower() in {".ipynb", *_INSTEAD}]
    canvas = of_canvas(files)
    is_one_learners = any(folders.is_notebook(each) and not learner_of(each.name, stems) for each in listed)
    for each in listed:
        path = top / each.name
        if folders.is_folder(each):
            yield learner_of(each.name), path, *folders.notebooks(path)
        elif folders.is_notebook(each):
            yield canvas.get(each.name) or learner_of(each.name, stems) or own, top, [path], []
        elif each.is_symlink() or (path.suffix.lower() in _INSTEAD and not is_one_learners):
            what = folders.LINK if each.is_symlink() else instead(each.name)
            yield (
                canvas.get(each.name) or learner_of(path.stem, stems) or own,
                top,
                [],
                [f"{printable(each.name)} is {what}"],
            )
