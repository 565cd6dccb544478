"""What takes long: wrong programs on fifty seeds, and right ones on a machine that is busy. `make soak` runs it.

What is refused for its memory is tried on ten. Each test adds a line to a table in ``_build/soak``.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dtlib.grading.exercises import bank
from dtlib.grading.exercises.bank import Program
from dtlib.grading.exercises.catalogue import STEMS, all_exercises
from dtlib.grading.exercises.exercise import Exercise
from dtlib.grading.sandbox.runner import Outcome, Sandbox

from . import forgers
from .answers import (
    ROOT,
    SEED,
    Tried,
    answer,
    drawn,
    is_of_memory,
    namespace,
    open_sandbox,
    programs,
    run_jobs,
    try_all,
)
from .test_arguments import is_refused

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

SEEDS = range(1000, 1050)
WEIGHED_SEEDS = SEEDS[:10]  # what is weighed has nearly the same size with every seed, and takes a start of its own
BUSY = 16
AGAIN = 5  # times
WITHOUT_END = "every plan tried"  # 2^l of them: a limit refuses that
EXERCISES = list(all_exercises())
Try = tuple[Program, int]  # on the cases of a seed


def note(table: str, *cells: object) -> None:
    path = ROOT / "_build" / "soak" / f"{table}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(f"| {' | '.join(map(str, cells))} |\n")


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with open_sandbox() as one:
        yield one


@pytest.mark.parametrize("name", EXERCISES)
def test_every_program_is_as_the_bank_says_on_all_cases(name: str, sandbox: Sandbox):
    tried = [Tried(all_exercises()[name], program, SEED) for program in programs(name)]
    assert not [each.complaint() for each in try_all(sandbox, tried)]


@pytest.mark.parametrize("name", EXERCISES)
def test_no_forger_earns_more_than_its_work(name: str, sandbox: Sandbox, tmp_path: Path):
    forgers.refuse(sandbox, all_exercises()[name], tmp_path)


@pytest.mark.parametrize("name", EXERCISES)
def test_every_wrong_program_is_refused_for_every_seed(name: str, sandbox: Sandbox):
    exercise = all_exercises()[name]
    wrong = [program for program in programs(name) if program.check]
    checks = {check.name: check for check in exercise.checks}
    runs = {each for each in wrong if checks[each.check].is_told or each.mistake == WITHOUT_END}
    called = [each for each in wrong if bank.is_on_paper(exercise) and each not in runs]
    accepted = [(each, seed) for each in called for seed in SEEDS
                if not is_refused(exercise, function(name, each), drawn(name, seed), checks[each.check])]  # fmt: skip
    started = [program for program in wrong if program not in called]
    places = {}  # of the case that refused a program: for other seeds it comes first
    accepted += refused_by(sandbox, exercise, [(program, SEEDS[0]) for program in started], places)
    seeds = {program: WEIGHED_SEEDS if is_of_memory(exercise, program) else SEEDS for program in started}
    rest = [(program, seed) for program in started for seed in seeds[program][1:]]
    accepted += refused_by(sandbox, exercise, rest, places)
    tries = len(called) * len(SEEDS) + len(started) + len(rest)
    note("grading/seeds", name, len(wrong), tries, tries - len(accepted))
    assert not accepted, Counter(f"{program.check}: {program.mistake}" for program, _ in accepted)


@cache
def function(exercise: str, program: Program) -> Callable[..., Any]:
    """A program's function; what is on paper is called here, a hundred times as fast as in a sandbox."""
    sources = [text for _, text in answer(exercise, program.source).cells]
    found: Callable[..., Any] = namespace(*sources)[all_exercises()[exercise].function]
    return found


def refused_by(sandbox: Sandbox, exercise: Exercise, tries: Sequence[Try], places: dict[Program, int]) -> list[Try]:
    """The tries that no case refuses. Cases run until one does, all tries side by side; who is left at the end runs
    all of them in the same processes, as the grader does: what a program remembers from case to case is wrong there.

    What is not known of a case, because the machine was busy, is no verdict: it is tried again, as the grader does.
    """
    checks = {check.name: check for check in exercise.checks}
    answers = {program: answer(exercise.id, program.source) for program, _ in tries}
    left: dict[Try, list[int]] = {}
    unknown = Counter[Try]()
    for program, seed in tries:
        looked_at = [n for n, case in enumerate(drawn(exercise.id, seed)) if checks[program.check].applies(case)]
        left[program, seed] = [each for each in looked_at if each == places.get(program)]
        left[program, seed] += [each for each in looked_at if each != places.get(program)]
    while going := [each for each in left if left[each]]:
        now = [(each, left[each].pop(0)) for each in going]
        jobs = [(exercise, answers[program], drawn(exercise.id, seed)[place]) for (program, seed), place in now]
        for (each, place), observed in zip(now, run_jobs(sandbox, jobs), strict=True):
            program, _ = each
            verdict = checks[program.check].judge([observed]).verdict
            if verdict == "not known" and unknown[each] < AGAIN:
                unknown[each] += 1
                left[each].insert(0, place)
            elif verdict == "fail":
                places.setdefault(program, place)
                del left[each]
    return [each for each in left if not refused_whole(sandbox, exercise, *each)]


def refused_whole(sandbox: Sandbox, exercise: Exercise, program: Program, seed: int) -> bool:
    observed = sandbox.run(exercise, answer(exercise.id, program.source), drawn(exercise.id, seed)).observed
    return (program.check, "fail") in {(each.name, each.verdict) for each in exercise.judge(observed).checks}


@pytest.fixture(scope="module")
def load() -> Iterator[None]:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BUSY)]
    yield
    assert all(each.poll() is None for each in busy), "the machine was not as busy as it should have been"
    for each in busy:
        each.kill()
        each.wait()


@pytest.fixture(scope="module")
def walled(load: None) -> Iterator[Sandbox]:
    with Sandbox() as one:
        yield one


class TestBusyMachine:
    """All exercises of a chapter side by side: they wait for each other, as in a class, and for who does nothing."""

    @pytest.mark.parametrize("stem", STEMS)
    def test_the_references_earn_all_points(self, stem: str, walled: Sandbox, subtests: pytest.Subtests):
        names = [name for name in EXERCISES if name.startswith(f"{stem}.")]

        def run(name: str) -> Outcome:
            exercise = all_exercises()[name]
            return walled.run(exercise, answer(name, programs(name)[0].source), exercise.cases(SEED))

        with ThreadPoolExecutor(len(names)) as pool:
            outcomes = list(pool.map(run, names))
        for name, outcome in zip(names, outcomes, strict=True):
            exercise = all_exercises()[name]
            result = exercise.judge(outcome.observed)
            note("busy/load", name, f"{result.points} of {exercise.points}", round(outcome.seconds),
                 round(outcome.cpu_seconds, 1), round(outcome.starved_seconds, 1))  # fmt: skip
            with subtests.test(name):
                assert result.points == exercise.points, str(result)
