"""A batch that grows against one that stays: descent on least squares, whose gradient's noise is known at each step."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from dtlib.theory.batch import ramp_gain

BENDS = np.geomspace(1, 0.03, 16)  # curvatures; each direction has the same share of the loss at the start
START, NOISE, LOSS = BENDS**-0.5, 1.6, 0.005  # variance of the targets' noise; the goal, over the loss at the start
RATES, TIMES = 2.0 ** np.arange(-1.5, 1, 0.25), (0.5, 1.0, 2.0)
SEEDS, GROUPS, MOST = 128, 16, 400


def descend(scale: float, power: float, rate: float | None, seeds: int = SEEDS, start: int = 1) -> np.ndarray:
    """Steps and samples of each group of seeds to `LOSS`, with batches of `scale` times 𝓑 to the `power`.

    The rate is one for all steps, or (None) the best of each; 𝓑 and that are of the mean over seeds, from the weights.
    """
    rng, w, samples = np.random.default_rng(start), np.tile(START, (seeds, 1)), 0
    groups = GROUPS * seeds // SEEDS
    before, found = np.ones(groups), np.full((2, groups), np.inf)
    for step in range(MOST):
        noise_scale, clean = known(w)
        batch = max(1, round(scale * noise_scale**power))
        slopes = np.empty_like(w)
        for slope, own in zip(slopes, w, strict=True):
            x = rng.standard_normal((batch, len(BENDS))) * np.sqrt(BENDS)
            slope[:] = (x @ own - NOISE**0.5 * rng.standard_normal(batch)) @ x / batch
        w, samples = w - (rate or clean / (1 + noise_scale / batch)) * slopes, samples + batch
        loss = (BENDS * w**2).mean(1).reshape(groups, -1).mean(1)
        share = np.log(LOSS / before) / np.log(loss / before)  # of the last step
        new = (loss <= LOSS) & np.isinf(found[0])
        found[:, new] = np.stack([step + share, samples - batch * (1 - share)])[:, new]
        before = loss
        if np.isfinite(found).all() or not loss.max() < 10:
            break
    return found


def known(w: np.ndarray) -> tuple[float, float]:
    """tr(HΣ)/GᵀHG and |G|²/GᵀHG, each a ratio of means over the seeds (rows of `w`)."""
    slope, loss = BENDS * w, (BENDS * w**2).sum(1)
    bend = (BENDS * slope**2).sum(1).mean()
    noise = (loss + NOISE) * (BENDS**2).sum() + (BENDS**3 * w**2).sum(1)  # of normal samples, Σ with w's own part
    return float(noise.mean() / bend), float((slope**2).sum(1).mean() / bend)


def noiseless() -> tuple[float, list[float]]:
    """S_min, and 𝓑 at each of its steps."""
    w, loss, scales = START[None], 1.0, list[float]()
    while loss > LOSS:
        scale, clean = known(w)
        before, w = loss, w - clean * BENDS * w
        scales, loss = [*scales, scale], float((BENDS * w**2).mean())
    return len(scales) - 1 + np.log(LOSS / before) / np.log(loss / before), scales


def ramped() -> dict[str, Any]:
    """Batches that stay and that grow with √𝓑, as large in the law's mean, at the best rates and at one tuned rate.

    `shares`: the samples of a batch that grows over those of one that stays, at the steps of the latter, by group.
    """
    steps, scales = noiseless()
    kinds = {"stays": (float(np.mean(scales)), 0.0), "grows": (float(np.sqrt(scales).mean()), 0.5)}
    runs, took = [], dict[tuple[str, bool, float], np.ndarray]()
    for (kind, (scale, power)), times in itertools.product(kinds.items(), TIMES):
        tried = {float(rate): descend(times * scale, power, float(rate), seeds=16)[0].mean() for rate in RATES}
        for rate in (None, min(tried, key=lambda each: tried[each])):
            found = took[kind, rate is None, times] = descend(times * scale, power, rate)
            steps_mean, samples_mean = found.mean(1).tolist()
            runs.append({"batch": kind, "times": times, "rate": rate, "steps": steps_mean, "samples": samples_mean})
    shares = {name: fewer(took["stays", best, 1.0], [took["grows", best, times] for times in TIMES])
              for name, best in (("best rates", True), ("one rate", False))}  # fmt: skip
    law = {"min_steps": float(steps), "min_samples": float(steps * np.mean(scales)), "gain": ramp_gain(scales)}
    return law | {"shares": shares, "runs": runs}


def fewer(stays: np.ndarray, grows: list[np.ndarray]) -> list[float]:
    """By group, samples over samples at equal steps: between runs that grow, on a straight line of logarithms."""
    curve = np.log(grows)[::-1]  # (times, steps or samples, group), fewest steps first
    return [float(np.exp(np.interp(np.log(steps), *each.T)) / samples)
            for steps, samples, each in zip(*stays, curve.transpose(2, 0, 1), strict=True)]  # fmt: skip
