"""cp.5: what is wrong with attention whose tokens are split, by what was observed of it; on paper."""

from typing import Any

import numpy as np

from dtlib.grading.exercises.inputs import Rng, call, in_any_order, in_words
from dtlib.grading.exercises.kinds import by, on_paper
from dtlib.theory import cp

MASK, AVERAGED, CONTIGUOUS, HIDDEN = "mask from 0", "averaged", "contiguous order", "hidden scores computed"
HOME, PASSED, GATHERED, NOTHING = "gradients not sent home", "gradients not passed on", "keys gathered", "nothing wrong"

#: What is wrong, ranks, and the order that was asked for.
KINDS = (
    (NOTHING, 2, "zigzag"), (NOTHING, 4, "contiguous"), (NOTHING, 3, "zigzag"), (NOTHING, 3, "contiguous"),
    (NOTHING, 4, "zigzag"), (NOTHING, 2, "contiguous"),
    (MASK, 2, "contiguous"), (MASK, 3, "zigzag"), (MASK, 4, "contiguous"), (MASK, 4, "zigzag"),
    (AVERAGED, 2, "zigzag"), (AVERAGED, 3, "contiguous"), (AVERAGED, 4, "zigzag"), (AVERAGED, 2, "contiguous"),
    (CONTIGUOUS, 2, "zigzag"), (CONTIGUOUS, 3, "zigzag"), (CONTIGUOUS, 4, "zigzag"),
    (HIDDEN, 2, "contiguous"), (HIDDEN, 3, "zigzag"), (HIDDEN, 4, "contiguous"), (HIDDEN, 2, "zigzag"),
    (HOME, 3, "zigzag"), (HOME, 4, "contiguous"), (HOME, 5, "zigzag"),
    (PASSED, 2, "contiguous"), (PASSED, 3, "zigzag"), (PASSED, 4, "contiguous"),
    (GATHERED, 4, "zigzag"), (GATHERED, 5, "contiguous"), (GATHERED, 8, "zigzag"),
)  # fmt: skip
"""Each mistake with several numbers of ranks, in both orders where it can be; runs in which nothing is wrong."""


#: Tokens of a chunk, and widths in 128: no one width, and no one number of bytes, tells all of these.
SIZES = {
    (HOME, 3): ((50, 300), (1, 4)), (HOME, 4): ((200, 300), (9, 17)),
    (PASSED, 2): ((50, 100), (1, 3)), (PASSED, 3): ((50, 300), (9, 17)),
}  # fmt: skip


def case(rng: Rng, number: int, kind: str, ranks: int, order: str) -> dict[str, Any]:
    chunks, widths = SIZES.get((kind, ranks), ((50, 300), (1, 17)))
    seq, width = 2 * ranks * int(rng.integers(*chunks)), 128 * int(rng.integers(*widths))
    a_hop = 2 * cp.ring_elements(1, seq, 1, width, ranks, backward=False) / (ranks - 1)  # bytes
    hops = ranks - 1 + {PASSED: 0, HOME: ranks - 2}.get(kind, ranks - 1)
    blocks = min(3, ranks) if kind == NOTHING else int(rng.integers(2, 4))  # those that may be held are all of three
    off, gradient_off = (rng.uniform(1e-7, 9e-5, size) for size in (4 * ranks, ranks))
    off += outputs_off(rng, [np.concatenate(each) for each in cp.pieces(4 * ranks, ranks, order)], kind)
    if kind in (MASK, AVERAGED, HOME, PASSED):
        gradient_off += rng.uniform(0.05, 0.5, ranks)
    if kind == PASSED and order == "contiguous":
        gradient_off[-1] = 1e-6  # the last rank's keys are seen by its own tokens alone
    if ranks == 2:  # values that hardly differ
        off, gradient_off = np.minimum(off, 5e-4), np.minimum(gradient_off, 5e-4)
    run = {
        "cp": ranks, "order": order, "seq": seq, "kv_width": width,
        "scores": scores(seq, ranks, order, kind).tolist(),
        "off": off.tolist(), "key_gradient_off": gradient_off.tolist(),
        "sent_backward": round(hops * a_hop * rng.uniform(1.001, 1.006)),
        "held_tokens": seq if kind == GATHERED else blocks * seq // ranks,
    }  # fmt: skip
    return call(f"run {number}: {in_words(run)}", [run]) | {"wrong": kind}


def scores(seq: int, ranks: int, order: str, kind: str) -> Any:
    """Scores of a head by rank and round. Who counts from 0 hides in every round what is hidden in the first."""
    found = cp.scores(seq, ranks, "contiguous" if kind == CONTIGUOUS else order, causal=kind != HIDDEN)
    return np.repeat(found[:, :1], ranks, 1) if kind == MASK else found


def outputs_off(rng: Rng, order: list[Any], kind: str) -> Any:
    """A run in small: how far the output for each token is off from that of one rank, in the sequence's order."""
    q, k, v = rng.standard_normal((3, sum(map(len, order)), 4))
    right, found = attention(q, k, v, np.tri(len(q), dtype=bool))[0], np.zeros_like(q)
    for own in order:
        parts = []
        for block in order:
            at = (np.arange(len(own)), np.arange(len(block))) if kind == MASK else (own, block)
            parts.append(attention(q[own], k[block], v[block], at[1] <= at[0][:, None]))
        outputs, sums = (np.stack(each) for each in zip(*parts, strict=True))
        weights = (sums > 0) * 1.0 if kind == AVERAGED else sums
        found[own] = (weights[..., None] * outputs).sum(0) / weights.sum(0)[:, None]
    return np.abs(found - right).max(1)


def attention(q: Any, k: Any, v: Any, visible: Any) -> tuple[Any, Any]:
    """The mean of the values that are seen, or 0, and the sum of their exponentials."""
    exponentials = np.exp(q @ k.T / 2) * visible
    sums = exponentials.sum(1)
    return exponentials @ v / np.where(sums, sums, 1)[:, None], sums


of = by("wrong", kind="schedule")

EXERCISE = on_paper(
    "cp.5", "find_flaw", "What is wrong with this attention?", in_any_order(KINDS, case),
    of(MASK, AVERAGED)(2, "values", "a mask that begins anew, rounds that are averaged"),
    of(CONTIGUOUS, HIDDEN)(2, "work", "another order, scores that do not count"),
    of(HOME, PASSED)(2, "gradients", "gradients that do not come home, or do not leave"),
    of(GATHERED)(1, "memory", "keys that are gathered"),
    of(NOTHING)(2, "nothing", "nothing is found where nothing is wrong"),
)  # fmt: skip
