"""batch.1: the variance of a step's gradient: counts that differ, ranks that are correlated, an epoch; on paper."""

from functools import partial
from typing import Any

import numpy as np

from dtlib.grading.exercises.inputs import Array, Case, Rng, call, in_order
from dtlib.grading.exercises.kinds import on_paper, values

#: Samples of each rank, ρ, and how many times as many samples the set has: one rank, equal counts, one sample a rank;
#: ranks that are independent and ranks that are all the same; a whole set in one step, and a set that is much larger.
KINDS = (
    ([12], 0.3, 2), ([16, 16], 0, 1), ([5, 30], 0.4, 3), ([8, 8, 8, 8], 1, 40), ([1, 1, 1], 0.2, 1.5),
    ([40, 3, 11], 1, 1), ([2, 60, 7, 25, 9], 0.05, 1.2), ([31, 1], 0, 500), ([4, 9, 16, 25, 36, 49], 0.6, 2),
)  # fmt: skip


def drawn(rng: Rng, counts: list[int], correlation: float, times: float) -> dict[str, Any]:
    """Counts that differ stay different, and so do the largest and the smallest."""
    more = int(rng.integers(0, 4)) * (min(counts) > 1)
    counts = [int(each) for each in rng.permutation([each + more for each in counts])]
    variance = float(f"{np.exp(rng.uniform(-2, 5)):.4g}")
    rho = correlation if correlation in (0, 1) else round(correlation * float(rng.uniform(0.7, 1.3)), 3)
    samples = max(2, round(times * sum(counts)))
    words = f"counts {counts}, σ² = {variance}, ρ = {rho}, {samples} samples in the set"
    return call(words, [counts, variance, float(rho), samples])


def of_a_sum(weights: Array, covariance: Array) -> float:
    """The variance of a weighted sum: of each term with each."""
    return float(weights @ covariance @ weights)


def right(case: Case) -> dict[str, float]:
    """By the covariance of each with each: of ranks, and of the samples of a step."""
    counts, variance, rho, samples = case["arguments"]
    n, global_batch = len(counts), sum(counts)
    deviations = np.sqrt(variance / np.array(counts))
    alike = np.outer(deviations, deviations)
    even, by_count = np.full(n, 1 / n), np.array(counts) / global_batch
    each = np.full(global_batch, 1 / global_batch)
    apart = np.full((global_batch, global_batch), -variance / (samples - 1))  # all M together have no variance
    np.fill_diagonal(apart, variance)
    correlated = of_a_sum(even, np.where(np.eye(n, dtype=bool), alike, rho * alike))
    return {
        "weighted": of_a_sum(by_count, np.diag(deviations**2)),
        "plain": of_a_sum(even, np.diag(deviations**2)),
        "correlated": correlated,
        "worth": variance / correlated,
        "epoch": of_a_sum(each, apart),
    }


part = partial(values, right=right, parts="weighted, plain, correlated, worth and epoch", atol=1e-12)

EXERCISE = on_paper(
    "batch.1", "step_noise", "How noisy is a step?", in_order(KINDS, drawn),
    part(1, "weighted", "weighted by samples", part="weighted"),
    part(2, "plain", "the mean over the ranks", part="plain"),
    part(3, "correlated", "ranks that are correlated, and what their samples are worth", part=("correlated", "worth")),
    part(3, "epoch", "drawn without putting back", part="epoch"),
)  # fmt: skip
