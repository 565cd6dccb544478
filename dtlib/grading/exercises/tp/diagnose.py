"""tp.4: what is wrong with a run, by what was observed of it; on paper."""

from typing import Any

import numpy as np

from dtlib.grading.exercises.inputs import Rng, call, in_any_order, in_words
from dtlib.grading.exercises.kinds import by, on_paper
from dtlib.theory import collectives, tp

from ._drift import BACKWARD, BIAS, KEYS, train

ONE, OWN, LOGITS, NOTHING = "one stream", "own streams", "logits gathered", "nothing wrong"
PLACES, FLOAT_BYTES = 10_000, 4

#: What is wrong, ranks, heads of keys, dropout, bytes of an element, whether all is computed again, and whether the run
#: goes on. Some with nothing wrong look otherwise: heads that are shared, little dropout and none, a recompute.
KINDS = (
    (NOTHING, 2, 4, 0.1, 2, False, False), (NOTHING, 4, 2, 0.0, 2, False, True), (NOTHING, 3, 3, 0.02, 4, True, False),
    (NOTHING, 4, 4, 0.5, 2, True, True), (NOTHING, 2, 1, 0.3, 4, False, False),
    (BACKWARD, 2, 4, 0.1, 2, False, False), (BACKWARD, 4, 2, 0.0, 4, True, True), (BACKWARD, 3, 3, 0.2, 2, True, False),
    (KEYS, 2, 1, 0.1, 2, False, True), (KEYS, 4, 2, 0.0, 4, False, False), (KEYS, 3, 1, 0.2, 2, True, False),
    (BIAS, 2, 1, 0.1, 2, False, False), (BIAS, 3, 3, 0.0, 4, True, True), (BIAS, 4, 2, 0.2, 2, False, True),
    (ONE, 2, 4, 0.02, 2, False, False), (ONE, 3, 1, 0.5, 4, True, True), (ONE, 4, 2, 0.1, 2, False, False),
    (OWN, 2, 4, 0.02, 2, False, False), (OWN, 3, 1, 0.5, 4, True, True), (OWN, 4, 2, 0.1, 2, False, False),
    (LOGITS, 2, 4, 0.1, 4, False, False), (LOGITS, 3, 3, 0.0, 2, True, True), (LOGITS, 4, 2, 0.02, 2, False, False),
    (LOGITS, 2, 2, 0.1, 2, False, True),
)  # fmt: skip
#: Small runs, the others are large: a size, or bytes, that are taken for a constant are wrong in one of them.
SMALL = {(NOTHING, 2, 1), (NOTHING, 4, 2), (LOGITS, 2, 2), (LOGITS, 3, 3)}


def case(
    rng: Rng, number: int, kind: str, t: int, kv_heads: int, dropout: float, width: int, again: bool, goes_on: bool
) -> dict[str, Any]:
    low, high = (0.0, 0.2) if (kind, t, kv_heads) in SMALL else (0.7 * (kind in (LOGITS, NOTHING)), 1.0)

    def size(least: int, most: int) -> int:
        return round(least + (most - least) * float(rng.uniform(low, high)))

    is_narrow = (kind, t, kv_heads) == (NOTHING, 4, 2)
    layers, hidden = (1, 32) if is_narrow else (size(3, 12), 64 * size(8, 32))
    while True:
        seed = int(rng.integers(2**31))
        right, run = (train(np.random.default_rng(seed), t, kv_heads, e, goes_on=goes_on) for e in (NOTHING, kind))
        alone, off = np.array(right.losses), np.array(run.losses) / right.losses - 1
        if kind == BIAS and t == 3:
            off *= 2e-4 / abs(off).max()  # a step so small that the first loss alone is off, which the mean hides
        if kind != BIAS or t == 4 or (off.max() < 1e-4 if t == 2 else off.min() > -1e-4 and abs(off[1:]).max() < 1e-4):
            break
    chance = 1 - 2 * dropout * (1 - dropout)
    parts, whole = (float(each) / PLACES for each in rng.binomial(PLACES, chance, 2))
    apart = 1e-6 if t == 2 else 1.0  # a step that is small
    share = (1.5, 3) if width == 4 else (0.3, 0.6) if is_narrow else (0.02, 0.04) if t == 4 else (0.08, 0.3)
    words = float(rng.uniform(*share))  # of all bytes
    sizes: dict[str, Any] = {
        "micro_batch": size(1, 8), "seq": 128 * size(2, 20), "hidden": hidden,
        "vocab": int(words * width * (6 if again else 4) * layers * hidden / 2), "num_layers": layers,
        "element_bytes": width, "full_recompute": again,
    }  # fmt: skip
    told = {
        "tp": t, "num_kv_heads": kv_heads, "dropout": dropout,
        "losses_alone": (alone * (1 + (9e-5 if kind == NOTHING else 1e-6) * rng.choice((-1, 1), len(alone)))).tolist(),
        "losses": (alone * (1 + off)).tolist(),
        "norms_apart": run.norms_apart * apart, "keys_apart": run.keys_apart * apart,
        "alike_parts": 1.0 if kind == ONE else parts, "alike_whole": whole if kind == OWN else 1.0,
        "sent_bytes": round(sent_bytes(kind, t, **sizes) * float(rng.uniform(1.001, 1.006))), **sizes,
    }  # fmt: skip
    return call(f"run {number}: {in_words(told)}", [told]) | {"wrong": kind}


def sent_bytes(
    kind: str, t: int, micro_batch: int, seq: int, hidden: int, vocab: int, num_layers: int, element_bytes: int,
    full_recompute: bool,
) -> float:  # fmt: skip
    """What a rank sends in a step."""
    outside = tp.outside_elements(micro_batch, seq, hidden)
    a_layer = tp.layer_elements(micro_batch, seq, hidden, recompute="full" if full_recompute else "none")
    elements = num_layers * a_layer + outside.embedding + outside.head
    if kind == BACKWARD:
        elements -= num_layers * (tp.layer_elements(micro_batch, seq, hidden) // 2) + outside.head
    if kind == LOGITS:
        of_loss = (t - 1) / t * micro_batch * seq * vocab * FLOAT_BYTES
    else:
        of_loss = collectives.ring_all_reduce_bytes(FLOAT_BYTES * outside.loss, t)
    return collectives.ring_all_reduce_bytes(element_bytes * elements, t) + of_loss


of = by("wrong", kind="schedule")

EXERCISE = on_paper(
    "tp.4", "find_mistake", "What is wrong with this run?", in_any_order(KINDS, case),
    of(BACKWARD, KEYS, BIAS)(3, "sums", "a sum that is missing, a bias in each part"),
    of(ONE, OWN)(2, "dice", "random numbers that are the same, or others, where they should not be"),
    of(LOGITS)(1, "logits", "logits that are gathered"),
    of(NOTHING)(2, "nothing", "nothing is found where nothing is wrong"),
)  # fmt: skip
