"""Who is how far: the standings of a class while it is graded, and the files of each learner who is done."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from . import report
from .exercise import Exercise
from .report.folder import Folder, read_json
from .report.record import Standing, is_whole, learner_record, standing
from .report.results import Class, Fault
from .workers import Pupil

_REFRESHES = 50  # how often results.json is written while a class is graded


@dataclass(frozen=True)
class Event:
    """How far the grader is: `what` is ``read``, ``kept``, ``begin``, ``exercise`` or ``learner``.

    `done` of `total` submissions are read (``read``) or learners graded (all others). `standing` is that of the learner
    who is done (``kept``, ``learner``), `exercise` the id of the exercise that is, `num_exercises` (with ``begin``) how
    many each learner has.
    """

    what: str
    done: int
    total: int
    learner: str = ""
    exercise: str = ""
    num_exercises: int = 0
    standing: Standing | None = None


class Book:
    """Keeps the standings of the class, and writes the files of each learner who is done."""

    def __init__(
        self, folder: Folder, group: Class, exercises: Sequence[Exercise], progress: Callable[[Event], None]
    ) -> None:
        self.folder = folder
        self.group = group
        self.exercises = exercises
        self.walls: dict[str, str] = {}
        self.num_done = 0
        self._progress = progress
        self._unsaved = 0

    def keep(self, learner: str, mark: str) -> bool:
        """Whether the files of an earlier run hold the learner's verdict; then they are taken as they are."""
        file = self.group.standings[learner].file
        record = read_json(self.folder.learner(file))
        if record is None or not is_whole(record, mark):
            return False
        self.group.standings[learner] = standing(record, file)
        self.group.walls = merged(self.group.walls, record["walls"])
        self.group.kept += 1
        self.num_done += 1
        if not (self.folder.report(file).is_file() and self.folder.gradescope(file).is_file()):
            report.write_learner(self.folder, file, record)
        self._say("kept", learner)
        return True

    def tell(self, pupil: Pupil, exercise: Exercise) -> None:
        """Take note of an exercise that is graded; the last one of a learner makes the learner's files."""
        graded = pupil.graded[exercise.id]
        if graded.fault:
            self.group.faults.append(Fault(self._name(pupil.learner), exercise.id, graded.fault))
        if pupil.num_told == len(self.exercises):
            self._finish(pupil)
        else:
            self._say("exercise", pupil.learner, exercise.id)

    def _finish(self, pupil: Pupil) -> None:
        pairs = [(each, pupil.graded[each.id]) for each in self.exercises]
        file = self.group.standings[pupil.learner].file
        self.num_done += 1
        try:
            record = learner_record(pupil.learner, pupil.fingerprint, pupil.notes, self.group.seed, pairs, self.walls)
            report.write_learner(self.folder, file, record)
            self.group.standings[pupil.learner] = standing(record, file)
        except Exception as error:
            self.group.standings[pupil.learner] = replace(self.group.standings[pupil.learner], status="error")
            self.group.faults.append(Fault(self._name(pupil.learner), "", f"could not be recorded: {said(error)}"))
        self._unsaved += 1
        if self._unsaved * _REFRESHES >= len(self.group.standings):
            self._unsaved = 0
            report.write_results(self.folder, self.group)
        self._say("learner", pupil.learner)

    def _say(self, what: str, learner: str, exercise: str = "") -> None:
        total = len(self.group.standings)
        done = self.group.standings[learner] if what != "exercise" else None
        self._progress(Event(what, self.num_done, total, self._name(learner), exercise, standing=done))

    def _name(self, learner: str) -> str:
        return self.group.standings[learner].learner


def merged(walls: Mapping[str, str], more: Mapping[str, str]) -> dict[str, str]:
    """A wall stood for the class if it stood for everybody."""
    return {name: walls.get(name) or more.get(name, "") for name in {**walls, **more}}


def said(error: BaseException) -> str:
    """An error in one line of at most 500 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]
