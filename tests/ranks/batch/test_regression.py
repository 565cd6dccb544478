"""The problem whose noise is known: what it says of itself, and that the law of steps predicts batches held out."""

from __future__ import annotations

import pytest
import torch

from dtlib.ranks.batch import Regression
from dtlib.theory.batch import fit_tradeoff, steps_needed

HELD_OUT = (4, 32)


def test_gradient_noise_and_optimum_are_those_of_the_set():
    problem = Regression(64)
    weights = torch.ones(8, dtype=torch.float64, requires_grad=True)
    losses = (problem.inputs @ weights - problem.targets).square() / 2
    each = torch.stack([torch.autograd.grad(loss, weights, retain_graph=True)[0] for loss in losses])
    square, variance = problem.noise(weights.detach())
    assert square == pytest.approx(float(each.mean(0).square().sum()))
    assert variance == pytest.approx(float(each.var(0, correction=0).sum()))
    at_best = (problem.inputs @ problem.best - problem.targets).square().mean() / 2
    assert float(problem.excess(weights.detach())) == pytest.approx(float((losses.mean() - at_best).detach()))
    assert problem.noise(problem.best)[0] == pytest.approx(0, abs=1e-20)


def test_the_law_of_steps_predicts_batches_that_it_has_not_seen():
    """Over a factor of 64 in batch. The law is derived for one step, so 15 % over whole runs; S ∝ 1/B, which takes no
    notice of S_min, and S the same for all, are far outside."""
    steps = {batch: Regression().best_steps(0.05, batch)[0] for batch in (2, 4, 8, 16, 32, 64, 128)}
    kept = [batch for batch in steps if batch not in HELD_OUT]
    fit = fit_tradeoff(kept, [steps[batch] for batch in kept])
    for batch in HELD_OUT:
        assert steps_needed(fit.min_steps, fit.critical_batch, batch) == pytest.approx(steps[batch], rel=0.15)
    assert steps[2] * 2 / 128 < 0.7 * steps[128]
    assert steps[2] > 10 * steps[128]


def test_a_goal_out_of_reach_is_refused():
    with pytest.raises(ValueError, match="goal must be below the excess loss at the start"):
        Regression().best_steps(5.0, 8)
    with pytest.raises(ValueError, match="goal must be within reach of some rate in 20 steps"):
        Regression().best_steps(1e-9, 8, most=20)
