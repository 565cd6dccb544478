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
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from dtlib.grading.exercises import catalogue
from dtlib.grading.exercises.exercise import Exercise
from dtlib.grading.sandbox import runner as walled
from dtlib.grading.sandbox.runner import Sandbox
from dtlib.grading.sandbox.walls.limits import Limits

from . import intake, shards
from .intake import Submission
from .judging import grade_exercise, said
from .report.folder import Folder, refuse
from .report.record import Record
from .roster import Event, Progress, Roster
from .seals import Key
from .shards import Shard

_SEEDS = 2**53  # too many to be tried until one has a digest that was told, and few enough for a number of JSON


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
    since: Path | None = None,
    regrade: Collection[str] = (),
) -> Record:
    """Grade all that `submissions` holds and write the results to the folder `out`.

    `chapters` (stems) and `exercises` (ids) choose what counts, for everybody alike; without them every chapter counts
    of which anybody handed in a notebook, and all chapters where nobody did. With `one_learner` all of `submissions` is
    of one learner. Without `seed` each call draws a fresh one for those whom it grades: who hands in again meets other
    cases, and who is done keeps the verdict on theirs. `jobs` threads work at once, by default one a core. `fresh`
    grades those again who are done. `progress` may be called in any thread. A `sandbox` that is given is not closed.
    A `shard` is the share of this machine: the results are those of a part, for `shards.join`. Who has not changed
    since a class was graded into the folder `since`, by any machine, keeps that verdict; there may be no such folder.
    The exercises `regrade` (ids) are graded again for whoever has not changed since, on the cases of the earlier run;
    all else of that run is kept, even where another version graded it.

    Returns the content of ``results.json``, also where ``KeyboardInterrupt`` ended it early. Raises `GradeError` for
    bad input, before anything is written, and ``OSError`` where the files of the class cannot be written.
    """
    started = time.monotonic()
    chosen = _chosen(chapters, exercises)
    if seed is not None and not 0 <= seed < 2**63:
        raise GradeError(f"seed must be from 0 to 2**63 - 1, not {seed!r}")
    if shard and seed is None:
        raise GradeError("a shard needs a seed, the same for all of them: without it they would not make one class")
    if regrade and (fresh or shard):
        raise GradeError(
            "regrade keeps what an earlier run has of a whole class: it goes with no shard, and not with fresh"
        )
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
        if other := [each for each in regrade if each not in {one.id for one in counted}]:
            told = ", ".join(each.id for each in counted)
            raise GradeError(f"regrade must name exercises that count ({told}), not {other[0]!r}")
        drawn = secrets.randbelow(_SEEDS) if seed is None else seed
        roster = Roster(
            folder, counted, found, drawn, limits or Limits(), progress, shard, None if fresh else since, regrade
        )
        left = [each for each in found if each.learner in roster.share and (fresh or not roster.keep(each, seed))]
        if regrade and not roster.again:
            told = f"graded these notebooks for the same exercises and limits{' with this seed' * (seed is not None)}"
            raise GradeError(f"regrade must find an earlier run to keep, and none in {since or out} {told}")
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


def _grade(roster: Roster, left: list[Submission], jobs: int, sandbox: Sandbox | None, hidden: list[Path]) -> None:
    ready = sandbox
    with ExitStack() as stack:
        try:
            if ready is None and any(each.is_run(one.id) for each, one in roster.steps(left)):
                ready = stack.enter_context(walled.Sandbox(roster.limits, hidden=hidden))
        except Exception as error:
            roster.fail("", "", f"the sandbox could not be started: {said(error)}")
            return
        if ready is not None:
            roster.behind(ready.walls)

        def do(submission: Submission, exercise: Exercise) -> Record:
            words = f"{exercise.id} of {submission.learner[:24]}"
            return grade_exercise(
                ready,
                exercise,
                submission,
                roster.seed_of(submission.learner),
                lambda _, on: roster.say(f"{words}, {on}"),
            )

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
