"""`dtlib grade`: a folder of submissions in, a folder of results out.

The order of things is what makes a grader safe to rely on. Bad input is refused before anything is written. Then a
result of zero is written for everybody; each learner's files replace it as soon as the learner is done, whole or not at
all; the files of the class are made last, from the files of the learners. Whoever is done is skipped by the next run,
so a grader that was killed loses only what it was grading.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from dtlib.grading.exercises import catalogue
from dtlib.grading.exercises.exercise import Exercise
from dtlib.grading.sandbox import runner as walled
from dtlib.grading.sandbox.runner import Sandbox
from dtlib.grading.sandbox.walls.limits import Limits

from . import fingerprint, intake, report, shards
from .intake import Submission
from .intake.names import file_name
from .judging import grade_exercise, said
from .report.exports import gradescope_results
from .report.folder import GRADESCOPE, LEARNERS, Folder, refuse
from .report.record import (
    LEARNER_SCHEMA,
    Record,
    class_record,
    entry_of,
    learner_record,
    standing,
    told,
)
from .seals import Key
from .shards import Shard

_ALIKE = "the two names differ in case or form alone, and count as two learners"
_SEEDS = 2**53  # too many to be tried until one has a digest that was told, and few enough for a number of JSON
_REFRESHES = 50  # how often results.json is written while a class is graded


class Event(NamedTuple):
    """How far the grader is: `done` of `total` steps, in `words`; `is_line` where these are worth a line of their own.

    `learner` is who is done, "" where nobody is.
    """

    words: str
    done: int = 0
    total: int | None = None
    is_line: bool = False
    learner: str = ""


Progress = Callable[[Event], None]


class GradeError(ValueError):
    """Raised before anything is written: what is wrong with what `grade` was asked to do."""


def grade(
    submissions: Path,
    out: Path,
    *,
    chapters: Collection[str] = (),
    exercises: Collection[str] = (),
    one_learner: bool = False,
    seed: int | None = None,
    jobs: int | None = None,
    limits: Limits | None = None,
    sandbox: Sandbox | None = None,
    progress: Progress = lambda event: None,
    fresh: bool = False,
    shard: Shard | None = None,
) -> Record:
    """Grade all that `submissions` holds and write the results to the folder `out`.

    `chapters` (stems) and `exercises` (ids) choose what counts, for everybody alike; without them every chapter counts
    of which anybody handed in a notebook, and all chapters where nobody did. With `one_learner` all of `submissions` is
    of one learner. Without `seed` each call draws a fresh one for those whom it grades: who hands in again meets other
    cases, and who is done keeps the verdict on theirs. `jobs` threads work at once, by default one a core. `fresh`
    grades those again who are done. `progress` may be called in any thread. A `sandbox` that is given is not closed.
    A `shard` is the share of this machine: the results are those of a part, for `shards.join`.

    Returns the content of ``results.json``, also where ``KeyboardInterrupt`` ended it early. Raises `GradeError` for
    bad input, before anything is written, and ``OSError`` where the files of the class cannot be written.
    """
    started = time.monotonic()
    chosen = _chosen(chapters, exercises)
    if seed is not None and not 0 <= seed < 2**63:
        raise GradeError(f"seed must be from 0 to 2**63 - 1, not {seed!r}")
    if shard and seed is None:
        raise GradeError("a shard needs a seed, the same for all of them: without it they would not make one class")
    if jobs is not None and jobs < 1:
        raise GradeError(f"jobs must be at least 1, not {jobs!r}")
    jobs = jobs or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    found = _found(submissions, out, one_learner)
    if (held := shards.held(out)) is not None and held != (asked := str(shard or "")):
        holds, wanted = (f"shard {each}" if each else "a whole class" for each in (held, asked))
        raise GradeError(f"out holds {holds}, and not {wanted}, in {out}: choose another folder")
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(Folder(out, Key(apart_from=(submissions, out))))
        except ValueError as error:
            raise GradeError(str(error)) from error
        _read(found, stack.enter_context(tempfile.TemporaryFile()), progress)
        stems = set().union(*(each.stems for each in found))
        known = catalogue.all_exercises().values()
        counted = chosen or [each for each in known if not stems or each.id.partition(".")[0] in stems]
        drawn = secrets.randbelow(_SEEDS) if seed is None else seed
        roster = _Roster(folder, counted, found, drawn, limits or Limits(), progress, shard)
        left = [each for each in found if each.learner in roster.share and (fresh or not roster.keep(each, seed))]
        roster.begin(left)
        try:
            if left:
                _grade(roster, left, jobs, sandbox, [submissions, out, folder.key.folder])
            roster.group["state"] = "complete"
        except KeyboardInterrupt:
            roster.group["state"] = "interrupted"
        roster.end(jobs, time.monotonic() - started)
    return roster.group


def _chosen(chapters: Collection[str], exercises: Collection[str]) -> list[Exercise]:
    """The exercises that were chosen, in the order of the course; none where nothing was."""
    known = catalogue.all_exercises()
    for what, wanted, all_names in (("chapter", chapters, catalogue.STEMS), ("exercise", exercises, known)):
        for name in wanted:
            if name not in all_names:
                raise GradeError(f"there is no {what} {name!r}; the {what}s: {', '.join(all_names)}")
    return [each for name, each in known.items() if name in exercises or name.partition(".")[0] in chapters]


def _found(submissions: Path, out: Path, one_learner: bool) -> list[Submission]:
    if not submissions.exists():
        raise GradeError(f"there are no submissions at {submissions}")
    try:
        refuse(out, submissions)
        found = intake.find(submissions, one_learner=one_learner)
    except (OSError, ValueError) as error:
        raise GradeError(str(error)) from error
    if not found:
        raise GradeError(f"{submissions} holds no submission: one sub-folder or one notebook a learner is expected")
    return found


def _read(found: Sequence[Submission], spool: BinaryIO, progress: Progress) -> None:
    """Read everybody, once. Where that fails it is a fault of ours, which is told when the learner's turn comes."""
    for number, each in enumerate(found, start=1):
        try:
            each.read(spool)
        except Exception as error:
            each.fault = error
        progress(Event(f"reading {each.learner[:24]}", number, len(found)))


def _grade(roster: _Roster, left: list[Submission], jobs: int, sandbox: Sandbox | None, hidden: list[Path]) -> None:
    with ExitStack() as stack:
        try:
            ready = sandbox or stack.enter_context(walled.Sandbox(roster.limits, hidden=hidden))
        except Exception as error:
            roster.fail("", "", f"the sandbox could not be started: {said(error)}")
            return
        roster.behind(ready.walls)

        def do(submission: Submission, exercise: Exercise) -> Record:
            words = f"{exercise.id} of {submission.learner[:24]}"
            return grade_exercise(ready, exercise, submission, roster.seed, lambda _, on: roster.say(f"{words}, {on}"))

        with ThreadPoolExecutor(jobs) as pool:
            steps = {pool.submit(do, *step): step for step in roster.steps(left)}
            try:
                for future in as_completed(steps):
                    roster.tell(*steps.pop(future), future.result())
            except BaseException:  # what was begun is finished and told
                pool.shutdown(cancel_futures=True)
                for future, step in steps.items():
                    if not future.cancelled():
                        roster.tell(*step, future.result())
                raise


class _Roster:
    """Keeps the standings of the class, and writes the files of each learner who is done."""

    def __init__(
        self,
        folder: Folder,
        exercises: Sequence[Exercise],
        found: Sequence[Submission],
        seed: int,
        limits: Limits,
        progress: Progress,
        shard: Shard | None,
    ) -> None:
        self.folder, self.exercises, self.seed, self.limits, self.progress = folder, exercises, seed, limits, progress
        self._blank = learner_record("", [entry_of(each) for each in exercises])
        everything = {each.learner: list(exercises) for each in found}
        self.share = shards.deal(found, exercises, shard) if shard else everything
        blank = {each["id"]: each for each in self._blank["exercises"]}
        self._standings = {
            name: standing({**learner_record("", [blank[each.id] for each in mine]), "learner": name}, file_name(name))
            for name, mine in self.share.items()
        }
        grader = {"version": fingerprint.version(), "fingerprint": fingerprint.of_grader()}
        self.group = class_record(seed, exercises, list(self._standings.values()), asdict(limits), grader)
        if shard:
            mark = fingerprint.of_learner(shard.of, [self._fingerprint(each, seed) for each in found])
            self.group["shard"] = {**shard._asdict(), "class": mark}
        self.group["alike"] = sorted({tuple(each.alike) for each in found if each.alike})
        folder.remove_others({each["file"] for each in self._standings.values()})
        self._walls: Mapping[str, str] = {}
        self._graded: dict[str, dict[str, Record]] = {}
        self._done = self._num_steps = self._unsaved = 0

    def keep(self, submission: Submission, seed: int | None) -> bool:
        """Whether the record of an earlier run holds the learner's verdict; then it is taken as it is.

        It has to be one of this machine's, of these very inputs, free of faults and open questions, and of `seed`,
        unless that is None.
        """
        path = self.folder.of(LEARNERS, self._standings[submission.learner]["file"])
        record = self.folder.read_sealed(path, LEARNER_SCHEMA)
        if record is None or record["status"] != "graded":
            return False
        if record["fingerprint"] != self._fingerprint(submission, record["seed"] if seed is None else seed):
            return False
        if [each["id"] for each in record["exercises"]] != [each.id for each in self.share[submission.learner]]:
            return False
        self._stand(record["walls"])
        self._enter(submission.learner, record)
        self.group["measured"]["kept"] += 1
        return True

    def begin(self, left: Sequence[Submission]) -> None:
        """Write a zero for everybody who is `left`: whatever happens later, there is a result."""
        self._num_steps = len(self.steps(left))
        if not left and self.group["learners"]:
            self.group["seed"] = self.group["learners"][0]["seed"]
        report.write_results(self.folder, self.group)
        zero = gradescope_results(self._blank)
        for each in () if "shard" in self.group else left:
            self.folder.write_json(self.folder.of(GRADESCOPE, self._standings[each.learner]["file"]), zero)
        if left and (kept := self.group["measured"]["kept"]):
            self.say(f"{kept} of {len(self._standings)} learners are kept from an earlier run", is_line=True)

    def steps(self, left: Sequence[Submission]) -> list[tuple[Submission, Exercise]]:
        """What there is to grade of those who are `left`."""
        return [(each, one) for each in left for one in self.share[each.learner]]

    def behind(self, walls: Mapping[str, str]) -> None:
        """Take note of the walls behind which everybody who is left is graded."""
        self._walls = dict(walls)
        self._stand(walls)
        if walls.get("files", "it is not there"):
            self.folder.key.throw_away("a submission could have read the key, since there was no wall around the files")

    def tell(self, submission: Submission, exercise: Exercise, entry: Record) -> None:
        """Take note of an exercise that is graded; the last one of a learner makes the learner's files."""
        mine = self._graded.setdefault(submission.learner, {})
        mine[exercise.id] = entry
        self._done += 1
        if entry["status"] == "error":
            self.fail(submission.learner, exercise.id, entry["reason"])
        if len(mine) == len(self.share[submission.learner]):
            self._finish(submission, self._graded.pop(submission.learner))

    def end(self, jobs: int, seconds: float) -> None:
        """Write the files of the class."""
        if self._walls.get("files"):  # a submission may have laid a key of its own
            self.folder.key.throw_away("")
        self.group["faults"].sort(key=lambda each: list(each.values()))  # not as threads came upon them
        self.group["not_kept"] = self.folder.key.why_not
        now = f"{datetime.now(UTC):%Y-%m-%dT%H:%MZ}"
        self.group["measured"] |= {"time": now, "seconds": round(seconds, 3), "jobs": jobs}
        write = report.write_share if "shard" in self.group else report.write_class
        write(self.folder, self.group, self.exercises)

    def say(self, words: str, **more: Any) -> None:
        """Tell how far the grader is."""
        self.progress(Event(words, self._done, self._num_steps, **more))

    def fail(self, learner: str, exercise: str, text: str) -> None:
        """Take note of a fault of the grader's."""
        self.group["faults"].append(told(learner, exercise, text))

    def _finish(self, submission: Submission, graded: Mapping[str, Record]) -> None:
        mine = self._standings[name := submission.learner]
        others = [each for each in submission.alike[:3] if each != name]
        alike = [f"there is also a learner {each}: {_ALIKE}" for each in others]
        try:
            entries, mark = [graded[each.id] for each in self.share[name]], self._fingerprint(submission, self.seed)
            more = {"fingerprint": mark, "seed": self.seed, "walls": dict(self._walls)}
            self._enter(name, learner_record(name, entries, [*alike, *submission.notes], **more))
        except Exception as error:
            mine["status"] = "error"
            self.fail(name, "", f"could not be recorded: {said(error)}")
        self._unsaved += 1
        if self._unsaved * _REFRESHES >= len(self._standings):
            self._unsaved = 0
            report.write_results(self.folder, self.group)
        points = f"{mine['points']} of {mine['max_points']} points"
        odd = {"error": "the grader failed", "not known": f"{points}, and not everything is known"}
        self.say(f"{name}: {odd.get(mine['status'], points)}", is_line=True, learner=name)

    def _enter(self, learner: str, record: Record) -> None:
        mine = self._standings[learner]
        if "shard" in self.group:
            self.folder.write_sealed(self.folder.of(LEARNERS, mine["file"]), record)
        else:
            report.write_learner(self.folder, mine["file"], record)
        mine |= standing(record, mine["file"])

    def _fingerprint(self, submission: Submission, seed: int) -> str:
        names = [submission.learner, *submission.alike]
        exercises = [each.id for each in self.exercises]
        return fingerprint.of_learner(names, submission.digest, seed, exercises, asdict(self.limits))

    def _stand(self, walls: Mapping[str, str]) -> None:
        """A wall stood for the class if it stood for everybody."""
        before = self.group["walls"]
        self.group["walls"] = {name: before.get(name) or why_not for name, why_not in walls.items()}
