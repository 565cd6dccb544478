"""Runs programs of the banks: many of them in one start of ranks, and each of them once."""

from __future__ import annotations

import ast
import json
import linecache
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from dtlib.grading.exercises import bank
from dtlib.grading.exercises.bank import Program
from dtlib.grading.exercises.catalogue import all_exercises, bare
from dtlib.grading.exercises.exercise import Exercise
from dtlib.grading.exercises.result import Result
from dtlib.grading.exercises.seen import Case, Observed, Trouble
from dtlib.grading.sandbox.reports import read_start
from dtlib.grading.sandbox.runner import Answer, Cell, Job, Sandbox, task_of
from dtlib.grading.sandbox.walls import WALLS
from dtlib.grading.sandbox.walls.limits import Limits

ROOT = Path(__file__).parents[2]
SEED = 20261
# Of each chapter the last exercise on paper and the last on ranks; `make soak` takes all.
FEW = tuple({(name.partition(".")[0], bank.is_on_paper(each)): name for name, each in all_exercises().items()}.values())
_IN_A_START = 40  # jobs
_AT_ONCE = 2  # starts
_FEW = (1, 2, 4, 8, 16, sys.maxsize)  # cases: one names most mistakes, few need many
T = TypeVar("T")


@cache
def cells(stem: str, folder: str = "solutions") -> dict[str, str]:
    """The code cells of a notebook by id."""
    notebook = json.loads((ROOT / folder / f"{stem}.ipynb").read_text(encoding="utf-8"))
    return {cell["id"]: "".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"}


def namespace(*sources: str) -> dict[str, Any]:
    """What a notebook holds after it ran `sources`, one cell each."""
    space: dict[str, Any] = {"__name__": "__main__"}
    for source in sources:
        name = f"<cell {abs(hash(source))}>"  # a file of its own for each cell, as in a notebook
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        exec(compile(source, name, "exec"), space)
    return space


def reference_namespace(stem: str) -> dict[str, Any]:
    """What a notebook with all the right answers holds."""
    return namespace(*(source for name, source in cells(stem).items() if not name.endswith("-check")))


@cache
def programs(exercise: str) -> tuple[Program, ...]:
    """The reference, the programs of the exercise's bank, and one that calls the library, where the bank has none."""
    cell = cells(exercise.partition(".")[0])[exercise.replace(".", "-")]
    own = of_the_bank(exercise)
    calls = () if any(each.mistake == "library called" for each in own) else (library_called(exercise, cell),)
    return (Program("", "", cell), *own, *calls)


@cache
def of_the_bank(exercise: str) -> tuple[Program, ...]:
    """Every program of the exercise's bank."""
    cell = cells(exercise.partition(".")[0])[exercise.replace(".", "-")]
    return tuple(bank.read(bare()[exercise][0].with_suffix(".md")).programs(bank.reference(cell)))


def library_called(exercise: str, source: str) -> Program:
    """The answer `source`, whose function calls a function of the library before all else."""
    lines = bank.reference(source).splitlines(keepends=True)
    tree, function = ast.parse("".join(lines)), all_exercises()[exercise].function
    first = next(node.body[0] for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function)
    calls = ("from dtlib import theory", "theory.collectives.ring_all_reduce_bytes(8.0, 2)")
    lines[first.lineno - 1 : first.lineno - 1] = [f"{' ' * first.col_offset}{each}\n" for each in calls]
    return Program("own work", "library called", "".join(lines))


def answer(exercise: str, source: str, folder: str = "solutions") -> Answer:
    """A notebook in which the exercise's cell has `source`, and the others are as in `folder`."""
    stem, own = exercise.partition(".")[0], exercise.replace(".", "-")
    others = [Cell(name, text) for name, text in cells(stem, folder).items() if not name.endswith("-check")]
    return Answer([Cell(each.id, source) if each.id == own else each for each in others])


def open_sandbox(**limits: Any) -> Sandbox:
    """Processes with a network of their own and no other wall, for answers that the tests themselves brought."""
    return Sandbox(Limits(patience_seconds=0.4, cpu_seconds=2.0, **limits), without=set(WALLS) - {"network"})


@cache
def drawn(exercise: str, seed: int) -> list[Case]:
    """The cases of a seed, the same ones for every program: theories remember cases that they know."""
    return all_exercises()[exercise].cases(seed)


@dataclass
class Tried:
    """A program on its way: the cases that it is tried on, and what was observed of those that are done."""

    exercise: Exercise
    program: Program
    seed: int = SEED
    weighs: bool = True  # whether the cases that are weighed are tried as well, each in processes of its own
    few: int = 0  # so many cases are enough, of those that its check looks at (0: all cases)
    done: dict[int, Observed] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.answer = answer(self.exercise.id, self.program.source)
        cases = drawn(self.exercise.id, self.seed)
        self.cases: list[Case] = [case for case in cases if self.weighs or not case.get("weighed")]

    @property
    def left(self) -> Iterable[int]:
        """The cases that are not done; after two that hung, the others are skipped as the grader skips them."""
        if self.few:
            check = next(each for each in self.exercise.checks if each.name == self.program.check)
            looked_at = [index for index, case in enumerate(self.cases) if check.applies(case)]
            return [index for index in looked_at[: self.few] if index not in self.done]
        hung = [each for each in self.done.values() if each.trouble and each.trouble.kind == "hung"]
        if len(hung) >= 2 and "world_size" in self.cases[0]:
            skipped = Trouble("skipped", "not run, because earlier cases hung")
            for index in set(range(len(self.cases))) - self.done.keys():
                self.done[index] = Observed(self.cases[index], trouble=skipped)
        return [index for index in range(len(self.cases)) if index not in self.done]

    @property
    def result(self) -> Result:
        """The verdict."""
        return self.exercise.judge([self.done[index] for index in sorted(self.done)])

    def complaint(self) -> str:
        """What is not as the bank says; "" where everything is."""
        result = self.result
        told = {each.name: each for each in result.checks}
        if not self.program.check:
            return (
                "" if all(each.verdict in ("pass", "not looked at") for each in result.checks) else f"right: {result}"
            )
        check = told[self.program.check]
        if check.verdict != "fail":
            return f"{self.program.check} says {check.verdict} to {self.program.mistake!r}: {result}"
        return "" if check.mistake == self.program.mistake else (
            f"{self.program.mistake!r} was taken for {check.mistake!r}: {result}"
        )  # fmt: skip


def try_all(sandbox: Sandbox, tried: Sequence[Tried]) -> list[Tried]:
    """Run all of them, many in one start; those of whom there is a complaint.

    Who is complained of after a case is tried on more, in the end on all that its check looks at; and who still is, on
    all, alone in its processes.
    """
    complained_of = list(tried)
    for few in _FEW:
        for each in complained_of:
            each.few = each.few and few
        _try(sandbox, complained_of)
        complained_of = [each for each in complained_of if each.complaint()]
    for each in complained_of:
        each.done = dict(enumerate(sandbox.run(each.exercise, each.answer, each.cases).observed))
    return [each for each in complained_of if each.complaint()]


def _try(sandbox: Sandbox, tried: Sequence[Tried]) -> None:
    groups = _groups([(each, index) for each in tried for index in each.left], lambda job: job[0].cases[job[1]])

    def run(group: Sequence[tuple[Tried, int]]) -> None:
        while left := [(each, index) for each, index in group if index in each.left]:
            jobs = [(each.exercise, each.answer, each.cases[index]) for each, index in left]
            for (each, index), observed in zip(left, start(sandbox, jobs), strict=False):
                each.done[index] = observed

    with ThreadPoolExecutor(_AT_ONCE) as pool:  # some of the time is spent waiting for somebody who hangs
        list(pool.map(run, groups))


def _groups(jobs: Sequence[T], case_of: Callable[[T], Case]) -> list[list[T]]:
    """Jobs that share a start: those of as many ranks; what is weighed goes alone."""
    groups: dict[Any, list[T]] = defaultdict(list)
    for number, job in enumerate(jobs):
        case = case_of(job)
        groups[number if case.get("weighed") else f"{case.get('world_size', 1)} ranks"].append(job)
    return [
        group[first : first + _IN_A_START] for group in groups.values() for first in range(0, len(group), _IN_A_START)
    ]


def start(sandbox: Sandbox, jobs: Sequence[Job]) -> list[Observed]:
    """What was observed of the jobs of one start: of the last one that was begun, and those before it."""
    brought = sandbox.perform(*task_of(jobs, sandbox.limits.cpu_seconds))
    return read_start(brought, [(exercise, answer.cells, case) for exercise, answer, case in jobs])


def run_jobs(sandbox: Sandbox, jobs: Sequence[Job]) -> list[Observed]:
    """What was observed of each job."""
    done: dict[int, Observed] = {}

    def run(group: list[int]) -> None:
        while left := [index for index in group if index not in done]:
            done.update(zip(left, start(sandbox, [jobs[index] for index in left]), strict=False))

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(run, _groups(range(len(jobs)), lambda index: jobs[index][2])))
    return [done[index] for index in range(len(jobs))]


@cache
def reference(exercise: str) -> Tried:
    """The reference, which is tried once."""
    return Tried(all_exercises()[exercise], programs(exercise)[0])


def tried_on(exercise: str, seed: int = SEED) -> list[Tried]:
    """All programs of an exercise, right ones on all its cases and wrong ones on a few until they are named.

    Weighed are the reference, and of each check of memory the first mistake.
    """
    known, found = all_exercises()[exercise], [reference(exercise)]
    unweighed = {check.name for check in known.checks if check.kind == "memory"}
    for program in programs(exercise)[1:]:
        if program.check in unweighed or not is_of_memory(known, program):
            found.append(Tried(known, program, seed, program.check in unweighed, few=_FEW[0] if program.check else 0))
        unweighed.discard(program.check)
    return found


def is_of_memory(exercise: Exercise, program: Program) -> bool:
    """Whether a program is refused for what it holds, in cases that are weighed."""
    is_weighed = any(case.get("weighed") for case in drawn(exercise.id, SEED))
    return is_weighed and any(check.name == program.check and check.kind == "memory" for check in exercise.checks)
