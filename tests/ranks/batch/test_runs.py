"""Long runs that the benchmark recorded, made again with seeds that it has not seen."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import _batch_ramp as ramp
from benchmarks import batch as benchmark
from dtlib.theory.batch import steps_needed

KEPT = json.loads((Path(__file__).parents[3] / "benchmarks/results/batch-cpu-2-cores.json").read_text("utf-8"))


@pytest.mark.soak
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_the_law_of_steps_foretells_batches_and_seeds_that_it_was_not_fitted_to(optimizer):
    found = KEPT["optimizers"][optimizer]
    rates = {each["batch"]: each["rate"] for each in found["batches"]}
    for batch in KEPT["held_out"]:
        steps = np.mean([benchmark.train(optimizer, batch, rates[batch], seed) for seed in range(2, 8)])
        law = steps_needed(found["fit"]["min_steps"], found["fit"]["critical_batch"], batch)
        assert abs(steps / law - 1) < 0.25


@pytest.mark.soak
def test_a_ramp_saves_samples_with_draws_that_were_not_seen():
    scales = ramp.noiseless()[1]
    stays = ramp.descend(np.mean(scales), 0, None, start=7)
    grows = [ramp.descend(times * np.sqrt(scales).mean(), 0.5, None, start=8) for times in ramp.TIMES]
    shares = ramp.fewer(stays, grows)
    error = np.std(shares, ddof=1) / len(shares) ** 0.5
    assert np.mean(shares) < 1 - 4 * error
    assert abs(np.mean(shares) - (1 + KEPT["ramp"]["gain"]) / 2) < 4 * error


def test_the_noise_that_a_ramp_follows_is_that_of_its_samples():
    rng, w = np.random.default_rng(0), 0.7 * ramp.START
    x = rng.standard_normal((200_000, len(w))) * np.sqrt(ramp.BENDS)
    gradients = x * (x @ w - ramp.NOISE**0.5 * rng.standard_normal(len(x)))[:, None]
    slope = ramp.BENDS * w
    bend = (ramp.BENDS * slope**2).sum()
    noise_scale, rate = ramp.known(w[None])
    assert noise_scale == pytest.approx((ramp.BENDS * gradients.var(0)).sum() / bend, rel=0.01)
    assert rate == pytest.approx((slope @ slope) / bend)


def test_samples_are_compared_at_equal_steps():
    stays = np.array([[20.0, 30.0], [40.0, 40.0]])  # steps, then samples, of two groups
    grows = [np.array([[steps, steps], [400 / steps, 400 / steps]]) for steps in (40.0, 20.0, 10.0)]
    assert ramp.fewer(stays, grows) == pytest.approx([20 / 40, 400 / 30 / 40])
