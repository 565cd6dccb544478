"""Threads that share the exercises of a class: each takes the next one, whoever's it is, until none is left.

A learner is read when the first of the exercises is begun and forgotten when the last is done, so only as many
submissions are in memory as there are threads, and one more.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from .exercise import Exercise
from .judging import Graded, Handed, Runner, fault, grade_exercise


@dataclass
class Pupil:
    """A learner who is being graded: `submission` is None where it could not even be read, for the reason `error`.

    `num_told` counts the exercises of which the caller of `work` was told.
    """

    learner: str
    submission: Handed | None
    fingerprint: str
    notes: Sequence[str] = ()
    error: Exception | None = None
    graded: dict[str, Graded] = field(default_factory=dict)
    num_told: int = 0


Step = tuple[Pupil, Exercise]


def work(
    pupils: Iterable[Pupil],
    exercises: Sequence[Exercise],
    seed: int,
    jobs: int,
    sandbox: Runner,
    tell: Callable[[Pupil, Exercise], None],
) -> None:
    """Grade all `exercises` of all `pupils` with `jobs` threads, and call ``tell(pupil, exercise)`` after each.

    `tell` is called in the caller's thread, one call at a time; ``pupil.num_told`` says how far the pupil is. What goes
    wrong in grading an exercise becomes its verdict and stops nobody. On ``KeyboardInterrupt`` nothing more is
    begun, what was begun is finished and told, and the exception goes on; so with everything that `tell` raises.
    """
    shared = _Shared(_steps(pupils, exercises))
    done: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
    threads = [
        threading.Thread(target=_work, args=(shared, seed, sandbox, done), name=f"grade-{number}", daemon=True)
        for number in range(jobs)
    ]
    for thread in threads:
        thread.start()
    try:
        _tell_all(done, jobs, tell)
    except BaseException:
        shared.stop.set()
        for thread in threads:
            thread.join()
        _tell_rest(done, tell)
        raise
    for thread in threads:
        thread.join()
    if shared.error is not None:
        raise shared.error


class _Shared:
    """What the threads share: the steps that are left, and whether to stop."""

    def __init__(self, steps: Iterator[Step]) -> None:
        self._steps = steps
        self._lock = threading.Lock()
        self.stop = threading.Event()
        self.error: Exception | None = None

    def next(self) -> Step | None:
        """The next step; None where all are taken, or nothing more shall be begun."""
        with self._lock:
            if self.stop.is_set():
                return None
            try:
                return next(self._steps, None)
            except Exception as error:  # of whoever makes the pupils: told to the caller
                self.error = error
                self.stop.set()
                return None

    def note(self, pupil: Pupil, exercise: Exercise, graded: Graded) -> None:
        """Keep a verdict with its pupil."""
        with self._lock:
            pupil.graded[exercise.id] = graded


def _steps(pupils: Iterable[Pupil], exercises: Sequence[Exercise]) -> Iterator[Step]:
    for pupil in pupils:
        for exercise in exercises:
            yield pupil, exercise


def _work(shared: _Shared, seed: int, sandbox: Runner, done: queue.SimpleQueue[Step | None]) -> None:
    try:
        while (step := shared.next()) is not None:
            pupil, exercise = step
            shared.note(pupil, exercise, _grade(pupil, exercise, seed, sandbox))
            done.put(step)
    finally:
        done.put(None)


def _grade(pupil: Pupil, exercise: Exercise, seed: int, sandbox: Runner) -> Graded:
    try:
        if pupil.submission is None:
            raise pupil.error or RuntimeError("the submission could not be read")
        return grade_exercise(sandbox, exercise, pupil.submission, seed)
    except Exception as error:
        return fault(exercise, error)


def _tell_all(done: queue.SimpleQueue[Step | None], jobs: int, tell: Callable[[Pupil, Exercise], None]) -> None:
    left = jobs
    while left:
        step = done.get()
        if step is None:
            left -= 1
        else:
            _tell(step, tell)


def _tell_rest(done: queue.SimpleQueue[Step | None], tell: Callable[[Pupil, Exercise], None]) -> None:
    while not done.empty():
        step = done.get()
        if step is not None:
            _tell(step, tell)


def _tell(step: Step, tell: Callable[[Pupil, Exercise], None]) -> None:
    pupil, exercise = step
    pupil.num_told += 1
    tell(pupil, exercise)
