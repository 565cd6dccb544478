"""compression.6: what is wrong with a run, by its bytes and by what was meant, sent and left; on paper."""

from typing import Any

import numpy as np

from dtlib.grading.exercises.inputs import Array, Rng, call, in_any_order, in_words
from dtlib.grading.exercises.kinds import by, on_paper

NOTHING, DENSE, GATHERED, FORGOTTEN, DOUBLED, RATES, OTHERS, SUM = (
    "nothing wrong", "everything sent", "gathered", "feedback forgotten", "feedback doubled", "not rescaled",
    "different entries", "sum for mean",
)  # fmt: skip
TOP, RANDOM = "top-k", "random-k"
STEPS, WATCHED = 3, 4

#: What is wrong, the scheme, ranks, whether the rate changes, and what looks as if something were wrong: an entry that
#: nobody ever sends, a step in which everything that is watched is sent, few ranks that gather as much as all would,
#: and 5 that keep much, and gather more than the whole gradient on a ring.
KINDS = (
    (NOTHING, TOP, 4, True, ""), (NOTHING, TOP, 3, False, "never"), (NOTHING, RANDOM, 2, True, ""),
    (NOTHING, RANDOM, 5, False, "empty"), (NOTHING, RANDOM, 6, True, "never"), (NOTHING, TOP, 6, True, "empty"),
    (NOTHING, TOP, 5, True, ""), (NOTHING, RANDOM, 3, False, "last"), (DENSE, TOP, 5, False, ""),
    (DENSE, TOP, 3, False, ""), (DENSE, RANDOM, 4, True, ""), (DENSE, TOP, 6, True, "never"),
    (GATHERED, RANDOM, 4, False, ""), (GATHERED, RANDOM, 6, True, ""), (GATHERED, RANDOM, 3, True, "empty"),
    (FORGOTTEN, TOP, 4, True, ""), (FORGOTTEN, RANDOM, 2, False, ""), (FORGOTTEN, TOP, 3, False, "never"),
    (DOUBLED, TOP, 2, False, ""), (DOUBLED, RANDOM, 4, True, ""), (DOUBLED, TOP, 5, True, "never"),
    (RATES, TOP, 3, True, ""), (RATES, RANDOM, 4, True, ""), (RATES, TOP, 2, True, "empty"),
    (OTHERS, RANDOM, 3, True, ""), (OTHERS, RANDOM, 2, False, ""), (OTHERS, RANDOM, 4, False, "never"),
    (SUM, TOP, 4, False, ""), (SUM, RANDOM, 3, True, ""), (SUM, TOP, 2, True, "empty"),
)  # fmt: skip


def case(rng: Rng, number: int, kind: str, scheme: str, n: int, changes: bool, looks: str) -> dict[str, Any]:
    elements = 1000 * int(rng.integers(50, 900))
    kept = int(elements * (rng.uniform(0.25, 0.4) if n == 5 else rng.uniform(0.004, 0.02)))
    rates = [float(f"{rng.uniform(0.05, 0.4):.2g}")] * STEPS
    if changes:
        # Nothing is left after a step in which all is sent: what is rescaled has to be left before it.
        at = 1 if looks == "empty" else int(rng.integers(1, STEPS))
        factor = float(rng.choice([0.1, 0.2, 0.5]))
        rates[at:] = [each * factor for each in rates[at:]]
    meant, sent, residuals = told(rng, kind, scheme, n, rates, looks)
    used = sent.sum(1) if kind == SUM else sent.mean(1)
    ring, gather = 2 * (n - 1) / n, n - 1
    num_bytes = {DENSE: ring * 4 * elements, GATHERED: gather * 4 * kept}.get(
        kind, gather * 8 * kept if scheme == TOP else ring * 4 * kept
    )
    run = {
        "scheme": scheme, "ranks": n, "elements": elements, "kept": kept, "rates": rates,
        "sent_bytes": np.round(num_bytes * rng.uniform(1.0005, 1.008, n)).tolist(), "meant": meant, "sent": sent,
        "residuals": residuals, "used": used,
    }  # fmt: skip
    words = {name: each.round(3).tolist() if isinstance(each, np.ndarray) else each for name, each in run.items()}
    return call(f"run {number}: {in_words(words)}", [run]) | {"wrong": kind}


def told(rng: Rng, kind: str, scheme: str, n: int, rates: list[float], looks: str) -> tuple[Array, Array, Array]:
    """What was meant and sent of the watched entries, [steps, ranks, entries], and the residuals before each step and
    after the last: at first something is left of earlier steps."""
    size = (n, WATCHED)
    residual = np.zeros(size) if kind == FORGOTTEN else rng.normal(0, 0.5, size)
    meant, sent, residuals = rng.normal(0, 1, (STEPS, *size)), [], [residual]
    masks = [chosen(rng, kind, scheme, n, looks, step) for step in range(STEPS)]
    for step, mask in enumerate(masks):
        whole = meant[step] + residual
        sent.append(np.where(mask, whole, 0))
        residual = {FORGOTTEN: 0 * whole, DOUBLED: whole}.get(kind, whole - sent[-1])
        if step + 1 < STEPS and kind != RATES:
            residual = residual * (rates[step] / rates[step + 1])
        residuals.append(residual)
    return meant, np.stack(sent), np.stack(residuals)


def chosen(rng: Rng, kind: str, scheme: str, n: int, looks: str, step: int) -> Array:
    """Which watched entries each rank sends: with top-k, and by mistake, each rank its own; in each step some and not
    all."""
    is_one, may_be = scheme == RANDOM and kind != OTHERS, step == {"empty": 1, "last": STEPS - 1}.get(looks)
    while True:
        mask = rng.random((1 if is_one else n, WATCHED)) < 0.5
        mask[:, 0] &= looks != "never"
        mask |= may_be and kind != OTHERS
        is_apart = is_one or step != 2 or (mask != mask[0]).any()
        if mask.any(1).all() and (may_be or not mask.all(1).any()) and is_apart:
            return np.broadcast_to(mask, (n, WATCHED))


of = by("wrong")

EXERCISE = on_paper(
    "compression.6", "diagnose_compression", "What is wrong with this compression?", in_any_order(KINDS, case),
    of(DENSE, GATHERED)(2, "traffic", "bytes that need not have been sent", kind="traffic"),
    of(FORGOTTEN, DOUBLED, RATES)(3, "feedback", "what is wrong with the residuals"),
    of(OTHERS, SUM)(2, "mean", "what is wrong with the mean", kind="gradient"),
    of(NOTHING)(2, "nothing", "nothing where nothing is wrong"),
)  # fmt: skip
