"""activations.1: the bytes that one layer keeps, part by part, on paper."""

from functools import partial

from dtlib.grading.inputs import Case, Cases, Rng, call
from dtlib.grading.kinds import on_paper, values
from dtlib.grading.signs import every

LOG_SUM_EXP_BYTES = 4


def draw(rng: Rng) -> Cases:
    """Elements of 2 and 4 bytes, masks as wide and narrower, without flash attention and with it."""
    cases = []
    for element, mask, flash in ((2, 1, False), (4, 1, False), (4, 4, False), (2, 1, True), (4, 2, True)):
        heads = int(rng.choice([6, 10, 12, 20, 24]))
        hidden = heads * int(rng.choice([64, 80, 128]))
        seq, micro_batch = int(rng.choice([384, 640, 1536, 2560])), int(rng.choice([3, 5, 7]))
        words = f"s={seq}, b={micro_batch}, h={hidden}, a={heads}, {element} B an element, {mask} B in a mask"
        arguments = [seq, micro_batch, hidden, heads, element, mask, flash]
        cases.append(call(words + ", flash" * flash, arguments, flash=flash))
    return cases


def right(case: Case) -> dict[str, int]:
    seq, micro_batch, hidden, heads, element, mask, flash = case["arguments"]
    entries, rows = seq * micro_batch * hidden, heads * seq * micro_batch
    return {
        "attention": entries * (5 * element + mask),
        "matrix": rows * (LOG_SUM_EXP_BYTES if flash else seq * (2 * element + mask)),
        "mlp": entries * (9 * element + mask),
        "norms": entries * 2 * element,
    }


MATRIX = "what is kept of the attention matrix, with flash attention and without"
FLASH = {"a matrix in spite of flash": every(lambda each: each.case["is"]["flash"])}
part = partial(values, right=right, parts="the keys attention, matrix, mlp, norms", kind="memory")

EXERCISE = on_paper(
    "activations.1", "kept_by_layer", "What a layer keeps", draw,
    part(2, "attention", "what attention keeps beside the matrix", part="attention"),
    part(2, "matrix", MATRIX, part="matrix", wrong=FLASH),
    part(1, "mlp", "what the MLP keeps", part="mlp"),
    part(1, "norms", "what the two norms keep", part="norms"),
)  # fmt: skip
