"""Steps against examples: the gain of a step by trying every rate, goals by counting steps, fits by many runs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dtlib.theory import batch

# --- one step on a quadratic ---------------------------------------------------------------------------------------


def quadratic(seed: int, d: int = 4):
    """H and Σ that share no eigenvectors, and a gradient."""
    rng = np.random.default_rng(seed)
    turn = np.linalg.qr(rng.standard_normal((d, d))).Q
    root = rng.standard_normal((d, d))
    return turn * np.exp(rng.normal(0, 1, d)) @ turn.T, root @ root.T, rng.standard_normal(d)


def gain(hessian, covariance, gradient, of: float, rate: float) -> float:
    """−E[change of ½xᵀHx] in a step, over noises ± each column of a root of Σ/B, all with one chance: exact."""
    d = len(gradient)
    noise = np.linalg.cholesky(covariance / of).T * math.sqrt(d)
    x = np.linalg.solve(hessian, gradient)
    moved = x - rate * (gradient + np.concatenate([noise, -noise]))
    after = 0.5 * np.einsum("ki,ij,kj->k", moved, hessian, moved)
    return float(0.5 * x @ hessian @ x - after.mean())


def best(hessian, covariance, gradient, of: float) -> tuple[float, float]:
    """The greatest gain and its rate, of 20,001 rates."""
    rates = np.linspace(0, 2 * float(gradient @ gradient / (gradient @ hessian @ gradient)), 401)
    for _ in range(3):  # finer and finer about the best
        gains = [gain(hessian, covariance, gradient, of, rate) for rate in rates]
        at = int(np.argmax(gains))
        rates = np.linspace(rates[max(at - 1, 0)], rates[min(at + 1, len(rates) - 1)], 41)
    return max(gains), float(rates[20])


@pytest.mark.parametrize("seed", range(3))
def test_the_gain_of_a_step_by_trying_every_rate(seed):
    hessian, covariance, gradient = quadratic(seed)
    values, turn = np.linalg.eigh(hessian)
    scale = batch.hessian_noise_scale(values, np.diag(turn.T @ covariance @ turn), turn.T @ gradient)
    assert scale == pytest.approx(np.trace(hessian @ covariance) / (gradient @ hessian @ gradient))
    most, most_rate = best(hessian, covariance * 1e-12, gradient, 1)
    for times in (0.1, 1.0, 3.0, 30.0):
        found, rate = best(hessian, covariance, gradient, scale * times)
        assert batch.improvement(scale * times, scale) == pytest.approx(found / most, rel=1e-4)
        assert batch.sgd_rate(most_rate, 1e15, scale * times, scale) == pytest.approx(rate, rel=1e-3)
        simple = batch.noise_scale(np.trace(covariance), gradient @ gradient)
        assert abs(simple / scale - 1) > 0.03
    assert batch.improvement(scale, scale) == 0.5


def test_the_two_noise_scales_agree_where_curvature_is_alike():
    variances, gradient = [1.0, 5.0, 2.0], [1.0, -2.0, 0.5]
    simple = batch.noise_scale(sum(variances), np.square(gradient).sum())
    assert batch.hessian_noise_scale([3.0] * 3, variances, gradient) == pytest.approx(simple)
    assert batch.hessian_noise_scale([1.0, 2.0, 3.0], variances, gradient) != pytest.approx(simple, rel=0.03)


# --- a whole run ---------------------------------------------------------------------------------------------------


def count_steps(of: float, scales: np.ndarray) -> int:
    """Steps through a run whose noiseless steps have these noise scales: each does a share of one's work."""
    done, steps = 0.0, 0
    while done < len(scales) - 1e-9:
        scale = scales[int(done)]
        done += 1 / (1 + scale / of)
        steps += 1
    return steps


def test_a_goal_by_counting_steps_where_the_noise_scale_grows():
    scales = np.linspace(20, 180, 4000)
    critical = scales.mean()
    assert batch.critical_batch(scales.sum(), len(scales)) == pytest.approx(critical)
    for of in (10, 50, 100, 400, 10_000):
        steps = count_steps(of, scales)
        assert batch.steps_needed(4000, critical, of) == pytest.approx(steps, rel=2e-3)
        assert batch.examples_needed(scales.sum(), critical, of) == pytest.approx(steps * of, rel=2e-3)
        assert (steps / 4000 - 1) * (steps * of / scales.sum() - 1) == pytest.approx(1, rel=0.05)
        for wrong in (scales[0], scales[-1], np.median(scales) * 1.1, 1 / (1 / scales).mean()):
            assert of > 1000 or batch.steps_needed(4000, wrong, of) != pytest.approx(steps, rel=0.01)


def steps_of_descent(of: float, goal: float) -> float:
    """Steps of plain descent at its best constant rate to a share of the loss, in 100 curvatures 1, 1/2, 1/3, …

    Exact in the mean: E x² = x₀² q^t + (at rest) (1 − q^t), q = (1 − ηλ)².
    """
    curvatures = 1 / np.arange(1, 101)
    start, fewest = float(curvatures.sum() / 2), math.inf
    times = np.unique(np.geomspace(1, 10_000, 500).round())[:, None]
    for rate in np.geomspace(3e-3, 1.99, 80):
        rest = rate / of / (2 - rate * curvatures)  # noise of variance λ in a direction
        left = ((1 - rate * curvatures) ** 2) ** times
        losses = (curvatures * (left + rest * (1 - left))).sum(axis=1) / 2
        there = np.flatnonzero(losses <= goal * start)
        if len(there):
            fewest = min(fewest, float(times[there[0], 0]))
    return fewest


def test_descent_at_its_best_rate_follows_the_law_within_a_tenth():
    """The law adds up single steps, each at its best; a run with one rate on a whole quadratic is near it."""
    sizes = np.array([1.0, 4, 16, 64, 256, 4096])
    steps = np.array([steps_of_descent(of, 0.05) for of in sizes])
    found = batch.fit_tradeoff(sizes, steps)
    law = batch.steps_needed(found.min_steps, found.critical_batch, sizes)
    assert np.abs(law / steps - 1).max() < 0.1
    assert steps[0] / steps[-1] > 20


def test_both_laws_are_kaplan_s_and_their_product_is_one():
    """Kaplan et al. 2020, eqs. 5.4 and 5.5: S_min = S/(1 + 𝓑/B), C_min = C/(1 + B/𝓑)."""
    of = np.geomspace(1, 1e6, 50)
    steps, examples = batch.steps_needed(300, 2000, of), batch.examples_needed(300 * 2000, 2000, of)
    np.testing.assert_allclose(steps / (1 + 2000 / of), 300)
    np.testing.assert_allclose(examples / (1 + of / 2000), 600_000)
    np.testing.assert_allclose((steps / 300 - 1) * (examples / 600_000 - 1), 1)
    np.testing.assert_allclose(examples, steps * of)
    np.testing.assert_allclose(batch.goal_seconds(600_000, 2000, of, 0.5), steps / 2)
    assert batch.steps_needed(300, 2000, 2000) == 600


@pytest.mark.parametrize(("b", "critical"), [(1, 16), (4, 1000), (300, 100)])
def test_more_ranks_speed_up_a_goal_up_to_a_limit(b, critical):
    for n in (1, 2, 3, 16, 1000):
        steps = batch.steps_needed(7, critical, b) / batch.steps_needed(7, critical, b * n)
        assert batch.rank_speedup(n, b, critical) == pytest.approx(steps)
    speedups = batch.rank_speedup([1, 2, 10**9], b, critical)
    assert speedups[0] == 1
    assert speedups[2] == pytest.approx(1 + critical / b, rel=1e-4)
    assert speedups[2] < 1 + critical / b


def test_at_the_critical_batch_the_speed_up_is_half_of_ranks_and_one():
    assert batch.rank_speedup(16, 1, 16) == 8.5
    for n in (1, 2, 3, 250):
        assert batch.rank_speedup(n, 8, 8 * n) == pytest.approx((n + 1) / 2)


def test_the_most_ranks_for_an_overhead():
    for critical, b, overhead in [(1000, 8, 1.0), (1000, 8, 0.2), (96, 32, 1.0), (3, 4, 1.0), (0.3, 0.1, 1.0)]:
        n = batch.most_ranks(critical, b, overhead)
        assert n == 0 or batch.examples_needed(1, critical, b * n) <= (1 + overhead) * (1 + 1e-9)
        assert batch.examples_needed(1, critical, b * (n + 1)) > 1 + overhead
    assert batch.most_ranks(3, 4) == 0


# --- a batch that grows --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_no_ramp_has_a_smaller_product(seed):
    rng = np.random.default_rng(seed)
    scales = np.exp(rng.normal(0, 1, 30))
    law = batch.ramp_gain(scales)

    def product(sizes: np.ndarray) -> float:
        return float((scales / sizes).mean() * sizes.mean() / scales.mean())

    for ratio in (0.01, 1.0, 50.0):
        assert product(np.sqrt(ratio * scales)) == pytest.approx(law)
        assert product(np.full(30, ratio)) == pytest.approx(1)
    for _ in range(500):
        sizes = np.sqrt(scales) * np.exp(rng.normal(0, 0.3, 30))
        assert product(sizes) > law
    assert product(scales) == pytest.approx((scales**0).mean())  # as large as the noise scale: nothing gained
    assert law < 0.97
    assert batch.ramp_gain([5.0, 5.0]) == pytest.approx(1)


def test_the_ramp_of_olmo_saves_the_steps_that_its_authors_print():
    """Billions of tokens at batches of 1024, 2048 and 4096 sequences; the last 50 are mid-training."""
    assert batch.steps_saved([(168, 1024), (335, 2048), (155, 4096)]) == pytest.approx(0.431, abs=5e-4)
    assert batch.steps_saved([(168, 1024), (335, 2048), (105, 4096)]) == pytest.approx(0.405, abs=5e-4)


def test_the_saving_by_counting_steps():
    stages = [(1200, 4), (2400, 8), (600, 12)]
    steps = sum(len(range(0, examples, size)) for examples, size in stages)
    assert batch.steps_saved(stages) == pytest.approx(1 - steps / (4200 / 4))
    assert batch.steps_saved([(1, 8)]) == 0
    assert batch.steps_saved([(1, 8), (1, 4)]) == pytest.approx(-0.5)  # a batch that shrinks


# --- fits ----------------------------------------------------------------------------------------------------------


def test_a_fit_finds_what_runs_were_made_from():
    sizes = np.array([16, 64, 256, 1024])
    found = batch.fit_tradeoff(sizes, batch.steps_needed(500, 200, sizes))
    assert found == pytest.approx((500, 200, 0, 0), abs=1e-6)
    assert found.min_examples == pytest.approx(100_000)
    two = batch.fit_tradeoff([10, 20], [30, 20])
    assert two[:2] == pytest.approx((10, 20))
    assert all(math.isnan(each) for each in two[2:])


@pytest.mark.parametrize("given", [False, True])
def test_the_errors_of_a_fit_are_those_of_many_fits(given):
    sizes = np.geomspace(20, 5000, 12)
    exact = batch.steps_needed(500, 200, sizes)
    errors = 0.03 * exact if not given else np.full(12, 8.0)
    rng = np.random.default_rng(0)
    fits = np.array(
        [
            batch.fit_tradeoff(sizes, exact + errors * rng.standard_normal(12), errors if given else None)
            for _ in range(2000)
        ]
    )
    assert fits[:, 0].mean() == pytest.approx(500, rel=0.01)
    assert fits[:, 1].mean() == pytest.approx(200, rel=0.01)
    for value, error in ((0, 2), (1, 3)):
        assert np.sqrt((fits[:, error] ** 2).mean()) == pytest.approx(fits[:, value].std(), rel=0.06)


def test_equal_weights_would_be_worse_where_errors_are_shares():
    sizes = np.geomspace(2, 5000, 12)
    exact, rng = batch.steps_needed(500, 200, sizes), np.random.default_rng(1)
    shares = exact * (1 + 0.05 * rng.standard_normal((300, 12)))
    weighted = np.array([batch.fit_tradeoff(sizes, each)[0] for each in shares])
    alike = []
    for each in shares:
        _, floor = np.polyfit(1 / sizes, each, 1)
        alike.append(floor)
    assert weighted.std() < np.std(alike) / 3


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda: batch.hessian_noise_scale([1, 2], [1, 2], [0, 0]), "gradient"),
        (lambda: batch.hessian_noise_scale([1, 2], [1, 2], [1]), "gradient"),
        (lambda: batch.hessian_noise_scale([1, 0], [1, 2], [1, 1]), "curvatures"),
        (lambda: batch.hessian_noise_scale([1, 2], [1, -2], [1, 1]), "variances"),
        (lambda: batch.improvement(0, 1), "global_batch"),
        (lambda: batch.improvement(1, -1), "noise_scale"),
        (lambda: batch.steps_needed(-1, 1, 1), "min_steps"),
        (lambda: batch.steps_needed(1, -1, 1), "critical_batch"),
        (lambda: batch.examples_needed(1, 0, 1), "critical_batch"),
        (lambda: batch.critical_batch(1, 0), "min_steps"),
        (lambda: batch.rank_speedup(0, 1, 1), "n"),
        (lambda: batch.ramp_gain([1, 0]), "noise_scales"),
        (lambda: batch.steps_saved([]), "stages"),
        (lambda: batch.steps_saved([(1, 2, 3)]), "stages"),
        (lambda: batch.steps_saved([(1, 0)]), "stages"),
        (lambda: batch.steps_saved([(0, 1)]), "stages"),
        (lambda: batch.steps_saved([(-1, 1)]), "stages"),
        (lambda: batch.steps_saved(3), "stages"),
        (lambda: batch.fit_tradeoff([1, 1], [2, 3]), "batches"),
        (lambda: batch.fit_tradeoff([1, 2], [2, 0]), "steps"),
        (lambda: batch.fit_tradeoff([1, 2, 4], [8, 4, 2]), "steps"),
        (lambda: batch.fit_tradeoff([1, 2, 4], [8, 9, 10]), "steps"),
        (lambda: batch.fit_tradeoff([1, 2], [2, 1.5], [1, 0]), "errors"),
        (lambda: batch.most_ranks(1, 1, 0), "overhead"),
        (lambda: batch.goal_seconds(1, 1, 1, -1), "step_seconds"),
    ],
)
def test_bad_input_is_named(call, names):
    with pytest.raises(ValueError, match=rf"^{names} must"):
        call()
