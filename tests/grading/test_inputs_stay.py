"""What a call was given is compared after it, in every exercise: who changes it is told so, by the argument's name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from dtlib.grading.exercises import bank
from dtlib.grading.exercises.catalogue import all_exercises
from dtlib.grading.exercises.exercise import CHANGED
from dtlib.grading.exercises.seen import Observed
from dtlib.grading.sandbox.harness import resolve
from dtlib.grading.sandbox.runner import Sandbox

from .answers import Tried, open_sandbox, programs, try_all
from .test_arguments import ON_PAPER, handed, reference

#: Whose task is to change what they get, or to take it over: a buffer, a model, its parameters.
CHANGING = {
    "collectives.4", "collectives.5", "collectives.6", "dp.4", "dp.6", "memory.5", "memory.6", "zero.3", "zero.4",
    "zero.5", "zero.6", "zero.7", "activations.5", "reliability.2",
    "reliability.3",
}  # fmt: skip
#: Whose function has no argument: what it returns is called with some, and its harness watches these.
WITHOUT = {"batch.2"}
OTHERS = [name for name in all_exercises() if name not in {*ON_PAPER, *CHANGING, *WITHOUT}]
SPOILING = """

_clean_{name} = {name}

def {name}(*given):
    found = _clean_{name}(*given)
    left = list(given)
    for each in left:
        left += each if isinstance(each, list | tuple) else []
        if isinstance(each, torch.Tensor) and each.numel():
            each.data[(-1,) * each.dim()] += 2.0**-10
            break
    return found
"""


class OneCase:
    """A desk with the arguments of one case."""

    def __init__(self, arguments: list[Any]) -> None:
        self.arguments = arguments

    def next(self) -> Any:
        """The arguments, as they are handed out."""
        return handed(self.arguments)


def spoil(value: Any) -> bool:
    """Change something inside of it, if there is anything to change."""
    if isinstance(value, np.ndarray) and value.size:
        value.reshape(-1)[:1] += 1
    elif isinstance(value, list) and value:
        value.append(value[0])
    elif isinstance(value, dict) and value:
        value["more"] = 1
    else:
        return False
    return True


def spoiling(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same answers, after which one of the arguments is another."""

    def spoilt(*arguments: Any) -> Any:
        answer = copy.deepcopy(function(*arguments))
        any(spoil(each) for each in arguments)
        return answer

    return spoilt


@pytest.mark.parametrize("name", ON_PAPER)
def test_who_changes_an_argument_on_paper_is_told_so(name: str):
    exercise = all_exercises()[name]
    cases = exercise.cases(1)
    has_any = any(isinstance(each, list | dict | np.ndarray) for each in cases[0]["arguments"])
    harness, verdicts = resolve(exercise.harness), []
    for function in (reference(name), spoiling(reference(name))):
        told = [handed(harness(function, OneCase(case["arguments"]))) for case in cases]  # type: ignore[arg-type]
        seen = [Observed(case, (said,)) for case, said in zip(cases, told, strict=True)]
        verdicts.append(exercise.judge(seen))
    assert verdicts[0].points == exercise.points
    assert (verdicts[1].points < exercise.points) == has_any
    assert (verdicts[1].mistakes == (CHANGED,)) == has_any, str(verdicts[1])


@pytest.mark.parametrize("name", ON_PAPER)
def test_who_changes_an_argument_in_cases_of_other_checks_is_told_so(name: str):
    exercise = all_exercises()[name]
    first = next(check for check in exercise.checks if check.inputs_stay)
    cases, harness, seen = exercise.cases(1), resolve(exercise.harness), []
    for case in cases:
        function = reference(name) if first.applies(case) else spoiling(reference(name))
        told = handed(harness(function, OneCase(case["arguments"])))  # type: ignore[arg-type]
        seen.append(Observed(case, (told,)))
    verdict = exercise.judge(seen)
    assert verdict.mistakes == (() if all(map(first.applies, cases)) else (CHANGED,)), str(verdict)


@pytest.mark.parametrize("said", [{"answer": [], "changed": 5}, {"answer": [], "changed": {"a": 1}}, {}])
def test_what_came_back_in_another_form_is_no_crash_of_the_judge(said: dict[str, Any]):
    exercise = all_exercises()["batch.5"]
    verdict = exercise.judge([Observed(case, (said,)) for case in exercise.cases(1)])
    assert verdict.points == 0


def test_what_is_wrong_with_a_checks_own_cases_comes_first():
    exercise = all_exercises()["batch.5"]
    cases = exercise.cases(1)
    first = next(check for check in exercise.checks if check.inputs_stay)
    said = [{"answer": [], "changed": [] if first.applies(case) else ["job"]} for case in cases]
    judged = first.judge([Observed(case, (each,)) for case, each in zip(cases, said, strict=True)])
    assert judged.verdict == "fail"
    assert "changed by the call" not in judged.message


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with open_sandbox() as one:
        yield one


def test_who_changes_an_argument_elsewhere_is_told_so(sandbox: Sandbox):
    tried = []
    for name in OTHERS:
        exercise, source = all_exercises()[name], programs(name)[0].source
        first = next(check.name for check in exercise.checks if check.inputs_stay)
        spoilt = source + SPOILING.format(name=exercise.function)
        tried.append(Tried(exercise, bank.Program(first, CHANGED, spoilt), weighs=False, few=True))
    wrong = try_all(sandbox, tried)
    assert not wrong, "\n\n".join(each.complaint() for each in wrong)
