"""batch.5: the rate of each step for another batch, for SGD and for Adam, warmed up and held at most; on paper."""

import math
from typing import Any

import numpy as np

from dtlib.grading.exercises.inputs import Case, Rng, call, in_order, in_words
from dtlib.grading.exercises.kinds import by, on_paper

RULE, NOISE, WARM, HELD = "rule of thumb", "noise scale", "warm-up", "highest"
#: What it is about, the optimizer, 𝓑 in units of the tuned batch (None: not known), the batches in the same units with
#: how many steps each has, warm-up steps, the first rate and the highest one in units of the tuned rate.
KINDS = (
    (RULE, "sgd", None, ((4, 3),), 0, 0, 99), (RULE, "adam", None, ((4, 3),), 0, 0, 99),
    (RULE, "adam", None, ((0.25, 2), (8, 2)), 0, 1, 99), (RULE, "sgd", None, ((1, 2), (0.5, 2), (16, 1)), 0, 1, 99),
    (NOISE, "sgd", 8, ((4, 3),), 0, 0, 99), (NOISE, "adam", 8, ((4, 3),), 0, 1, 99),
    (NOISE, "adam", 0.1, ((0.5, 2), (64, 2)), 0, 0, 99), (NOISE, "sgd", 0.5, ((8, 2), (0.125, 2)), 0, 1, 99),
    (NOISE, "sgd", 300, ((2, 2), (32, 2)), 0, 0, 99), (NOISE, "sgd", 0, ((4, 3),), 0, 0, 99),
    (WARM, "sgd", None, ((8, 8),), 5, 1, 99), (WARM, "adam", 20, ((8, 7),), 3, 0, 99),
    (WARM, "adam", None, ((2, 3), (4, 4)), 6, 0.5, 99), (WARM, "sgd", 4, ((0.25, 6),), 4, 1, 99),
    (WARM, "sgd", 2, ((4, 3),), 5, 0, 99), (WARM, "adam", None, ((2, 3),), 1, 0.1, 99),
    (HELD, "sgd", None, ((16, 3), (2, 3)), 4, 1, 3), (HELD, "adam", None, ((16, 5),), 3, 0, 2.5),
    (HELD, "adam", 50, ((2, 2), (30, 2)), 0, 0, 3.5), (HELD, "sgd", None, ((1, 2), (0.5, 2)), 2, 0.2, 0.7),
)  # fmt: skip


def drawn(
    rng: Rng, about: str, optimizer: str, noise: float | None, stages: tuple[tuple[float, int], ...], warmup: int,
    start: float, highest: float,
) -> dict[str, Any]:  # fmt: skip
    batch, rate = 8 * int(rng.integers(10, 90)), float(f"{np.exp(rng.uniform(-8, -1)):.3g}")
    near = [float(each) for each in rng.uniform(0.9, 1.1, 3)]
    batches = [max(1, round(batch * times * (near[0] if times != 1 else 1))) for times, steps in stages
               for _ in range(steps)]  # fmt: skip
    job = {
        "optimizer": optimizer, "rate": rate, "batch": batch,
        "noise_scale": float(f"{noise * batch * near[1]:.4g}") if noise is not None else None, "batches": batches,
        "highest": float(f"{highest * rate * near[2]:.4g}"), "warmup": warmup,
        "start": float(f"{start * rate * (near[1] if 0 < start < 1 else 1):.4g}"),
    }  # fmt: skip
    return call(f"{about}: {in_words(job)}", [job]) | {"about": about}


def right(case: Case) -> list[float]:
    """By logarithms: a rule of thumb is the law with a noise scale beyond all batches."""
    job = case["arguments"][0]

    def log_best(batch: float) -> float:
        noise = math.log(batch) if job["noise_scale"] is None else -math.log1p(job["noise_scale"] / batch)
        return noise if job["optimizer"] == "sgd" else noise / 2

    scaled = [job["rate"] * math.exp(log_best(each) - log_best(job["batch"])) for each in job["batches"]]
    shares = [min(1.0, step / job["warmup"]) if job["warmup"] else 1.0 for step in range(len(scaled))]
    targets = np.minimum(scaled, job["highest"])
    return [float((1 - share) * job["start"] + share * each) for share, each in zip(shares, targets, strict=True)]


of = by("about", right, atol=1e-15)
EXERCISE = on_paper(
    "batch.5", "rates", "Which rate for another batch?", in_order(KINDS, drawn),
    of(RULE)(2, RULE, "the rules of thumb"),
    of(NOISE)(3, NOISE, "with the noise scale"),
    of(WARM)(2, WARM, "the warm-up"),
    of(HELD)(1, HELD, "no rate above the highest"),
)  # fmt: skip
