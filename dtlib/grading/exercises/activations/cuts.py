"""activations.3: where to cut unequal layers into segments, on paper."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from dtlib.grading.exercises.compare import compare, show
from dtlib.grading.exercises.exercise import Check, Finding, FormError
from dtlib.grading.exercises.inputs import Cases, Rng, call
from dtlib.grading.exercises.kinds import on_paper, order
from dtlib.grading.exercises.seen import Case, Observed
from dtlib.grading.exercises.signs import NEVER_ENDS, Sign, Wrong, every, raised


def draw(rng: Rng) -> Cases:
    """Layers alike and not, and a single one; among those with growing inputs and among 40, every wrong way to plan has
    a larger peak. Then for each wrong count of a plan's bytes layers for which who goes by it finds no best plan."""
    kinds = (("equal", 12), ("unequal", 9), ("narrowing", 11), ("widening", 10), ("all unlike", 40), ("equal", 1))
    cases = [case(kind, layers, rng) for kind, layers in kinds]
    for place in (3, 4):
        while best(cases[place])[0] in (peak_of(plan(cases[place]), cases[place]) for plan in WAYS):
            cases[place] = case(*kinds[place], rng)
    for count in COUNTS:
        misleading = case("unequal", 8, rng)
        while misled(misleading, count) == best(misleading)[0]:
            misleading = case("unequal", 8, rng)
        cases.append(misleading)
    return cases


def case(kind: str, layers: int, rng: Rng) -> dict[str, Any]:
    inputs = rng.integers(2, 9, layers)
    kept = inputs + rng.integers(5, 60, layers)
    if kind == "equal":
        inputs[:], kept[:] = inputs[0], 3 * inputs[0] + int(rng.integers(0, 2 * inputs[0]))
    if kind in ("narrowing", "widening"):  # the most to keep in the middle
        inputs = np.sort(rng.integers(4, 40, layers))[:: -1 if kind == "narrowing" else 1].copy()
        kept = inputs + rng.integers(2, 60, layers)
        kept[layers // 2] += 120
    told = ", kept/input " + ", ".join(f"{a}/{i}" for a, i in zip(kept, inputs, strict=True))
    words = f"{layers} layers, {kind}{told}" if layers > 1 else f"a single layer{told}"
    return call(words, [kept.tolist(), inputs.tolist()], few=layers <= 12)


def answer(observed: Observed) -> tuple[list[int], Any]:
    """The plan that was returned, and the peak beside it."""
    value = observed.said[0]["answer"]
    if not isinstance(value, list) or len(value) != 2:
        raise FormError(show(value), "a tuple (starts, peak)")
    starts = value[0].tolist() if isinstance(value[0], np.ndarray) else value[0]
    layers = len(observed.case["arguments"][0])
    whole = isinstance(starts, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in starts)
    if not whole or not starts or starts[0] != 0 or sorted(set(starts)) != starts or starts[-1] >= layers:
        wanted = f"layers from 0 to {layers - 1} in increasing order, the first of them 0"
        raise FormError(f"the starts {show(starts)}", wanted)
    return starts, value[1]


def parts(starts: Sequence[int], case: Case) -> tuple[list[int], list[int]]:
    """The bytes of each checkpoint of a plan, and what each of its segments keeps while it is alive."""
    kept, inputs = case["arguments"]
    own = [sum(kept[start:end]) for start, end in pairwise([*starts, len(kept)])]
    return [inputs[start] for start in starts], own


def most_alive(inputs: list[int], own: list[int]) -> int:
    """The most that is alive, of checkpoints that wait and a segment."""
    return max(before + size for before, size in zip(accumulate(inputs, initial=0), own, strict=False))


def own_twice(inputs: list[int], own: list[int]) -> int:
    """The same where a segment's first input is counted beside what the segment keeps."""
    return most_alive(inputs, [size + first for first, size in zip(inputs, own, strict=True)])


def peak_of(starts: Sequence[int], case: Case) -> float:
    """The most that is alive at one time in backward, with segments that begin at `starts`."""
    return most_alive(*parts(starts, case))


def never_freed(starts: Sequence[int], case: Case) -> int:
    """The same peak if every checkpoint stayed to the end."""
    checkpoints, own = parts(starts, case)
    return sum(checkpoints) + max(size - first for first, size in zip(checkpoints, own, strict=True))


def best(case: Case) -> tuple[float, list[int]]:
    """The smallest peak, and a plan that has it: what lies before a segment adds the same to all that lies behind."""
    kept, inputs = case["arguments"]
    found: dict[int, tuple[float, list[int]]] = {len(kept): (-math.inf, [])}
    for start in reversed(range(len(kept))):
        found[start] = min(
            (max(sum(kept[start:end]), inputs[start] + found[end][0]), [start, *found[end][1]])
            for end in range(start + 1, len(kept) + 1)
        )
    return found[0]


def even(case: Case) -> list[int]:
    """The best of the plans with segments of equal length: √l, all layers and one among them."""
    layers = len(case["arguments"][0])
    plans = (list(range(0, layers, length)) for length in range(1, layers + 1))
    return min(plans, key=lambda plan: peak_of(plan, case))


def filled(case: Case, bound: float) -> list[int]:
    """Each segment as long as it may be within a bound."""
    kept, inputs = case["arguments"]
    starts, waiting, own = [0], 0, 0
    for layer, size in enumerate(kept):
        if own and waiting + own + size > bound:
            waiting, own = waiting + inputs[starts[-1]], 0
            starts.append(layer)
        own += size
    return starts


def best_filled(case: Case) -> list[int]:
    bounds = range(max(case["arguments"][0]), sum(case["arguments"][0]))
    return min((filled(case, bound) for bound in bounds), key=lambda plan: peak_of(plan, case))


def forwards(case: Case) -> list[int]:
    """Of the first layers the plan with the smallest peak is continued, whatever it leaves waiting."""
    kept, inputs = case["arguments"]
    best: list[tuple[int, int, list[int]]] = [(0, 0, [])]
    for end in range(1, len(kept) + 1):
        plans = []
        for start, (peak, waiting, cuts) in enumerate(best):
            plans.append((max(peak, waiting + sum(kept[start:end])), waiting + inputs[start], [*cuts, start]))
        best.append(min(plans))
    return best[-1][2]


WAYS = (even, best_filled, forwards)
#: Wrong peaks, of a plan's checkpoints and what its segments keep: the first checkpoint not counted, a segment's own
#: input taken off, counted twice, that of the next counted, all checkpoints as large as the first.
COUNTS: tuple[Callable[[list[int], list[int]], int], ...] = (
    lambda inputs, own: most_alive([0, *inputs[1:]], own),
    lambda inputs, own: most_alive(inputs, [size - first for first, size in zip(inputs, own, strict=True)]),
    own_twice,
    lambda inputs, own: most_alive(inputs, [size + then for then, size in zip([*inputs[1:], 0], own, strict=True)]),
    lambda inputs, own: most_alive([inputs[0]] * len(inputs), own),
)


def misled(case: Case, count: Callable[[list[int], list[int]], int]) -> float:
    """The smallest peak of a plan that is among the best by a wrong `count`."""
    layers = len(case["arguments"][0])
    plans = [[0, *(each for each in range(1, layers) if number >> each & 1)] for number in range(0, 2**layers, 2)]
    counted = [count(*parts(plan, case)) for plan in plans]
    least = min(counted)
    return min(peak_of(plan, case) for plan, each in zip(plans, counted, strict=True) if each == least)


def find_peak(observed: Observed) -> Finding | None:
    starts, peak = answer(observed)
    return compare(peak, peak_of(starts, observed.case), f"the peak of the returned plan; {observed.words}")


def find_best(observed: Observed) -> Finding | None:
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
    kept, inputs = each.case["arguments"]
    layers = range(len(kept))
    own = {sum(kept[start : end + 1]) - inputs[start] for start in layers for end in layers[start:]}
    return never_freed(answer(each)[0], each.case) <= min(bound + fewest(each.case, bound) for bound in own)


def fewest(case: Case, bound: float) -> float:
    """The fewest bytes of checkpoints of a plan whose segments keep at most `bound` beside their own."""
    kept, inputs = case["arguments"]
    before, found = [0, *accumulate(kept)], [0.0] + [math.inf] * len(kept)
    for end in range(1, len(found)):
        starts = (start for start in range(end) if before[end] - before[start] - inputs[start] <= bound)
        found[end] = min((found[start] + inputs[start] for start in starts), default=math.inf)
    return found[-1]


def peak_is(theory: Callable[[Sequence[int], Case], float]) -> Sign:
    return every(lambda each: bool(answer(each)[1] == theory(answer(each)[0], each.case)))


def same_plan(observed: Observed, other: Any) -> bool:
    return bool(answer(observed)[0] == other[0])


PEAKS = {
    "checkpoints never freed": peak_is(never_freed),
    "live segment forgotten": peak_is(lambda starts, case: sum(parts(starts, case)[0])),
    "checkpoints forgotten": peak_is(lambda starts, case: max(parts(starts, case)[1])),
    "own input twice": peak_is(lambda starts, case: own_twice(*parts(starts, case))),
    "everything kept": peak_is(lambda starts, case: sum(case["arguments"][0])),
}
PLANS: Wrong = {  # others are known by the bank's programs
    "segments of equal length": every(is_even),
    "as long as they may be": every(
        lambda each: answer(each)[0] == filled(each.case, peak_of(answer(each)[0], each.case))
    ),
    "checkpoints never freed": every(best_if_never_freed),
    "every plan tried": (NEVER_ENDS, raised("MemoryError")),
}


def best_plan(points: int, name: str, layers: str, where: str) -> Check:
    words = f"no plan has a smaller peak, for {layers}"
    return order(points, name, words, find_best, wrong=PLANS, where=where, kind="memory", agrees=same_plan)


PEAK = "the peak is that of the plan that is returned with it, for up to 12 layers"
EXERCISE = on_paper(
    "activations.3", "best_cuts", "Where to cut", draw,
    order(2, "peak", PEAK, find_peak, wrong=PEAKS, where="few", kind="memory"),
    best_plan(3, "best plan", "up to 12 layers", "few"),
    best_plan(1, "many layers", "40 layers", "not few"),
)  # fmt: skip
