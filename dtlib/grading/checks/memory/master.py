"""memory.5: bf16 weights with an fp32 master copy, on real tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dtlib.grading.checks.on_paper import NOT_YOUR_OWN, called_library, mistake
from dtlib.grading.compare import compare, every_run, some_rank
from dtlib.grading.exercise import Case, Check, Exercise, Finding, Run, describe_case

from .training import (
    AdamW,
    Tensors,
    aside_bytes,
    bf16,
    drawn_case,
    half_step,
    inspect_aside,
    inspect_bytes,
    largest_bytes,
    num_params,
    rest_bytes,
    start,
)

_REST, _STEP, _BOTH = 14, 18, 20  # bytes a parameter: between steps, in a step, with both copies of all gradients
_LEAST = 13.5
_SLACK = 0.02


def _draw(rng: np.random.Generator) -> list[dict[str, Any]]:
    widths = [int(rng.integers(4, 9)), int(rng.integers(5, 12)), 1]
    rate, decay = round(float(rng.uniform(0.02, 0.05)), 3), round(float(rng.uniform(0.01, 0.1)), 2)
    small = round(float(rng.uniform(2.4e-4, 4e-4)), 6)
    return [
        drawn_case(rng, widths, 5, learning_rate=rate, weight_decay=decay, words=f"5 steps, learning rate {rate:g}"),
        drawn_case(
            rng,
            widths,
            24,
            learning_rate=small,
            weight_decay=0.0,
            words=f"24 steps, learning rate {small:g}",
            weights_around=0.55,
        ),
        drawn_case(
            rng,
            [192] * 21 + [1],
            2,
            learning_rate=1e-3,
            weight_decay=decay,
            words="2 steps, 20 layers of width 192",
            large=True,
        ),
    ]


def _is_small(case: Case) -> bool:
    return float(case["learning_rate"]) < 5e-4


def _seen_weights(run: Run) -> list[Tensors]:
    return [[np.asarray(each, np.float64) for each in step] for step in run.ranks[0]["weights"]]


def _seen_gradients(run: Run) -> list[Tensors]:
    return [[np.asarray(each, np.float64) for each in step] for step in run.ranks[0]["gradients"]]


def _told(run: Run, path: list[Tensors]) -> list[Tensors]:
    return path[-1:] if run.case["large"] else path


def masters(run: Run, *, begin: Callable[[Any], Any] | None = None, summed: bool = False) -> list[Tensors]:
    """The fp32 weights after each step that is told, by AdamW from the gradients that backward handed out.

    `begin` changes the weights at the start; `summed` adds each step's gradients to all that came before.
    """
    weights = [begin(each) if begin else each for each in start(run.case)]
    optimizer, path = AdamW(run.case), []
    before = [np.zeros_like(each) for each in weights]
    for found in _seen_gradients(run):
        before = [bf16(one + two) for one, two in zip(before, found, strict=True)] if summed else found
        weights = optimizer.step(weights, before, range(len(weights)))
        path.append(weights)
    return _told(run, path)


def _rebuilt(run: Run) -> list[Tensors]:
    """As if the master were made anew from the weights at every step, and only the moments were kept."""
    weights, optimizer, path = [bf16(each) for each in start(run.case)], AdamW(run.case), []
    for found in _seen_gradients(run):
        weights = [bf16(each) for each in optimizer.step(weights, found, range(len(weights)))]
        path.append(weights)
    return _told(run, path)


def _forgetful(run: Run) -> list[Tensors]:
    """As if the optimizer were made anew at every step."""
    weights, path = start(run.case), []
    for found in _seen_gradients(run):
        weights = AdamW(run.case).step(weights, found, range(len(weights)))
        path.append(weights)
    return _told(run, path)


def _are_rounded(seen: list[Tensors], path: list[Tensors], case: Case) -> bool:
    return all(
        _off(one, two, case) is None
        for step, wanted in zip(seen, path, strict=True)
        for one, two in zip(step, wanted, strict=True)
    )


def _off(seen: Any, master: Any, case: Case) -> int | None:
    """The first element that is not the bf16 number nearest to the master's, None if there is none.

    The master in fp32 differs from that in double precision by some 1e-7 of itself and of an update.
    """
    if seen.shape != master.shape:
        return 0
    allowed = half_step(master) + 1e-6 * np.abs(master) + 1e-3 * case["learning_rate"]
    off = ~(np.abs(seen - master) <= allowed)
    return int(np.argmax(off.ravel())) if off.any() else None


def _inspect_weights(run: Run) -> Finding | None:
    case, data = run.case, run.ranks[0]
    if any(formats != ["bfloat16"] for formats in data["formats"]):
        told = sorted({each for formats in data["formats"] for each in formats})
        return Finding(f"weights in {' and '.join(told)} after a step", "bfloat16", describe_case(case))
    seen, path = _seen_weights(run), masters(run)
    first = len(data["formats"]) if case["large"] else 1
    for number, (step, wanted) in enumerate(zip(seen, path, strict=True), first):
        for index, (one, two) in enumerate(zip(step, wanted, strict=True)):
            if _off(one, two, case) is not None:
                name = f"{index // 2 * 2}.{'bias' if index % 2 else 'weight'}"
                where = f"`{name}` after step {number}, {describe_case(case)}"
                return compare(one, bf16(two), where, rtol=0.0) or Finding("other weights", "those of AdamW", where)
    return None


def _follows(path: Callable[[Run], list[Tensors]]) -> Any:
    """Recognise a mistake by the weights that it gives, in every failing run that came back."""

    def fits(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
        back = [run for run in failing if run.trouble is None]
        return bool(back) and all(_are_rounded(_seen_weights(run), path(run), run.case) for run in back)

    return fits


def _stood_still(run: Run) -> bool:
    """Whether the weights are where they were at the start."""
    begin = [bf16(each) for each in start(run.case)]
    return all(np.array_equal(one, two) for step in _seen_weights(run) for one, two in zip(step, begin, strict=True))


def _moved_little(run: Run) -> bool:
    """Whether most of the weights that should have moved are where they were at the start."""
    begin, end, wanted = [bf16(each) for each in start(run.case)], _seen_weights(run)[-1], masters(run)[-1]
    should = [bf16(one) != two for one, two in zip(wanted, begin, strict=True)]
    stayed = [(one == two)[here] for one, two, here in zip(end, begin, should, strict=True)]
    return bool(np.concatenate(stayed).mean() > 0.8)


def _per_param(run: Run) -> float:
    return rest_bytes(run.ranks[0]) / num_params(run.case)


def _on_large(predicate: Callable[[Run], bool]) -> Any:
    """Recognise a mistake by the large network, where what is held for other things than parameters does not count."""

    def fits(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
        back = [run for run in (*failing, *passing) if run.trouble is None and run.case["large"]]
        return bool(back) and all(predicate(run) for run in back)

    return fits


def _no_copy(run: Run) -> bool:
    """Whether what is held between steps leaves no room for a master copy and moments in fp32, and has moments."""
    return _per_param(run) < 11 and bool(run.ranks[0]["rest"][-1]["optimizer"])


def _no_moments(run: Run) -> bool:
    return _per_param(run) < 11 and not run.ranks[0]["rest"][-1]["optimizer"]


def _in_other_format(run: Run) -> bool:
    return any(formats != ["bfloat16"] for formats in run.ranks[0]["formats"])


def _inspect_rest(run: Run) -> Finding | None:
    case, count = run.case, num_params(run.case)
    seen = rest_bytes(run.ranks[0])
    most = (_REST + _SLACK) * count
    return inspect_bytes(seen, most, _LEAST * count, case, "held between steps") or inspect_aside(run)


def peak_bound(case: Case) -> float:
    """18 bytes a parameter, and what Adam and a conversion need for one parameter after the other."""
    return (_STEP + 0.1) * num_params(case) + 4 * largest_bytes(case)


def _inspect_peak(run: Run) -> Finding | None:
    case, data, count = run.case, run.ranks[0], num_params(run.case)
    too_little = inspect_bytes(rest_bytes(data), np.inf, _LEAST * count, case, "held between steps")
    return too_little or inspect_bytes(data["peak"], peak_bound(case), 0, case, "at the peak") or inspect_aside(run)


def _inspect_own(run: Run) -> Finding | None:
    return called_library(run.ranks[0], "your own code")


_NO_COPY = mistake(
    "no master copy",
    _on_large(_no_copy),
    "There is no room for a master copy in what is held. Which number does an update add to, and how large must "
    "it be to change a number of 8 significant bits?",
)
_ASIDE = mistake(
    "kept out of torch's sight",
    every_run(lambda run: bool(aside_bytes(run.ranks[0], run.case))),
    "It lies in memory all the same. What has to be held between two steps, and what has not?",
)
_FP32 = mistake(
    "weights in fp32",
    every_run(_in_other_format),
    "The model does not compute in bf16. Which of the two copies does the forward pass read?",
)
_ROUNDED_FIRST = mistake(
    "copy of rounded weights",
    _follows(lambda run: masters(run, begin=bf16)),
    "The master copy began with weights that had been rounded already. What was the model's format before you "
    "changed it, and when is the copy taken?",
)
_ADDED_UP = mistake(
    "gradients add up",
    _follows(lambda run: masters(run, summed=True)),
    "Each step was made with the gradients of all steps so far. What does backward do with a `.grad` that is there?",
)
_NEVER_BACK = mistake(
    "never copied back",
    every_run(_stood_still),
    "The weights are those of the start after every step. What does the next forward pass read?",
)
_NO_MOMENTS = mistake(
    "no moments",
    _on_large(_no_moments),
    "There is no room for Adam's moments in what is held. What does Adam remember from one step to the next?",
)
_FORGETFUL = mistake(
    "optimizer made anew",
    _follows(_forgetful),
    "Every step is Adam's first step. Where do its moments live, and for how long?",
)

MASTER = Exercise(
    id="memory.5",
    function="with_master_copy",
    title="A step with a master copy",
    harness="memory.master_copy",
    draw=_draw,
    timeout_s=30.0,
    checks=(
        Check(
            "own work",
            "value",
            0,
            "`with_master_copy` does not call `dtlib.ranks`",
            _inspect_own,
            mistakes=NOT_YOUR_OWN,
            gate=True,
        ),
        Check(
            "weights",
            "value",
            2,
            "the bf16 weights after each step",
            _inspect_weights,
            applies=lambda case: not _is_small(case),
            mistakes=(_FP32, _NEVER_BACK, _FORGETFUL, _NO_COPY, _ADDED_UP, _ROUNDED_FIRST),
        ),
        Check(
            "small updates",
            "value",
            2,
            "updates too small for bf16",
            _inspect_weights,
            applies=_is_small,
            mistakes=(
                _FP32,
                mistake(
                    "small updates lost",
                    every_run(_moved_little),
                    "Most weights have not moved, though every update points the same way. Where do 24 steps add up "
                    "that are too small one by one?",
                ),
                _FORGETFUL,
                _ADDED_UP,
                _ROUNDED_FIRST,
            ),
        ),
        Check(
            "at rest",
            "memory",
            3,
            "what is held between steps",
            _inspect_rest,
            applies=lambda case: bool(case["large"]),
            mistakes=(
                _NO_COPY,
                _NO_MOMENTS,
                mistake(
                    "gradients kept",
                    some_rank(lambda data, case: data["rest"][-1]["gradients"] > 0.5 * num_params(case)),
                    "Gradients are held between two steps, zeros perhaps. Until when does anybody need them, and does "
                    "filling with zeros give memory back?",
                ),
                mistake(
                    "another copy in fp32",
                    every_run(lambda run: 3.5 <= _per_param(run) - _REST <= 4.5),
                    "Another 4 bytes a parameter are held. The model was in fp32 when it came: who still holds what "
                    "it was then, or another copy in fp32?",
                ),
                mistake(
                    "another copy in bf16",
                    every_run(lambda run: 1.5 <= _per_param(run) - _REST <= 2.5),
                    "Another 2 bytes a parameter are held. Which list or which name still holds on to something of "
                    "bf16?",
                ),
                _FP32,
                _ASIDE,
            ),
        ),
        Check(
            "peak",
            "memory",
            2,
            "the most that is held during a step",
            _inspect_peak,
            applies=lambda case: bool(case["large"]),
            mistakes=(
                _NO_COPY,
                _NO_MOMENTS,
                mistake(
                    "both copies of all gradients",
                    every_run(
                        lambda run: (
                            peak_bound(run.case)
                            < run.ranks[0]["peak"]
                            <= (_BOTH + 0.1) * num_params(run.case) + 4 * largest_bytes(run.case)
                            and _per_param(run) < _REST + 1
                        )
                    ),
                    "At one moment all gradients are there twice. Who needs the bf16 gradient of a parameter once its "
                    "fp32 one exists?",
                ),
                mistake(
                    "held from step to step",
                    every_run(lambda run: _per_param(run) > _REST + 1),
                    "What is held between the steps comes on top of everything. What was held there that nobody needs?",
                ),
                _ASIDE,
            ),
        ),
    ),
)
