"""activations.3: where to cut unequal layers into segments, on paper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dtlib.grading.compare import compare, show
from dtlib.grading.exercise import Check, Exercise, Finding
from dtlib.grading.kinds import Sign, every, order, own_work
from dtlib.grading.seen import Case, Observed

from ._plans import OTHER_PEAKS, PLANS, answer, best, filled, never_freed, peak_of


def draw(rng: np.random.Generator) -> list[dict[str, Any]]:
    """Layers alike and not; among those with growing inputs and among 40, every wrong way to plan has a larger peak."""
    kinds = (("equal", 12), ("unequal", 9), ("narrowing", 11), ("widening", 10), ("many", 40))
    cases = [case(kind, layers, rng) for kind, layers in kinds]
    for place in (3, 4):
        while any(peak_of(plan(cases[place]), cases[place]) == best(cases[place])[0] for plan in PLANS.values()):
            cases[place] = case(*kinds[place], rng)
    return cases


def case(kind: str, layers: int, rng: np.random.Generator) -> dict[str, Any]:
    """One call."""
    inputs = rng.integers(2, 9, layers)
    kept = inputs + rng.integers(5, 60, layers)
    if kind == "equal":
        inputs[:], kept[:] = inputs[0], 3 * inputs[0] + int(rng.integers(0, 2 * inputs[0]))
    if kind in ("narrowing", "widening"):  # the most to keep in the middle
        inputs = np.sort(rng.integers(4, 40, layers))[:: -1 if kind == "narrowing" else 1].copy()
        kept = inputs + rng.integers(2, 60, layers)
        kept[layers // 2] += 120
    few = layers <= 12
    told = ", kept/input " + ", ".join(f"{a}/{i}" for a, i in zip(kept, inputs, strict=True)) if few else ""
    words = f"{layers} {kind} layers{told}"
    return {"arguments": [kept.tolist(), inputs.tolist()], "words": words, "is": {"few": few}}


def find_peak(observed: Observed) -> Finding | None:
    """That the peak is that of the plan that came with it."""
    starts, peak = answer(observed)
    return compare(peak, peak_of(starts, observed.case), f"the peak of the returned plan; {observed.words}")


def find_best(observed: Observed) -> Finding | None:
    """That no plan has a smaller peak."""
    starts, _ = answer(observed)
    seen, wanted = peak_of(starts, observed.case), best(observed.case)[0]
    if seen == wanted:
        return None
    return Finding(f"a plan with a peak of {seen}", str(wanted), f"starts {show(starts)}; {observed.words}")


def is_even(each: Observed) -> bool:
    """Whether all segments have the same length, the last one perhaps less."""
    starts, layers = answer(each)[0], len(each.case["arguments"][0])
    return starts == list(range(0, layers, starts[1] if len(starts) > 1 else layers))


def best_if_never_freed(each: Observed) -> bool:
    """Whether the plan would be as good as the best one if every checkpoint stayed to the end."""
    return never_freed(answer(each)[0], each.case) <= never_freed(best(each.case)[1], each.case)


def gave_up(failing: Sequence[Observed], passing: Sequence[Observed]) -> bool:
    """Whether it took more time or memory than there is."""
    troubles = [each.trouble for each in failing if each.trouble is not None]
    return len(troubles) == len(failing) and all(t.kind == "hung" or "MemoryError" in t.text for t in troubles)


def peak_is(theory: Callable[[Sequence[int], Case], float]) -> Sign:
    """Another peak of the returned plan."""
    return every(lambda each: bool(answer(each)[1] == theory(answer(each)[0], each.case)))


def plan_is(theory: Callable[[Case], list[int]]) -> Sign:
    """Another plan."""
    return every(lambda each: answer(each)[0] == theory(each.case))


PEAKS = {name: peak_is(theory) for name, theory in OTHER_PEAKS.items()}
OTHER_PLANS = {
    **{name: plan_is(theory) for name, theory in PLANS.items()},
    "segments of equal length": every(is_even),
    "as long as they may be": every(
        lambda each: answer(each)[0] == filled(each.case, peak_of(answer(each)[0], each.case))
    ),
    "checkpoints never freed": every(best_if_never_freed),
    "every plan tried": Sign(gave_up),
}


def best_plan(points: int, name: str, layers: str, where: str) -> Check:
    """The check that a plan is the best one."""
    words = f"no plan has a smaller peak, for {layers}"
    return order(points, name, words, find_best, wrong=OTHER_PLANS, where=where, kind="memory")


PEAK = "the peak is that of the plan that is returned with it, for up to 12 layers"
EXERCISE = Exercise(
    id="activations.3",
    function="best_cuts",
    title="Where to cut",
    harness="paper.call",
    draw=draw,
    checks=(
        own_work("best_cuts", "your own formula"),
        order(2, "peak", PEAK, find_peak, wrong=PEAKS, where="few", kind="memory"),
        best_plan(3, "best plan", "up to 12 layers", "few"),
        best_plan(1, "many layers", "40 layers", "not few"),
    ),
)
