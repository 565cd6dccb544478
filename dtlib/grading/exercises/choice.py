"""Exercises that ask for the best of what is possible: the fastest, or the largest number.

For the fastest, a theory lists what is possible for a job, each as its seconds and an answer:
``(seconds, name, ranks)``; jobs are drawn that tell theories apart. For the best plan, cases list what each possible
plan costs. For the largest, a theory lists the numbers that will do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import numpy as np

from . import plain
from .compare import show
from .exercise import Check, Finding, FormError
from .inputs import Rng
from .kinds import order
from .seen import Case, Observed
from .signs import only_if

Possible = Sequence[tuple[float, str, int]]
Job = TypeVar("Job")
Plan = tuple[Any, ...]
UNCLEAR = ("", 0)
_CLEARLY = 1.01  # times longer
_NEARLY = 1.03  # times the cost of the best plan


def fastest(possible: Possible) -> tuple[str, int] | None:
    """The answer that takes the least time, `UNCLEAR` if another takes about as long; None if nothing is possible."""
    if not possible:
        return None
    seconds, name, ranks = min(possible)
    return (name, ranks) if sum(each[0] < _CLEARLY * seconds for each in possible) == 1 else UNCLEAR


def told_apart(
    rng: Rng, drawn: Callable[[Rng], Job], right: Callable[[Job], Possible], *wrong: Callable[[Job], Possible]
) -> Job:
    """A job for which a wrong theory has another answer than the right one, or two wrong ones have different answers.

    It is clear by each of them, and by the right one something is possible.
    """
    while True:
        job = drawn(rng)
        wanted = fastest(right(job))
        if wanted and wanted != UNCLEAR:
            told = [fastest(theory(job)) for theory in wrong]
            if UNCLEAR not in told and told[0] != (wanted if len(told) == 1 else told[1]):
                return job


def each_apart(
    rng: Rng,
    drawn: Callable[[Rng], Any],
    possible: Callable[..., Possible],
    wrong: Mapping[str, Any],
    taken: Iterable[tuple[str, float]],
    alike: Iterable[tuple[Any, Any]],
) -> Iterator[Any]:
    """Jobs: of each wrong theory one that it gets wrong, and of two that are `alike` one that tells them apart.

    Theories are called as ``possible(job, by=theory)``. A number that is `taken` for what a job has under a name is one
    more, called by both.
    """
    theories: dict[Any, Callable[[Any], Possible]] = {
        name: partial(possible, by=theory) for name, theory in wrong.items()
    }
    for name, value in taken:
        theories[name, value] = lambda job, given={name: value}: possible(job._replace(**given))  # type: ignore[misc]
    for names in (*((name,) for name in theories), *alike):
        yield told_apart(rng, drawn, possible, *(theories[name] for name in names))


def led_astray(
    rng: Rng,
    drawn: Callable[[Rng], Job],
    possible: Callable[[Job], Mapping[Plan, float]],
    wrong: Callable[[Job], Mapping[Plan, float]],
    clearly: float = _NEARLY,
) -> Job:
    """A job in which what a wrong theory chooses is not possible, or costs more than `clearly` times the least.

    Both theories say what each plan costs. Something is possible in it.
    """
    while True:
        job = drawn(rng)
        costs, believed = possible(job), wrong(job)
        chosen = min(believed, key=believed.__getitem__, default=())
        if costs and costs.get(chosen, math.inf) > clearly * min(costs.values()):
            return job


def pairs(
    rng: Rng,
    drawn: Callable[[Rng], dict[str, Any]],
    possible: Callable[[dict[str, Any]], Mapping[Plan, float]],
    places: Iterable[str],
    allowed: Callable[[dict[str, Any]], bool] = lambda job: True,
) -> list[dict[str, Any]]:
    """For each place, ``"key"``, ``"key, key"`` or ``"key, index"``, two jobs that differ there alone.

    No plan is right in both, so who takes what stands there for a constant is wrong in one of them. Of each job no plan
    is nearly the best one of the other, and something is possible in one of them.
    """

    def best(job: dict[str, Any]) -> set[Plan]:
        plans = possible(job)
        return {plan for plan, cost in plans.items() if cost <= _NEARLY * min(plans.values())}

    def another(job: Any, other: Any, key: str, *inner: str) -> Any:
        if isinstance(job, list):
            return [one if str(i) != key else two for i, (one, two) in enumerate(zip(job, other, strict=True))]
        return {**job, key: another(job[key], other[key], *inner) if inner else other[key]}

    found = []
    for place in places:
        while True:
            one = drawn(rng)
            two = another(one, drawn(rng), *place.split(", "))
            if allowed(two) and (best(one) or best(two)) and not best(one) & best(two):
                break
        found += [one, two]
    return found


def checks(possible: Callable[[Case], Possible], names: Sequence[str], none: str) -> tuple[Check, Check]:
    """That a choice, one of `names` and a number of ranks, is possible (3), and that no other is faster (4).

    Cases say under ``"is"`` whether there are `some`; where there are none, the right answer is None, and something
    else is the mistake called `none`.
    """

    def chosen(observed: Observed) -> tuple[str, int] | None:
        answer = observed.said[0]["answer"]
        if answer is None:
            return None
        is_pair = isinstance(answer, list) and len(answer) == 2 and answer[0] in names and plain.is_number(answer[1])
        if is_pair and answer[1] == int(answer[1]):
            return str(answer[0]), int(answer[1])
        raise FormError(show(answer), f"a pair of a name ({', '.join(names)}) and a whole number, or None")

    def find_impossible(observed: Observed) -> Finding | None:
        answer, known = chosen(observed), [each[1:] for each in possible(observed.case)]
        if answer in known or (answer is None and not known):
            return None
        return Finding(show(answer), "something that is possible" if known else "None", observed.words)

    def find_faster(observed: Observed) -> Finding | None:
        answer, wanted = chosen(observed), fastest(possible(observed.case))
        return None if answer == wanted else Finding(show(answer), show(wanted), observed.words)

    def agrees(observed: Observed, other: Any) -> bool:
        return chosen(observed) == (tuple(other) if isinstance(other, list) else other)

    words = "it is possible, and None where nothing is", "nothing else that is possible is faster"
    return (
        order(3, "possible", words[0], find_impossible, wrong={none: only_if("some")}, kind="value", agrees=agrees),
        order(4, "fastest", words[1], find_faster, where="some", kind="value", agrees=agrees),
    )


def largest(
    enough: Callable[[Case], Sequence[int]],
    things: str,
    allowed: str,
    no_larger: str,
    *,
    gives: Callable[[Case, int], str],
    rule: Callable[[Case], str],
) -> tuple[Check, Check]:
    """That a number of `things` is one of ``enough(case)``, in increasing order (3), and that no larger one is (3).

    `allowed` and `no_larger` say so in the exercise's own words, `gives` what a number of them comes to, `rule` what it
    should. Cases say under ``"is"`` whether there are `some`; where there are none, the right answer is None.
    """

    def answered(observed: Observed) -> int | None:
        answer = observed.said[0]["answer"]
        is_number = isinstance(answer, int | float) and not isinstance(answer, bool)
        if answer is None or (is_number and answer == int(answer)):
            return None if answer is None else int(answer)
        raise FormError(show(answer), "a whole number, or None")

    def find_allowed(observed: Observed) -> Finding | None:
        answer, wanted = answered(observed), enough(observed.case)
        if answer in wanted or (answer is None and not wanted):
            return None
        told = show(answer) if answer is None else f"{answer}, {gives(observed.case, answer)}"
        return Finding(
            told, rule(observed.case) if wanted else f"None, as no number gives {rule(observed.case)}", observed.words
        )

    def find_larger(observed: Observed) -> Finding | None:
        answer, most = answered(observed), enough(observed.case)[-1]
        return (
            None if answer == most else Finding(show(answer), f"{most}, {gives(observed.case, most)}", observed.words)
        )

    def agrees(observed: Observed, other: Any) -> bool:
        return answered(observed) == other

    wrong = {f"{things} where none will do": only_if("some")}
    return (
        order(3, "allowed", allowed, find_allowed, wrong=wrong, kind="value", agrees=agrees),
        order(3, "largest", no_larger, find_larger, where="some", kind="value", agrees=agrees),
    )


def plans(
    parts: str, unit: str, *, names: Sequence[str] = (), checks: tuple[str, str], words: tuple[str, str],
    tells: Callable[[Any, Plan], str] = lambda job, plan: "",
) -> tuple[Check, Check]:  # fmt: skip
    """That a plan is possible (3), and that no other costs less (4).

    A plan is a tuple of `parts`, as many as that text names: whole numbers, the first one of `names` where there are
    some. `unit` says what a cost is counted in. Cases have each possible plan with its cost under ``"plans"``,
    ``[*plan, cost]``, and say under ``"is"`` whether there are `some`; where there are none, the right answer is None,
    and something else is the mistake "a plan where none will do". ``tells(job, plan)`` is what one that will not do
    comes to, ", so much".
    """
    length = len(parts.split(", "))

    def answered(observed: Observed) -> Plan | None:
        answer = observed.said[0]["answer"]
        if answer is None:
            return None
        entries = list(answer) if isinstance(answer, list | np.ndarray) else [answer]
        numbers = np.asarray(entries[1:] if names else entries)
        is_whole = numbers.dtype.kind in "iuf" and (numbers == numbers.round()).all()
        if len(entries) == length and numbers.ndim == 1 and is_whole and (not names or entries[0] in names):
            return (*entries[: bool(names)], *map(int, numbers))
        raise FormError(show(answer), f"a tuple ({parts}), or None")

    def costs(observed: Observed) -> dict[Plan, float]:
        return {tuple(plan): cost for *plan, cost in observed.case["plans"]}

    def find_impossible(observed: Observed) -> Finding | None:
        answer, known = answered(observed), costs(observed)
        if answer in known or (answer is None and not known):
            return None
        told = show(observed.said[0]["answer"])
        with suppress(ArithmeticError, LookupError, ValueError):  # of one that nobody can carry out
            told += tells(observed.case["arguments"][0], answer) if answer else ""
        return Finding(told, "a plan that will do" if known else "None", observed.words)

    def find_dear(observed: Observed) -> Finding | None:
        answer, known = answered(observed), costs(observed)
        cost, least = known.get(answer, float("inf")) if answer else float("inf"), min(known.values())
        if cost <= least * (1 + 1e-6):
            return None
        told = show(observed.said[0]["answer"]) + (f", {cost:.4g} {unit}" if answer in known else "")
        return Finding(told, f"one with {least:.4g} {unit}", observed.words)

    def agrees(observed: Observed, other: Any) -> bool:
        return answered(observed) == (None if other is None else tuple(other))

    wrong = {"a plan where none will do": only_if("some")}
    return (
        order(3, checks[0], words[0], find_impossible, wrong=wrong, kind="value", agrees=agrees),
        order(4, checks[1], words[1], find_dear, where="some", kind="value", agrees=agrees),
    )
