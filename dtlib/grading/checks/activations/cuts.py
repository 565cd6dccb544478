"""activations.3: where to cut unequal layers into segments, on paper."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from dtlib.grading import plain
from dtlib.grading.checks.on_paper import mistake, own_formula, part_of
from dtlib.grading.compare import compare, every_run, show
from dtlib.grading.exercise import Check, Exercise, Finding, FormError, Run, describe_case

_NAMES = "starts, peak"
_FEW = 14
Sizes = Sequence[int]


def _draw(rng: np.random.Generator) -> list[dict[str, Any]]:
    cases = []
    for kind, layers in (("equal layers", 12), ("unequal layers", 9), ("narrowing layers", 11), ("many layers", 40)):
        inputs = rng.integers(2, 9, layers)
        kept = inputs + rng.integers(5, 60, layers)
        if kind == "equal layers":
            inputs[:], kept[:] = inputs[0], 3 * inputs[0] + int(rng.integers(0, 2 * inputs[0]))
        if kind == "narrowing layers":  # large inputs first, the most to keep in the middle
            inputs = np.sort(rng.integers(4, 40, layers))[::-1].copy()
            kept = inputs + rng.integers(2, 60, layers)
            kept[layers // 2] += 120
        told = ", ".join(f"{a}/{i}" for a, i in zip(kept, inputs, strict=True))
        words = f"{layers} {kind.split()[0]} layers" + (f", kept/input {told}" if layers <= _FEW else "")
        cases.append({"arguments": [kept.tolist(), inputs.tolist()], "words": words})
    return cases


def peak_of(starts: Sizes, kept: Sizes, inputs: Sizes) -> int:
    """The most bytes that are alive at one time in backward, with segments that begin at `starts`."""
    ends = [*starts[1:], len(kept)]
    alive, most = 0, 0
    for start, end in zip(starts, ends, strict=True):
        most = max(most, alive + sum(kept[start:end]))
        alive += inputs[start]
    return most


def best_peak(kept: Sizes, inputs: Sizes) -> int:
    """The smallest peak of all plans."""
    return peak_of(best_starts(kept, inputs), kept, inputs)


def best_starts(kept: Sizes, inputs: Sizes) -> list[int]:
    """A plan with the smallest peak.

    What lies before a segment adds the same to all that lies behind it, so the best plan for the layers from j on does
    not depend on how the others were cut.
    """
    best: dict[int, tuple[float, list[int]]] = {len(kept): (0.0, [])}
    for start in reversed(range(len(kept))):
        best[start] = min(
            (max(sum(kept[start:end]), inputs[start] + best[end][0] if best[end][1] else 0), [start, *best[end][1]])
            for end in range(start + 1, len(kept) + 1)
        )
    return best[0][1]


def _starts(run: Run) -> list[int]:
    starts = part_of(run, 0, _NAMES)
    if isinstance(starts, np.ndarray):
        starts = starts.tolist()
    layers = len(run.case["arguments"][0])
    whole = isinstance(starts, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in starts)
    if not whole or not starts or starts[0] != 0 or sorted(set(starts)) != starts or starts[-1] >= layers:
        raise FormError(
            f"the starts {show(starts)}", f"layers from 0 to {layers - 1} in increasing order, the first of them 0"
        )
    return list(starts)


def _inspect_peak(run: Run) -> Finding | None:
    wanted = peak_of(_starts(run), *run.case["arguments"])
    return compare(part_of(run, 1, _NAMES), wanted, f"the peak of the returned plan; {describe_case(run.case)}")


def _inspect_best(run: Run) -> Finding | None:
    seen, wanted = peak_of(_starts(run), *run.case["arguments"]), best_peak(*run.case["arguments"])
    if seen == wanted:
        return None
    return Finding(
        f"a plan with a peak of {seen}", str(wanted), f"starts {show(_starts(run))}; {describe_case(run.case)}"
    )


# Ways to get it wrong: other peaks, and other plans


def _segments(starts: Sizes, sizes: Sizes) -> list[int]:
    return [sum(sizes[start:end]) for start, end in zip(starts, [*starts[1:], len(sizes)], strict=True)]


def _peak_gives(wrong: Callable[[list[int], Sizes, Sizes], float]) -> Any:
    """Recognise another peak of the returned plan, in all runs that came back."""

    def fits(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
        back = [run for run in (*failing, *passing) if run.trouble is None]
        return bool(back) and all(
            plain.is_number(part_of(run, 1, _NAMES))
            and part_of(run, 1, _NAMES) == wrong(_starts(run), *run.case["arguments"])
            for run in back
        )

    return fits


def _never_freed(starts: Sizes, kept: Sizes, inputs: Sizes) -> int:
    """All checkpoints, and the largest segment beside its own."""
    own = [size - inputs[start] for start, size in zip(starts, _segments(starts, kept), strict=True)]
    return sum(inputs[start] for start in starts) + max(own)


def _twice(starts: Sizes, kept: Sizes, inputs: Sizes) -> int:
    held = accumulate(inputs[start] for start in starts)
    return max(before + size for before, size in zip(held, _segments(starts, kept), strict=True))


def _plan_is(wrong: Callable[[Sizes, Sizes], list[int]]) -> Any:
    """Recognise a plan, in all runs that came back."""

    def fits(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
        back = [run for run in (*failing, *passing) if run.trouble is None]
        return bool(back) and all(_starts(run) == wrong(*run.case["arguments"]) for run in back)

    return fits


def _every(layers: int, k: int) -> list[int]:
    return list(range(0, layers, k))


def best_every(kept: Sizes, inputs: Sizes, peak: Callable[[Sizes, Sizes, Sizes], float] = peak_of) -> list[int]:
    """The best of the plans with segments of equal length."""
    plans = [_every(len(kept), k) for k in range(1, len(kept) + 1)]
    return min(plans, key=lambda starts: peak(starts, kept, inputs))


def _is_even(starts: Sizes, kept: Sizes, inputs: Sizes) -> bool:
    steps = {after - before for before, after in pairwise(starts)}
    return len(steps) <= 1 and (not steps or len(kept) - starts[-1] <= max(steps))


def _root(kept: Sizes, inputs: Sizes) -> list[int]:
    return _every(len(kept), max(1, round(math.sqrt(len(kept)))))


def _all_even(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
    back = [run for run in (*failing, *passing) if run.trouble is None]
    return bool(back) and all(_is_even(_starts(run), *run.case["arguments"]) for run in back)


def _best_if_never_freed(run: Run) -> bool:
    """Whether the plan is one that would be best if no checkpoint were freed before the end."""
    starts, (kept, inputs) = _starts(run), run.case["arguments"]
    return _never_freed(starts, kept, inputs) <= _never_freed(best_starts(kept, inputs), kept, inputs)


_PEAK = Check(
    "peak",
    "memory",
    2,
    "the peak is that of the plan that is returned with it",
    _inspect_peak,
    mistakes=(
        mistake(
            "checkpoints never freed",
            _peak_gives(_never_freed),
            "All checkpoints are counted with the largest segment, wherever it lies. Backward begins at the end: which "
            "of them are gone when it comes to an early segment?",
        ),
        mistake(
            "live segment forgotten",
            _peak_gives(lambda starts, kept, inputs: sum(inputs[start] for start in starts)),
            "These are the checkpoints alone. What is there while a segment goes back?",
        ),
        mistake(
            "checkpoints forgotten",
            _peak_gives(lambda starts, kept, inputs: max(_segments(starts, kept))),
            "This is the largest segment alone. What has been waiting beside it since the forward pass?",
        ),
        mistake(
            "own input twice",
            _peak_gives(_twice),
            "A segment's first input is counted as a checkpoint, and again among what its first layer keeps. How often "
            "is it there?",
        ),
        mistake(
            "everything kept",
            _peak_gives(lambda starts, kept, inputs: sum(kept)),
            "This is a pass without checkpoints. Which of these bytes are computed again, and when?",
        ),
    ),
)

_BEST_MISTAKES = (
    mistake(
        "√l",
        _plan_is(_root),
        "A checkpoint every √l layers: a rule for layers that are alike and keep no more than their input. What do "
        "yours keep?",
    ),
    mistake(
        "one segment",
        _plan_is(lambda kept, inputs: [0]),
        "One segment: all of it is computed again at once, and nothing is saved. What does a second one cost, and what "
        "does it spare?",
    ),
    mistake(
        "a segment for each layer",
        _plan_is(lambda kept, inputs: list(range(len(kept)))),
        "Every layer for itself is the least for a live segment, and the most for what waits. What lies between?",
    ),
    mistake(
        "segments of equal length",
        _all_even,
        "These plans cut every k layers. Two things speak against it, and one even where all layers are alike: how "
        "many checkpoints are still there when the first segment goes back, and how many when the last one does?",
    ),
    mistake(
        "checkpoints never freed",
        every_run(_best_if_never_freed),
        "This plan would be the best if every checkpoint stayed until the end of backward. How long is it needed?",
    ),
)

CUTS = Exercise(
    id="activations.3",
    function="best_cuts",
    title="Where to cut",
    harness="paper.call",
    draw=_draw,
    checks=(
        own_formula("best_cuts"),
        _PEAK,
        Check(
            "best plan",
            "memory",
            3,
            "no plan has a smaller peak, for up to 12 layers",
            _inspect_best,
            _BEST_MISTAKES,
            applies=lambda case: len(case["arguments"][0]) <= _FEW,
        ),
        Check(
            "many layers",
            "memory",
            1,
            "no plan has a smaller peak, for 40 layers",
            _inspect_best,
            _BEST_MISTAKES,
            applies=lambda case: len(case["arguments"][0]) > _FEW,
        ),
    ),
)
