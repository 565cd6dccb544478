"""tp.1: what a micro-batch all-reduces, and what a rank sends, on paper."""

from functools import partial
from typing import Any

from dtlib.grading.exercises.inputs import Case, Cases, Rng, call
from dtlib.grading.exercises.kinds import on_paper, values
from dtlib.theory import collectives, tp

TRIPLE = "in_layers, outside, sent_bytes"
LOSS_BYTES = 4  # of float32


def draw(rng: Rng) -> Cases:
    """GPT-3 on a node, and bytes that are not whole; one rank, two, a power of two and none, with recompute or not;
    elements as wide as the loss's, and narrower; narrow models of few layers, in whose bill the loss counts."""
    cases = [case(1, 2048, 12288, 51200, 96, 8, 2, False), case(2, 256, 160, 50_000, 2, 3, 2, False)]
    for ranks, element_bytes, recompute in (
        (1, 2, False), (2, 4, True), (4, 2, True), (3, 2, False), (int(rng.choice([5, 6, 7])), 1, True), (16, 4, False),
    ):  # fmt: skip
        batch, seq = int(rng.choice([2, 3, 5, 6])), 128 * int(rng.integers(2, 20))
        hidden, vocab = 64 * int(rng.integers(3, 20)) + 32, int(rng.integers(5_000, 90_000))
        cases.append(case(batch, seq, hidden, vocab, int(rng.integers(2, 9)), ranks, element_bytes, recompute))
    return cases


def case(*arguments: Any) -> dict[str, Any]:
    words = "b={}, s={}, h={}, V={}, {} layers, t={}, elements of {} B".format(*arguments[:7])
    return call(words + ", full recompute" * arguments[7], arguments)


def right(case: Case) -> list[float]:
    batch, seq, hidden, _, num_layers, ranks, element_bytes, recompute = case["arguments"]
    in_layers = num_layers * tp.layer_elements(batch, seq, hidden, recompute="full" if recompute else "none")
    outside = tp.outside_elements(batch, seq, hidden)
    buffers = element_bytes * (in_layers + outside.total - outside.loss) + LOSS_BYTES * outside.loss
    return [in_layers, outside.total, collectives.ring_all_reduce_bytes(buffers, ranks)]


part = partial(values, right=right, parts=TRIPLE, kind="traffic", rtol=1e-9)  # the loss is a small part of it

EXERCISE = on_paper(
    "tp.1", "all_reduced", "The bill of a micro-batch", draw,
    part(2, "layers", "elements that the layers all-reduce", part=0),
    part(2, "outside", "elements that are all-reduced outside of them", part=1),
    part(3, "sent", "bytes that one rank sends", part=2),
)  # fmt: skip
