"""activations.1: the bytes that one layer keeps, part by part, on paper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dtlib.grading.checks.on_paper import mistake, own_formula
from dtlib.grading.compare import answer, compare, right_only_if, show
from dtlib.grading.exercise import Case, Check, Exercise, Finding, FormError, Run, describe_case

PARTS = ("attention", "matrix", "mlp", "norms")
_LOG_SUM_EXP_BYTES = 4


def _draw(rng: np.random.Generator) -> list[dict[str, Any]]:
    cases = []
    for element, mask, flash in ((2, 1, False), (4, 1, False), (4, 4, False), (2, 1, True), (4, 2, True)):
        heads = int(rng.choice([6, 10, 12, 20, 24]))
        hidden = heads * int(rng.choice([64, 80, 128]))
        seq, micro_batch = int(rng.choice([384, 640, 1536, 2560])), int(rng.choice([3, 5, 7]))
        words = (
            f"s={seq}, b={micro_batch}, h={hidden}, a={heads}, {element} B an element, {mask} B in a mask"
            f"{', flash' if flash else ''}"
        )
        cases.append({"arguments": [seq, micro_batch, hidden, heads, element, mask, flash], "words": words})
    return cases


Count = Callable[[int, int, int], float]
"""Bytes from (elements of one s·b·h tensor, width of an element, width in a mask)."""


def _attention(tokens_h: int, element: int, mask: int) -> float:
    return tokens_h * (5 * element + mask)


def _mlp(tokens_h: int, element: int, mask: int) -> float:
    return tokens_h * (9 * element + mask)


def _norms(tokens_h: int, element: int, mask: int) -> float:
    return tokens_h * 2 * element


def part_bytes(case: Case, part: str) -> int:
    """What the layer keeps for one of `PARTS`."""
    seq, micro_batch, _, heads, element, mask, flash = case["arguments"]
    if part == "matrix":
        kept = _LOG_SUM_EXP_BYTES if flash else seq * (2 * element + mask)
        return int(heads * seq * micro_batch * kept)
    return int(_with({"attention": _attention, "mlp": _mlp, "norms": _norms}[part])(case))


def _with(count: Count) -> Callable[[Case], float]:
    def bytes_of(case: Case) -> float:
        seq, micro_batch, hidden, _, element, mask, _ = case["arguments"]
        return count(seq * micro_batch * hidden, element, mask)

    return bytes_of


def _part(run: Run, part: str) -> Any:
    value = answer(run)
    if not isinstance(value, dict) or part not in value:
        raise FormError(show(value), f"a dict with the keys {', '.join(PARTS)}")
    return value[part]


def _inspect(part: str) -> Callable[[Run], Finding | None]:
    def inspect(run: Run) -> Finding | None:
        return compare(_part(run, part), part_bytes(run.case, part), f"{part}; {describe_case(run.case)}")

    return inspect


def _gives(part: str, count: Count) -> Any:
    return _matches(part, _with(count))


def _matches(part: str, wrong: Callable[[Case], Any]) -> Any:
    def fits(failing: Any, passing: Any) -> bool:
        back = [run for run in (*failing, *passing) if run.trouble is None]
        told = [(run, wrong(run.case)) for run in back]
        told = [(run, value) for run, value in told if value is not None]
        return any(run in failing for run, _ in told) and all(
            abs(_part(run, part) - value) <= 1e-9 * abs(value) for run, value in told
        )

    return fits


def _matrix(full: Callable[[int, int, int, int, int, int], float]) -> Callable[[Case], Any]:
    """Wrong bytes of the attention matrix, told by the cases without flash attention."""

    def wrong(case: Case) -> float | None:
        *sizes, flash = case["arguments"]
        return None if flash else full(*sizes)

    return wrong


def _off(part: str, factor: float) -> Any:
    return _matches(part, lambda case: factor * part_bytes(case, part))


_ALWAYS_TWO = mistake(
    "always two bytes",
    right_only_if(lambda case: case["arguments"][4] == 2),
    "It is right for elements of 2 bytes, and only there. What if the layer computes in fp32?",
)

_LAYER_CHECKS = (
    Check(
        "attention",
        "memory",
        2,
        "what attention keeps beside the matrix",
        _inspect("attention"),
        mistakes=(
            mistake(
                "the input three times",
                _gives("attention", lambda n, e, m: n * (7 * e + m)),
                "Three matrices multiply one and the same tensor. How often does it have to be there?",
            ),
            mistake(
                "mask as wide as an element",
                _gives("attention", lambda n, e, m: n * 6 * e),
                "The mask of the dropout is as wide as an element here. What does a mask have to say about a neuron?",
            ),
            mistake(
                "no mask",
                _gives("attention", lambda n, e, m: n * 5 * e),
                "Behind the last matrix some outputs are dropped. How does backward know which?",
            ),
            mistake(
                "the last matrix forgotten",
                _gives("attention", lambda n, e, m: n * (4 * e + m)),
                "Queries, keys, values and where they come from are counted. What does the matrix behind the heads "
                "multiply?",
            ),
            mistake(
                "queries, keys and values alone",
                _gives("attention", lambda n, e, m: n * (3 * e + m)),
                "Only what is multiplied between tokens is counted. There are matrices before that and after it.",
            ),
            mistake(
                "micro-batch forgotten",
                _matches("attention", lambda case: part_bytes(case, "attention") / case["arguments"][1]),
                "This is one sequence of the micro-batch.",
            ),
            _ALWAYS_TWO,
        ),
    ),
    Check(
        "matrix",
        "memory",
        2,
        "what is kept of the attention matrix, with flash attention and without",
        _inspect("matrix"),
        mistakes=(
            mistake(
                "heads forgotten",
                _matches("matrix", lambda case: part_bytes(case, "matrix") / case["arguments"][3]),
                "One matrix for all heads. Does each head look at the same tokens?",
            ),
            mistake(
                "only before dropout",
                _matches("matrix", _matrix(lambda s, b, h, a, e, m: a * s * s * b * (e + m))),
                "The softmax's result and the mask are there. What does the product with the values multiply?",
            ),
            mistake(
                "scores too",
                _matches("matrix", _matrix(lambda s, b, h, a, e, m: a * s * s * b * (3 * e + m))),
                "One matrix too many: the derivative of a softmax can be told from its result. Who needs its input?",
            ),
            mistake(
                "no mask",
                _matches("matrix", _matrix(lambda s, b, h, a, e, m: a * s * s * b * 2 * e)),
                "The matrix goes through dropout. How does backward know what was dropped?",
            ),
            mistake(
                "mask as wide as an element",
                _matches("matrix", _matrix(lambda s, b, h, a, e, m: a * s * s * b * 3 * e)),
                "The mask is as wide as an element here. How wide does the task say it is?",
            ),
            mistake(
                "one matrix",
                _matches("matrix", _matrix(lambda s, b, h, a, e, m: a * s * s * b * e)),
                "One matrix of s·s numbers a head. It goes through softmax and through dropout before it meets the "
                "values: who of the three needs what?",
            ),
            mistake(
                "a matrix in spite of flash",
                right_only_if(lambda case: not case["arguments"][6]),
                "With the matrix it is right, with flash attention it is not. What is all that it keeps of a row of "
                "scores, and in which type?",
            ),
            mistake(
                "linear in s",
                _matches("matrix", _matrix(lambda s, b, h, a, e, m: a * s * b * (2 * e + m))),
                "Every token looks at how many?",
            ),
            _ALWAYS_TWO,
        ),
    ),
    Check(
        "mlp",
        "memory",
        1,
        "what the MLP keeps",
        _inspect("mlp"),
        mistakes=(
            mistake(
                "the GELU forgotten",
                _gives("mlp", lambda n, e, m: n * (5 * e + m)),
                "Both matrices have their inputs. What does the non-linearity between them need to find its slope?",
            ),
            mistake(
                "no mask",
                _gives("mlp", lambda n, e, m: n * 9 * e),
                "Behind the last matrix some outputs are dropped. How does backward know which?",
            ),
            mistake(
                "mask as wide as an element",
                _gives("mlp", lambda n, e, m: n * 10 * e),
                "The mask of the dropout is as wide as an element here. How wide does the task say it is?",
            ),
            mistake(
                "width h throughout",
                _gives("mlp", lambda n, e, m: n * (3 * e + m)),
                "Everything has the width h here. How wide is the layer between the two matrices?",
            ),
            mistake(
                "the output too",
                _gives("mlp", lambda n, e, m: n * (10 * e + m)),
                "One tensor of width h too many. Does an addition need its summands to find its derivative?",
            ),
            _ALWAYS_TWO,
        ),
    ),
    Check(
        "norms",
        "memory",
        1,
        "what the two norms keep",
        _inspect("norms"),
        mistakes=(
            mistake(
                "one norm",
                _off("norms", 1 / 2),
                "One tensor. How many norms has the layer, and do they read the same numbers?",
            ),
            mistake(
                "input and output",
                _off("norms", 2),
                "Input and output of both norms. The outputs have been counted where?",
            ),
            mistake(
                "elements for bytes",
                _matches("norms", lambda case: part_bytes(case, "norms") / case["arguments"][4]),
                "These are elements. How wide is one?",
            ),
            _ALWAYS_TWO,
        ),
    ),
)

LAYER = Exercise(
    id="activations.1",
    function="kept_by_layer",
    title="What a layer keeps",
    harness="paper.call",
    draw=_draw,
    checks=(own_formula("kept_by_layer"), *_LAYER_CHECKS),
)
