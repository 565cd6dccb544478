"""No argument of an exercise on paper can be ignored: who takes it for a constant is refused, whatever is drawn.

The constants are those of the task's example, of two cases that are drawn once, and nothing (0, or the other truth).
What a dictionary or a pair of numbers holds counts as an argument, entry by entry. And examples have the form of what
a check hands out.
"""

from __future__ import annotations

import ast
import copy
import doctest
import io
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from functools import cache
from typing import Any

import numpy as np
import pytest

from dtlib.grading.exercises import bank, plain
from dtlib.grading.exercises.catalogue import all_exercises
from dtlib.grading.exercises.compare import close
from dtlib.grading.exercises.exercise import Check, Exercise
from dtlib.grading.exercises.seen import Case, Observed, Trouble
from dtlib.lab import RankError

from .answers import answer, namespace, open_sandbox, programs, reference_namespace, run_jobs
from .test_notebooks import cells

ON_PAPER = [name for name, exercise in all_exercises().items() if bank.is_on_paper(exercise)]
SEEDS = range(2)
MANY = range(50)
#: What changes no answer: the vocabulary and heads are there to be left alone, and the width of a head cancels.
DECOYS = {"tp.1": {(3,)}, "cp.2": {(3,)}, "tp.4": {(0, "num_kv_heads"), (0, "vocab")}, "mtp.4": {(0, "wrong_guesses")}}
#: A run tells the same twice: what was sent and how long it took say what these do.
DECOYS["planner.4"] = {(0, each) for each in ("dp", "tp", "tp_bytes", "across")} | {(0, "seconds", "dp")}
ANOTHER = 20262  # the seed of the case that is drawn once
SEVERAL = {"activations.3", "collectives.1", "pp.4"}  # have several right answers, or forms of one
QUIET = {"library": [], "built_in": [], "escaped": [], "form": "bytes", "shortcut": []}
Place = tuple[Any, ...]


@cache
def reference(name: str) -> Callable[..., Any]:
    """The answer in the solutions."""
    found: Callable[..., Any] = reference_namespace(name.partition(".")[0])[all_exercises()[name].function]
    return found


@cache
def examples(name: str) -> list[list[Any]]:
    """The arguments with which the task's examples call the function."""
    stem, _, number = name.partition(".")
    calls: list[list[Any]] = []
    space = {**reference_namespace(stem)}

    def noted(*arguments: Any, **named: Any) -> Any:
        assert not named, name
        calls.append(list(arguments))
        return reference(name)(*arguments)

    space[all_exercises()[name].function] = noted
    text = "\n".join(re.findall(r"```python\n(.*?)```", cells(stem)[f"{stem}-{number}-task"], re.S))
    for each in doctest.DocTestParser().get_examples(text):
        with redirect_stdout(io.StringIO()):
            exec(compile(each.source, name, "single"), space)
    return calls


def example(name: str) -> list[Any]:
    """The arguments of the first example."""
    return examples(name)[0]


def handed(arguments: Any) -> Any:
    """Arguments as they are handed out: plain data."""
    return plain.unpack(plain.pack(arguments))


def places(arguments: list[Any]) -> Iterator[Place]:
    """Each argument, and each entry of one that is a dictionary with the same keys in every case, or a link [α, B]."""
    for number, each in enumerate(arguments):
        yield (number,)
        for key in entries(each):
            yield number, key
            yield from ((number, key, deeper) for deeper in entries(each[key]))


def entries(value: Any) -> Iterable[Any]:
    """The keys of a dictionary, or the places of a pair of numbers with a point."""
    is_pair = isinstance(value, list) and [type(each) for each in value] == [float, float]
    return value if isinstance(value, dict) else range(2) if is_pair else ()


def at(arguments: Any, place: Place) -> Any:
    """What stands there."""
    for step in place:
        arguments = arguments[step]
    return arguments


def replaced(arguments: list[Any], place: Place, value: Any) -> list[Any]:
    """The arguments, with another value there."""
    found = copy.deepcopy(arguments)
    at(found, place[:-1])[place[-1]] = copy.deepcopy(value)
    return found


def answered(exercise: Exercise, case: Case, function: Callable[[], Any]) -> Observed:
    """What the judge would see of an answer."""
    try:
        with np.errstate(all="ignore"):
            answer = function()
    except Exception as error:
        return Observed(case, trouble=Trouble("raised", f"the function raised {type(error).__name__}: {error}"))
    return Observed(case, ({"answer": plain.simplify(answer), **QUIET},))


def unrefused(name: str, seeds: range) -> dict[Place, str]:
    """The places at which a constant earns all points with some seed; which one, and how often."""
    exercise, holes = all_exercises()[name], dict[Place, str]()
    drawn = {seed: exercise.cases(seed) for seed in seeds}
    others = [handed(case["arguments"]) for case in exercise.cases(ANOTHER)]
    once = others[len(others) // 2]
    for place in places(once):
        constants = [at(each, place) for each in (handed(example(name)), others[0], once) if has(each, place)]
        if isinstance(constants[-1], int | float):
            constants.append(not constants[-1] if isinstance(constants[-1], bool) else 0)
        for constant in constants:

            def told(*arguments: Any, constant: Any = constant, place: Place = place) -> Any:
                changed = replaced(list(arguments), place, constant) if has(list(arguments), place) else arguments
                return reference(name)(*changed)

            passed = [seed for seed, cases in drawn.items() if not is_refused(exercise, told, cases)]
            if passed:
                holes[place] = f"{constant!r} for {name}'s argument {place} passes with seeds {passed}"
    return holes


def has(arguments: list[Any], place: Place) -> bool:
    """Whether something stands there."""
    try:
        at(arguments, place)
    except (KeyError, IndexError, TypeError):
        return False
    return True


def is_refused(exercise: Exercise, function: Callable[..., Any], cases: Iterable[Case], *checks: Check) -> bool:
    """Whether one of `checks`, or of all, finds a case in which the function is wrong."""
    for case in cases:
        if looking := [check for check in checks or exercise.checks if check.applies(case)]:
            arguments = handed(list(case["arguments"]))
            seen = answered(exercise, case, lambda arguments=arguments: function(*arguments))
            if any(check.judge([seen]).verdict == "fail" for check in looking):
                return True
    return False


@pytest.mark.parametrize("name", ON_PAPER)
@pytest.mark.parametrize(
    "seeds", [SEEDS, pytest.param(MANY, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])], ids=["few", "many"]
)
def test_no_argument_can_be_taken_for_a_constant(name: str, seeds: range):
    allowed = DECOYS.get(name, set())
    assert {place: told for place, told in unrefused(name, seeds).items() if place not in allowed} == {}


FORM = """
def form(value):
    if isinstance(value, dict):
        return {key: form(each) for key, each in sorted(value.items())}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, sorted({repr(form(each)) for each in value})
    if hasattr(value, "dtype"):
        return type(value).__name__.replace("Parameter", "Tensor"), str(value.dtype)
    return "callable" if callable(value) else type(value).__name__
"""
TELLS = FORM + "\ndef FUNCTION(*arguments):\n    raise ValueError(f'<{list(map(form, arguments))}>')\n"
form: Callable[[Any], Any] = namespace(FORM)["form"]


def forms(text: str) -> list[Any]:
    """Of each argument its form, as the error of `TELLS` says."""
    return list(ast.literal_eval(text[text.index("<") + 1 : text.index("]>") + 1]))


@pytest.mark.parametrize("name", ON_PAPER)
def test_examples_show_what_is_handed_out(name: str):
    """In kinds of containers, of numbers and of arrays."""
    given = [handed(case["arguments"]) for case in all_exercises()[name].cases(ANOTHER)]
    for arguments in examples(name):
        for place, argument in enumerate(arguments):
            assert form(argument) in [form(each[place]) for each in given if has(each, (place,))], (name, place)


def test_examples_on_ranks_show_what_is_handed_out(subtests: pytest.Subtests):
    others = {name: exercise for name, exercise in all_exercises().items() if name not in ON_PAPER}
    tells = {name: TELLS.replace("FUNCTION", exercise.function) for name, exercise in others.items()}
    with open_sandbox() as sandbox:
        jobs = [(each, answer(name, tells[name]), each.cases(ANOTHER)[0]) for name, each in others.items()]
        seen = run_jobs(sandbox, jobs)
    for name, observed in zip(others, seen, strict=True):
        stem, _, number = name.partition(".")
        space = {**reference_namespace(stem)}
        exec(compile(tells[name], name, "exec"), space)
        text = "\n".join(re.findall(r"```python\n(.*?)```", cells(stem)[f"{stem}-{number}-task"], re.S))
        example = "".join(each.source for each in doctest.DocTestParser().get_examples(text))
        with subtests.test(name), pytest.raises((ValueError, RankError), match="<") as shown:
            exec(compile(example, name, "exec"), space)
        assert observed.trouble is not None
        given, told = forms(observed.trouble.text), forms(str(shown.value))
        assert [one for one, two in zip(told, given, strict=True) if one != two and two != "NoneType"] == [], name


@pytest.mark.parametrize("name", ON_PAPER)
def test_examples_hold_for_right_answers_of_another_kind(name: str):
    """Who takes another way comes to what the example says: it is a case like those that are drawn."""
    stem, _, _ = name.partition(".")
    for program in programs(name)[1:]:
        if not program.check:
            other = namespace(cells(stem)["setup"], program.source)[all_exercises()[name].function]
            for arguments in examples(name):
                told, wanted = (handed([each(*handed(arguments))])[0] for each in (other, reference(name)))
                assert close(told, wanted) or name in SEVERAL, (arguments, told, wanted, program.source)
