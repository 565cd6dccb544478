"""activations.1: the bytes that one layer keeps, part by part, on paper."""

from __future__ import annotations

from typing import Any

import numpy as np

from dtlib.grading.exercise import Exercise
from dtlib.grading.kinds import every, own_work, values
from dtlib.grading.seen import Case

PARTS = {
    "attention": (2, "what attention keeps beside the matrix"),
    "matrix": (2, "what is kept of the attention matrix, with flash attention and without"),
    "mlp": (1, "what the MLP keeps"),
    "norms": (1, "what the two norms keep"),
}
LOG_SUM_EXP_BYTES = 4


def draw(rng: np.random.Generator) -> list[dict[str, Any]]:
    """Elements of 2 and 4 bytes, masks as wide and narrower, without flash attention and with it."""
    cases = []
    for element, mask, flash in ((2, 1, False), (4, 1, False), (4, 4, False), (2, 1, True), (4, 2, True)):
        heads = int(rng.choice([6, 10, 12, 20, 24]))
        hidden = heads * int(rng.choice([64, 80, 128]))
        seq, micro_batch = int(rng.choice([384, 640, 1536, 2560])), int(rng.choice([3, 5, 7]))
        words = f"s={seq}, b={micro_batch}, h={hidden}, a={heads}, {element} B an element, {mask} B in a mask"
        cases.append(
            {
                "arguments": [seq, micro_batch, hidden, heads, element, mask, flash],
                "words": words + (", flash" if flash else ""),
                "is": {"flash": flash},
            }
        )
    return cases


def right(case: Case) -> dict[str, int]:
    """Bytes of each part."""
    seq, micro_batch, hidden, heads, element, mask, flash = case["arguments"]
    entries, rows = seq * micro_batch * hidden, heads * seq * micro_batch
    return {
        "attention": entries * (5 * element + mask),
        "matrix": rows * (LOG_SUM_EXP_BYTES if flash else seq * (2 * element + mask)),
        "mlp": entries * (9 * element + mask),
        "norms": entries * 2 * element,
    }


def part(name: str, points: int, words: str) -> Any:
    """The check of one part. Other mistakes than this are those of the bank's programs."""
    wrong = {"a matrix in spite of flash": every(lambda each: each.case["is"]["flash"])} if name == "matrix" else {}
    keys = f"the keys {', '.join(PARTS)}"
    return values(points, name, words, right, part=name, parts=keys, kind="memory", wrong=wrong)


EXERCISE = Exercise(
    id="activations.1",
    function="kept_by_layer",
    title="What a layer keeps",
    harness="paper.call",
    draw=draw,
    checks=(own_work("kept_by_layer", "your own formula"), *(part(name, *told) for name, told in PARTS.items())),
)
