"""sp.3: what is wrong with a run whose tokens are split, and in which half of a layer; on paper."""

from typing import Any

import numpy as np

from dtlib.grading.exercises.inputs import Case, Rng, call, in_any_order, in_words
from dtlib.grading.exercises.kinds import by, on_paper
from dtlib.theory import sp

NORM, ORDER, INPUT, WHOLE = "norm not summed", "another order", "input kept", "tokens not split"
TWICE, DICE, NOTHING = "all-reduce", "one stream", "nothing wrong"
PLACES = 10_000

#: Bytes of bsh that a half keeps: inside, where all plans split; and besides, of each plan, on each rank and split.
INSIDE = {"attention": 8, "mlp": 16}
BESIDES = {"none": (5, 0), "keep": (2, 3), "again": (0, 5)}

#: What is wrong, where, ranks, the plan that was asked for, dropout. Some with nothing wrong look otherwise.
KINDS = (
    (NOTHING, None, 2, "keep", 0.1), (NOTHING, None, 4, "again", 0.0), (NOTHING, None, 3, "keep", 0.02),
    (NOTHING, None, 2, "again", 0.5), (NOTHING, None, 4, "keep", 0.0), (NOTHING, None, 3, "again", 0.3),
    (NORM, "attention", 2, "keep", 0.1), (NORM, "mlp", 3, "again", 0.0), (NORM, "attention", 4, "again", 0.2),
    (ORDER, "mlp", 2, "again", 0.1), (ORDER, "attention", 3, "keep", 0.2), (ORDER, "mlp", 4, "keep", 0.0),
    (INPUT, "attention", 2, "again", 0.1), (INPUT, "mlp", 3, "again", 0.0), (INPUT, "mlp", 4, "again", 0.5),
    (INPUT, "mlp", 2, "again", 0.1), (INPUT, "attention", 4, "again", 0.2),
    (WHOLE, "mlp", 2, "keep", 0.1), (WHOLE, "attention", 3, "again", 0.2), (WHOLE, "mlp", 4, "again", 0.0),
    (WHOLE, "attention", 4, "keep", 0.1), (WHOLE, "mlp", 2, "again", 0.5),
    (TWICE, "attention", 2, "keep", 0.0), (TWICE, "mlp", 3, "keep", 0.1), (TWICE, "attention", 4, "again", 0.2),
    (TWICE, "mlp", 2, "again", 0.1),
    (DICE, "mlp", 2, "keep", 0.02), (DICE, "attention", 3, "again", 0.5), (DICE, "mlp", 4, "keep", 0.1),
)  # fmt: skip
"""Each mistake in both halves, with 2, 3 and 4 ranks, and runs in which nothing is wrong, in any order."""


#: Of some runs which part of all sizes they have: no bytes, and no size, tells the small ones and the large.
SIZES = {
    (NOTHING, None, 2, "keep"): (0.0, 0.2), (NOTHING, None, 4, "again"): (0.8, 1.0),
    (TWICE, "attention", 2, "keep"): (0.8, 1.0), (TWICE, "attention", 4, "again"): (0.0, 0.2),
    (TWICE, "mlp", 3, "keep"): (0.8, 1.0), (TWICE, "mlp", 2, "again"): (0.0, 0.2),
}  # fmt: skip


def case(rng: Rng, number: int, kind: str, where: str | None, t: int, plan: str, dropout: float) -> dict[str, Any]:
    part = SIZES.get((kind, where, t, plan), (0.0, 1.0))
    b, s, h = (
        round(least + (most - least) * float(rng.uniform(*part))) for least, most in ((1, 7), (20, 300), (8, 100))
    )
    s, h = 12 * s, 64 * h
    told: dict[str, Any] = {"tp": t, "plan": plan, "micro_batch": b, "seq": s, "hidden": h, "dropout": dropout}
    for half, inside in INSIDE.items():
        wrong = kind if half == where else NOTHING
        used = {WHOLE: "none", INPUT: "keep"}.get(wrong, plan)
        phases = sp.phases(used) / 2 + 2 * (wrong == TWICE)
        everywhere, split = BESIDES[used]
        off, apart = observed(rng, t, wrong)
        chance = 1 - 2 * dropout * (1 - dropout)
        alike = 1.0 if wrong in (DICE, WHOLE) else float(rng.binomial(PLACES, chance)) / PLACES
        found = {
            "sent_bytes": phases * 2 * (t - 1) / t * b * s * h * rng.uniform(1.001, 1.006),
            "kept_bytes": b * s * h * (everywhere + (split + inside) / t) * rng.uniform(1.0005, 1.003),
            "norms_apart": apart * (1e-8 if t == 2 else 1), "off": off, "alike": alike,
        }  # fmt: skip
        for name, each in found.items():
            told.setdefault(name, {})[half] = round(each) if "bytes" in name else float(each)
    return call(f"run {number}: {in_words(told)}", [told]) | {"wrong": [kind, where]}


def observed(rng: Rng, t: int, wrong: str) -> tuple[float, float]:
    """A half in small, on t ranks: how far its output is off from that of one rank, and copies of its norm's weight
    from each other after a step."""
    tokens, h, f = 6, 8, 5
    x, back = rng.standard_normal((2, t, tokens, h))
    up, down = rng.standard_normal((2, t, f, h)) / h**0.5
    given = [np.roll(x, -rank * (wrong == ORDER), 0).reshape(-1, h) for rank in range(t)]  # each begins with its own
    middles = [np.tanh(each @ own.T) for each, own in zip(given, up, strict=True)]
    right = sum(np.tanh(x.reshape(-1, h) @ own.T) @ out for own, out in zip(up, down, strict=True))
    off = np.abs(sum(each @ out for each, out in zip(middles, down, strict=True)) - right).max() / np.abs(right).max()
    slopes = [(back.reshape(-1, h) @ out.T) * (1 - each**2) for each, out in zip(middles, down, strict=True)]
    to_x = sum(each @ own for each, own in zip(slopes, up, strict=True)).reshape(x.shape)
    apart = float(np.ptp((x * to_x).sum(1), axis=0).max()) if wrong == NORM else 0.0
    return float(off) + float(rng.uniform(1e-7, 9e-5)), apart


def right(case: Case) -> Any:
    return case["wrong"]


of = by("wrong", right, kind="schedule")

EXERCISE = on_paper(
    "sp.3", "find_fault", "What is wrong with this layer?", in_any_order(KINDS, case),
    of(NORM, ORDER)(2, "values", "a sum that is missing, tokens in another order"),
    of(INPUT, WHOLE)(2, "memory", "inputs that are kept, tokens that are not split"),
    of(TWICE)(1, "bytes", "an all-reduce for a reduce-scatter"),
    of(DICE)(1, "dice", "random numbers that are the same where they should not be"),
    of(NOTHING)(2, "nothing", "nothing is found where nothing is wrong"),
)  # fmt: skip
