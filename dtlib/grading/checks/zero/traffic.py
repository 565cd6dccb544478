"""zero.2: what each stage sends in a step, on paper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dtlib.grading.checks.on_paper import gives_part, inspect_part, mistake, own_formula
from dtlib.grading.compare import any_of, right_only_if
from dtlib.grading.exercise import Case, Check, Exercise

_PAIR = "gradient_bytes, weight_bytes"


def _draw(rng: np.random.Generator) -> list[dict[str, Any]]:
    cases: list[tuple[int, ...]] = [(10**9, 8, stage, 1, 2, 2) for stage in (1, 0, 3)]
    for stage in (0, 1, 2, 3):
        cases.append(_some(rng, stage, 1))
        cases.append(_some(rng, stage, int(rng.integers(2, 9))))
    cases.append((10**6, 1, 3, 4, 2, 2))
    words = "{:,} parameters, {} ranks, stage {}, {} micro-batches, gradients of {} B, weights of {} B"
    return [{"arguments": list(each), "words": words.format(*each)} for each in cases]


def _some(rng: np.random.Generator, stage: int, micro_batches: int) -> tuple[int, ...]:
    n = int(rng.choice([4, 8, 16, 64]))
    width, other = ((4, 2), (2, 4))[int(rng.integers(0, 2))]
    return int(rng.integers(10, 900)) * 10**6, n, stage, micro_batches, width, other


def _answer(
    reduced: Callable[[int, int], float], gathered: Callable[[int, int], float], share: Callable[[int], float]
) -> Callable[[Case], tuple[float, float]]:
    """Factors of (stage, micro-batches) times the share of N times the full bytes."""

    def answer(case: Case) -> tuple[float, float]:
        num_params, n, stage, micro_batches, of_gradient, of_weight = case["arguments"]
        part = share(n) * num_params
        return reduced(stage, micro_batches) * part * of_gradient, gathered(stage, micro_batches) * part * of_weight

    return answer


def _share(n: int) -> float:
    return (n - 1) / n


def _reduced(stage: int, micro_batches: int) -> float:
    return (2, 1, micro_batches, micro_batches)[stage]


def _gathered(stage: int, micro_batches: int) -> float:
    return (0, 1, 1, 2 * micro_batches)[stage]


_expected = _answer(_reduced, _gathered, _share)
Factor = Callable[[int, int], float]


def _like(part: int, factor: Factor, share: Callable[[int], float] = _share) -> Any:
    wrong = _answer(factor, factor, share)
    return gives_part(lambda case: wrong(case)[part], part, _PAIR)


def _of(part: int, other: Callable[[Case, float], float]) -> Any:
    return gives_part(lambda case: other(case, _expected(case)[part]), part, _PAIR)


def _shared(part: int, factor: Factor) -> Any:
    """The mistakes that both parts may have."""
    return (
        mistake(
            "full buffers",
            _like(part, factor, lambda n: 1.0),
            "This sends whole buffers. Which share of them does a rank have already, and so need not send or receive?",
        ),
        mistake(
            "the own share only",
            _like(part, factor, lambda n: 1 / n),
            "This is the size of one shard. To how many ranks does it travel, or from how many does it come?",
        ),
        mistake(
            "all ranks together",
            _of(part, lambda case, value: case["arguments"][1] * value),
            "This is what all ranks together send. The task asks for one of them.",
        ),
        mistake(
            "widths exchanged",
            _of(part, lambda case, value: value * case["arguments"][5 - part] / case["arguments"][4 + part]),
            "The bytes of the other one were taken. How wide is what travels here?",
        ),
        mistake(
            "pair turned round",
            gives_part(lambda case: _expected(case)[1 - part], part, _PAIR),
            "The gradients come first in the pair, then the weights.",
        ),
        mistake(
            "elements for bytes",
            _of(part, lambda case, value: value / case["arguments"][4 + part]),
            "These are elements. How many bytes does each of them take on the wire?",
        ),
    )


_GRADIENTS = (
    mistake(
        "all-reduce at every stage",
        any_of(
            _like(0, lambda stage, micro: 2 * max(1, _reduced(stage, micro) if stage >= 2 else 1)),
            _like(0, lambda stage, micro: 2),
        ),
        "This all-reduces at every stage. Which half of an all-reduce is enough where a rank updates its own share "
        "only?",
    ),
    mistake(
        "one phase at stage 0",
        _like(0, lambda stage, micro: (1, 1, micro, micro)[stage]),
        "At stage 0 every rank needs the whole averaged gradient. How many phases does that take?",
    ),
    mistake(
        "a sync for each micro-batch",
        any_of(
            _like(0, lambda stage, micro: (2 * micro, micro, micro, micro)[stage]),
            _like(0, lambda stage, micro: (2, micro, micro, micro)[stage]),
        ),
        "Stages 0 and 1 pay here for every micro-batch. They keep whole gradients: when must the sum be exchanged?",
    ),
    mistake(
        "one sync at every stage",
        _like(0, lambda stage, micro: (2, 1, 1, 1)[stage]),
        "Stages 2 and 3 send once here, whatever the number of micro-batches. Where would a rank keep the gradients of "
        "the first micro-batch until the last?",
    ),
    *_shared(0, _reduced),
    mistake(
        "right for one micro-batch only",
        right_only_if(lambda case: bool(case["arguments"][3] == 1)),
        "With one micro-batch it is right, with several it is not. What does a stage do with gradients that it may not "
        "keep?",
    ),
)
_WEIGHTS = (
    mistake(
        "gathered once at stage 3",
        any_of(
            _like(1, lambda stage, micro: (0, 1, 1, micro)[stage]), _like(1, lambda stage, micro: (0, 1, 1, 1)[stage])
        ),
        "Stage 3 frees a layer after forward. What does backward need of it?",
    ),
    mistake(
        "gathered once for all micro-batches",
        _like(1, lambda stage, micro: (0, 1, 1, 2)[stage]),
        "This gathers for one micro-batch. What does a rank of stage 3 still hold when the next one begins?",
    ),
    mistake(
        "gathered for each micro-batch",
        _like(1, lambda stage, micro: (0, micro, micro, 2 * micro)[stage]),
        "Stages 1 and 2 gather after every micro-batch here. When do their weights change?",
    ),
    mistake(
        "gathered at stage 0",
        any_of(
            _like(1, lambda stage, micro: (1, 1, 1, 2 * micro)[stage]),
        ),
        "At stage 0 weights travel here. What does a rank not know about them after its own update?",
    ),
    mistake(
        "three gathers",
        _like(1, lambda stage, micro: (0, 1, 1, 3 * micro)[stage]),
        "The 3 of stage 3 counts all that is sent, gradients too. How many of the three are weights?",
    ),
    *_shared(1, _gathered),
    mistake(
        "right for one micro-batch only",
        right_only_if(lambda case: bool(case["arguments"][3] == 1)),
        "With one micro-batch it is right, with several it is not. When do the weights change, and who still has them?",
    ),
)

TRAFFIC = Exercise(
    id="zero.2",
    function="sent_bytes",
    title="What a stage sends",
    harness="paper.call",
    draw=_draw,
    checks=(
        own_formula("sent_bytes"),
        Check(
            "gradients",
            "traffic",
            3,
            "bytes of gradients that a rank sends",
            inspect_part(lambda case: _expected(case)[0], 0, _PAIR),
            _GRADIENTS,
        ),
        Check(
            "weights",
            "traffic",
            3,
            "bytes of weights that a rank sends",
            inspect_part(lambda case: _expected(case)[1], 1, _PAIR),
            _WEIGHTS,
        ),
    ),
)
