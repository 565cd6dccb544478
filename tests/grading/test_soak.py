"""What takes long: wrong programs on fifty seeds, and right ones on a machine that is busy. `make soak` runs it.

Each test adds a line to a table in ``_build/soak``.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import pytest

from dtlib.grading.checks import all_exercises
from dtlib.grading.sandbox import Sandbox

from .answers import ROOT, SEED, Tried, answer, is_of_memory, open_sandbox, programs, try_all

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

SEEDS = range(1000, 1050)
WEIGHED_SEEDS = range(1000, 1003)  # each takes seconds, in processes of its own
BUSY = 16
EXERCISES = list(all_exercises())


def note(table: str, *cells: object) -> None:
    folder = ROOT / "_build" / "soak"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{table}.md").open("a", encoding="utf-8") as file:
        file.write(f"| {' | '.join(map(str, cells))} |\n")


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with open_sandbox() as one:
        yield one


@pytest.mark.parametrize("name", EXERCISES)
def test_every_right_program_earns_all_points_where_it_is_weighed_too(name: str, sandbox: Sandbox):
    exercise = all_exercises()[name]
    if any(case.get("weighed") for case in exercise.cases(SEED)):
        right = [Tried(exercise, program, SEED) for program in programs(name) if not program.check]
        assert not [each.complaint() for each in try_all(sandbox, right)]


@pytest.mark.parametrize("name", EXERCISES)
def test_every_wrong_program_is_refused_for_every_seed(name: str, sandbox: Sandbox):
    exercise = all_exercises()[name]
    wrong = [program for program in programs(name) if program.check]
    tries, named, accepted = 0, 0, Counter[str]()
    for program in wrong:
        weighs = is_of_memory(exercise, program)
        tried = [Tried(exercise, program, seed, weighs) for seed in (WEIGHED_SEEDS if weighs else SEEDS)]
        try_all(sandbox, tried, again=False)
        verdicts = [{check.name: check for check in each.result.checks}[program.check] for each in tried]
        tries += len(tried)
        named += sum(each.mistake == program.mistake for each in verdicts)
        if passed := sum(each.verdict != "fail" for each in verdicts):
            accepted[f"{program.check}: {program.mistake}"] = passed
    note("seeds", name, len(wrong), tries, tries - accepted.total(), named)
    assert not accepted


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
    @pytest.mark.parametrize("name", EXERCISES)
    def test_the_reference_earns_all_points(self, name: str, walled: Sandbox):
        exercise = all_exercises()[name]
        outcome = walled.run(exercise, answer(name, programs(name)[0].source), exercise.cases(SEED))
        result = exercise.judge(outcome.observed)
        note("load", name, f"{result.points} of {exercise.points}", round(outcome.seconds),
             round(outcome.cpu_seconds, 1), round(outcome.starved_seconds, 1))  # fmt: skip
        assert result.points == exercise.points, str(result)
