"""batch.6: what is wrong with a run whose batch grew: by products of gradients, rates and a noise scale; on paper."""

from typing import Any

import numpy as np

from dtlib.grading.exercises.inputs import Array, Rng, call, in_any_order, in_words
from dtlib.grading.exercises.kinds import by, on_paper

NOTHING, SAME, OWN, SUM, PLAIN, RATE, COLD, RATIOS = (
    "nothing wrong", "same samples", "not exchanged", "sum for mean", "unweighted", "not scaled", "no warm-up",
    "mean of ratios",
)  # fmt: skip

#: What is wrong, ranks, warm-up steps, and what looks as if something were wrong: as many samples on all ranks,
#: gradients of one length (they were clipped), a batch that is as large as the tuned one or smaller.
KINDS = (
    (NOTHING, 2, 3, ""), (NOTHING, 4, 0, "equal"), (NOTHING, 3, 4, "clipped"), (NOTHING, 3, 2, "as tuned"),
    (NOTHING, 5, 0, "as tuned"), (NOTHING, 2, 1, "equal"), (NOTHING, 4, 5, "smaller"), (NOTHING, 6, 2, "equal clipped"),
    (SAME, 2, 0, "equal"), (SAME, 3, 3, "equal"), (SAME, 4, 2, "equal as tuned"),
    (OWN, 3, 2, ""), (OWN, 2, 0, "equal"), (OWN, 4, 4, "equal clipped"),
    (SUM, 2, 0, ""), (SUM, 3, 3, "equal"), (SUM, 4, 2, "as tuned"),
    (PLAIN, 3, 0, ""), (PLAIN, 4, 3, "clipped"), (PLAIN, 2, 2, "as tuned"),
    (RATE, 4, 3, ""), (RATE, 2, 0, "equal"), (RATE, 3, 2, "smaller"), (RATE, 5, 4, "clipped"),
    (COLD, 3, 4, ""), (COLD, 2, 2, "equal"), (COLD, 4, 3, "as tuned"), (COLD, 3, 5, "smaller"),
    (RATIOS, 4, 0, "equal"), (RATIOS, 2, 2, ""), (RATIOS, 3, 3, "clipped"), (RATIOS, 3, 0, "as tuned"),
)  # fmt: skip


def case(rng: Rng, number: int, kind: str, n: int, warmup: int, looks: str) -> dict[str, Any]:
    while True:
        counts = [int(rng.integers(3, 12))] * n if "equal" in looks else [int(each) for each in rng.integers(3, 40, n)]
        steps = warmup + int(rng.integers(2, 4))
        rows = gradients(rng, kind, n, steps, "clipped" in looks, counts)
        products = np.einsum("tri,tsi->trs", rows, rows)
        squares, variances = estimates(products, counts)
        ratio, other = variances.mean() / squares.mean(), (variances / squares).mean()
        is_uneven = "equal" in looks or max(counts) >= 2 * min(counts)
        off = 1.0 if kind == SAME else abs(other / ratio - 1)
        louder = used(PLAIN, products, counts) / used(NOTHING, products, counts)
        # one mean of ratios is only a little off, one mean over ranks is more than twice as long as the right one
        is_shown = (off < 0.04 or kind != RATIOS or n < 4) and (louder.max() > 2.1 or kind != PLAIN or n != 3)
        if is_uneven and is_shown and squares.min() > 0.1 and off > 0.02:
            break
    global_batch, rate = sum(counts), float(f"{np.exp(rng.uniform(-6, -1)):.3g}")
    batch = global_batch if "as tuned" in looks else max(1, round(global_batch * rng.uniform(0.15, 0.5)))
    batch = round(global_batch * rng.uniform(1.5, 3)) if "smaller" in looks else batch
    target = rate * (1 if kind == RATE else global_batch / batch)
    ramp = [1 if kind == COLD or step >= warmup else (step + 1) / warmup for step in range(steps)]
    run = {
        "counts": counts, "products": products, "used": used(kind, products, counts),
        "rates": [target * each for each in ramp], "tuned": [rate, batch], "warmup": warmup,
        "noise_scale": float(other if kind == RATIOS else ratio),
    }  # fmt: skip
    words = {name: each.round(3).tolist() if isinstance(each, np.ndarray) else each for name, each in run.items()}
    return call(f"run {number}: {in_words(words)}", [run]) | {"wrong": kind}


def gradients(rng: Rng, kind: str, n: int, steps: int, clipped: bool, counts: list[int]) -> Array:
    """[steps, ranks, entries]: a part that all have, and noise that falls with the samples."""
    common, noise = rng.normal(0, 1, (steps, 1, 8)), rng.normal(0, 4, (steps, n, 8))
    noise = np.repeat(noise[:, :1], n, axis=1) if kind == SAME else noise
    rows = common + noise / np.sqrt(np.array(counts))[:, None]
    return np.asarray(rows / np.linalg.norm(rows, axis=2, keepdims=True) if clipped else rows)


def estimates(products: Array, counts: list[int]) -> tuple[Array, Array]:
    """Of each step what is estimated of ‖G‖² and of σ², from the two equations that hold in the mean."""
    lengths = np.trace(products, axis1=1, axis2=2) / len(counts)
    equations = np.array([[1, np.mean(1 / np.array(counts))], [1, 1 / sum(counts)]])
    squares, variances = np.linalg.solve(equations, np.stack([lengths, of_mean(products, counts)]))
    return squares, variances


def of_mean(products: Array, counts: list[int]) -> Array:
    weights = np.array(counts) / sum(counts)
    return np.array((products * np.outer(weights, weights)).sum((1, 2)))


def used(kind: str, products: Array, counts: list[int]) -> Array:
    n = len(counts)
    if kind == OWN:
        return np.diagonal(products, axis1=1, axis2=2).copy()
    even = [1] * n
    square = of_mean(products, even if kind == PLAIN else counts) * (n**2 if kind == SUM else 1)
    return np.repeat(square[:, None], n, axis=1)


of = by("wrong")

EXERCISE = on_paper(
    "batch.6", "diagnose_batch", "What is wrong with this batch?", in_any_order(KINDS, case),
    of(SAME, OWN, SUM, PLAIN)(3, "exchange", "what is wrong with the samples, or with what ranks exchange",
                              kind="gradient"),
    of(RATE, COLD)(2, "rates", "what is wrong with the rates"),
    of(RATIOS)(2, "scale", "what is wrong with the noise scale"),
    of(NOTHING)(2, "nothing", "nothing where nothing is wrong"),
)  # fmt: skip
