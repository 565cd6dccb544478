"""`dtlib grade`: a folder of submissions in, a folder of results out.

The order of things is what makes a grader safe to rely on. Bad input is refused before anything is written. Then a
result of zero is written for everybody; each learner's files replace it as soon as the learner is done, whole or not at
all; the files of the class are made last, from the files of the learners. Whoever is done is skipped by the next run,
so a grader that was killed loses only what it was grading.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import fingerprint, report
from .book import Book, Event, merged, said
from .checks import STEMS, all_exercises
from .exercise import Exercise
from .judging import Graded, Runner, grade_exercise
from .report.folder import Folder, FolderError, file_names, read_json, refuse
from .report.record import RESULTS_SCHEMA, waiting
from .report.results import Class, Fault
from .workers import Pupil, work

if TYPE_CHECKING:
    from .report.record import Standing
    from .submissions import Found
    from .walls.limits import Limits

__all__ = ["ClassResults", "Event", "GradeError", "Graded", "grade", "grade_exercise"]


class GradeError(ValueError):
    """Raised before anything is written: what is wrong with what `grade` was asked to do."""


@dataclass(frozen=True)
class ClassResults:
    """What became of a run: everybody's standing, in order, and what went wrong with the grader itself."""

    out: Path
    group: Class
    interrupted: bool
    removed: tuple[str, ...] = ()

    @property
    def standings(self) -> tuple[Standing, ...]:
        """One standing a learner, sorted by name."""
        return tuple(self.group.standings.values())

    @property
    def faults(self) -> tuple[Fault, ...]:
        """On what the grader itself failed."""
        return tuple(self.group.faults)

    def under(self, percent: float) -> list[Standing]:
        """Learners with less than `percent` of the points."""
        return [each for each in self.standings if each.percent < percent]


def grade(
    submissions: Path,
    out: Path,
    *,
    chapters: Collection[str] = (),
    exercises: Collection[str] = (),
    seed: int | None = None,
    jobs: int | None = None,
    limits: Limits | None = None,
    sandbox: Runner | None = None,
    progress: Callable[[Event], None] | None = None,
    fresh: bool = False,
) -> ClassResults:
    """Grade all that `submissions` holds and write the results to the folder `out`.

    `chapters` (stems) and `exercises` (ids) choose what counts, for everybody alike; without them every chapter counts
    of which anybody handed in a notebook, and all chapters where nobody did. Without `seed` that of the results in
    `out` is used again, or a fresh one drawn. `jobs` threads work at once, by default one a core. `fresh` grades those
    again who are done. `progress` is called in this thread. A `sandbox` that is given is not closed.

    Returns what became of it, also where ``KeyboardInterrupt`` ended it early. Raises `GradeError` for bad input,
    before anything is written, and ``OSError`` where the files of the class cannot be written.
    """
    known = _choose(chapters, exercises)
    jobs = _checked(seed, jobs)
    found = _find(submissions, out)
    run = _Run(out, seed, jobs, limits, sandbox, progress or (lambda event: None), fresh)
    try:
        with Folder(out) as folder:
            return run.grade(folder, submissions, found, known)
    except FolderError as error:
        raise GradeError(str(error)) from error


def _choose(chapters: Collection[str], exercises: Collection[str]) -> list[Exercise]:
    """The exercises that were chosen, in the order of the course; none where nothing was."""
    known = all_exercises()
    for chapter in chapters:
        if chapter not in STEMS:
            raise GradeError(f"there is no chapter {chapter!r}; the chapters: {', '.join(STEMS)}")
    for name in exercises:
        if name not in known:
            raise GradeError(f"there is no exercise {name!r}; the exercises: {', '.join(known)}")
    return [each for name, each in known.items() if name in exercises or name.partition(".")[0] in chapters]


def _checked(seed: int | None, jobs: int | None) -> int:
    if seed is not None and not 0 <= seed < 2**63:
        raise GradeError(f"seed must be from 0 to 2**63 - 1, not {seed!r}")
    if jobs is not None and jobs < 1:
        raise GradeError(f"jobs must be at least 1, not {jobs!r}")
    return jobs or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def _find(submissions: Path, out: Path) -> list[Found]:
    from . import submissions as intake

    if not submissions.exists():
        raise GradeError(f"there are no submissions at {submissions}")
    try:
        refuse(out, submissions)
        found = intake.find(submissions)
    except (OSError, ValueError) as error:
        raise GradeError(str(error)) from error
    if not found:
        raise GradeError(f"{submissions} holds no submission: one sub-folder or one notebook a learner is expected")
    return found


@dataclass
class _Run:
    """One call of `grade`, its input checked."""

    out: Path
    seed: int | None
    jobs: int
    limits: Limits | None
    sandbox: Runner | None
    progress: Callable[[Event], None]
    fresh: bool
    started: float = field(default_factory=time.monotonic)

    def grade(self, folder: Folder, submissions: Path, found: Sequence[Found], chosen: list[Exercise]) -> ClassResults:
        from .walls.limits import Limits

        limits = self.limits or Limits()
        seed = self._seed(folder)
        digests, stems = self._read_all(found)
        exercises = chosen or [
            each for each in all_exercises().values() if not stems or each.id.partition(".")[0] in stems
        ]
        names = file_names([each.learner for each in found])
        group = Class(
            seed=seed,
            exercises=[{"id": each.id, "title": each.title, "points": each.points} for each in exercises],
            grader={"version": fingerprint.version(), "fingerprint": fingerprint.of_grader()},
            limits=asdict(limits),
            standings={each.learner: waiting(each.learner, names[each.learner], exercises) for each in found},
        )
        book = Book(folder, group, exercises, self.progress)
        ids = [each.id for each in exercises]

        def mark(learner: str, digest: str) -> str:
            return fingerprint.of_learner(learner, digest, seed, ids, group.limits)

        removed = report.remove_others(folder, set(names.values()))
        left = [
            each
            for each in found
            if self.fresh or not book.keep(each.learner, mark(each.learner, digests[each.learner]))
        ]
        report.write_results(folder, group)
        for each in left:
            report.write_waiting(folder, names[each.learner], each.learner, exercises)
        interrupted = False
        try:
            if left:
                self._grade_all(book, _pupils(left, mark), limits, [submissions, self.out])
        except KeyboardInterrupt:
            interrupted = True
        group.state = "interrupted" if interrupted else "complete"
        group.faults.sort(key=lambda each: (each.learner, each.exercise))  # not as threads happened to come upon them
        group.measured = self._measured(group)
        report.write_class(folder, group, exercises)
        report.write_results(folder, group)
        return ClassResults(self.out, group, interrupted, tuple(removed))

    def _seed(self, folder: Folder) -> int:
        if self.seed is not None:
            return self.seed
        before = read_json(folder.path / "results.json") or {}
        recorded = before.get("seed") if before.get("schema") == RESULTS_SCHEMA else None
        return recorded if isinstance(recorded, int) and recorded >= 0 else secrets.randbelow(2**31)

    def _read_all(self, found: Sequence[Found]) -> tuple[dict[str, str], set[str]]:
        """Read every submission once: the digest of each ("" where that failed), and the chapters that came in."""
        from . import submissions as intake

        digests: dict[str, str] = {}
        stems: set[str] = set()
        for number, each in enumerate(found, start=1):
            try:
                submission = intake.read(each)
                digests[each.learner] = submission.digest
                stems.update(notebook.stem for notebook in submission.notebooks if notebook.stem in STEMS)
            except Exception:  # a fault of ours, which is told when the learner's turn comes
                digests[each.learner] = ""
            self.progress(Event("read", number, len(found), each.learner))
        return digests, stems

    def _grade_all(self, book: Book, pupils: Iterator[Pupil], limits: Limits, hidden: Sequence[Path]) -> None:
        own = None
        try:
            if self.sandbox is None:
                from .sandbox import Sandbox

                own = Sandbox(limits, hidden=hidden)
            sandbox = self.sandbox or own
            assert sandbox is not None
        except Exception as error:
            book.group.faults.append(Fault("", "", f"the sandbox could not be started: {said(error)}"))
            return
        try:
            book.group.walls = merged(book.group.walls, sandbox.walls)
            book.walls = dict(sandbox.walls)
            self.progress(Event("begin", book.num_done, len(book.group.standings), num_exercises=len(book.exercises)))
            work(pupils, book.exercises, book.group.seed, self.jobs, sandbox, book.tell)
        finally:
            if own is not None:
                own.close()

    def _measured(self, group: Class) -> dict[str, Any]:
        from .walls.limits import resident_bytes

        return {
            "time": f"{datetime.now(UTC):%Y-%m-%dT%H:%MZ}",
            "seconds": round(time.monotonic() - self.started, 3),
            "jobs": self.jobs,
            "kept": group.kept,
            "peak_grader_bytes": resident_bytes()[1],
        }


def _pupils(left: Sequence[Found], mark: Callable[[str, str], str]) -> Iterator[Pupil]:
    """Each learner who is to be graded, read when the turn comes."""
    from . import submissions as intake

    for each in left:
        try:
            submission = intake.read(each)
            notes = list(dict.fromkeys((*each.notes, *submission.notes)))
            yield Pupil(each.learner, submission, mark(each.learner, submission.digest), notes)
        except Exception as error:
            yield Pupil(each.learner, None, mark(each.learner, ""), each.notes, error)
