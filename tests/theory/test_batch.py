"""How noisy a gradient is: against every draw of small sets of samples, many normal draws, and descent at rest."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from dtlib.theory import batch

SAMPLES = np.array([[1.0, 0.0], [3.0, -1.0], [-1.0, 4.0]])
"""The gradients of three samples, drawn with equal chance."""
G = SAMPLES.mean(axis=0)
VARIANCE = float(((SAMPLES - G) ** 2).sum(axis=1).mean())
SQUARE = float(G @ G)


def draws(count: int, samples=SAMPLES) -> np.ndarray:
    """Every way to draw `count` samples, with replacement: shape (ways, count, 2)."""
    return samples[np.array(list(itertools.product(range(len(samples)), repeat=count)))]


def spread(means: np.ndarray, around=G) -> float:
    return float(((means - around) ** 2).sum(axis=1).mean())


# --- samples and ranks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("b", "n"), [(1, 1), (3, 1), (1, 2), (2, 3), (1, 7)])
def test_the_variance_of_a_mean_over_every_draw(b, n):
    measured = spread(draws(b * n).mean(axis=1))
    assert batch.averaged_variance(VARIANCE, b, n) == pytest.approx(measured, rel=1e-12)
    for wrong in (VARIANCE / b, VARIANCE / n, VARIANCE / (b * n) ** 2, VARIANCE / (b * n - 0.5), VARIANCE):
        assert wrong == pytest.approx(measured) if wrong == VARIANCE / (b * n) else wrong != pytest.approx(measured)


@pytest.mark.parametrize("counts", [(1,), (2, 2), (1, 2), (1, 5), (1, 2, 3), (4, 1, 1)])
def test_unweighted_means_of_unequal_ranks_are_noisier_than_weighted_ones(counts):
    every, parts = draws(sum(counts)), np.cumsum(counts)[:-1]
    means = np.stack([part.mean(axis=1) for part in np.split(every, parts, axis=1)])
    unweighted, weighted = spread(means.mean(axis=0)), spread(np.average(means, axis=0, weights=counts))
    assert batch.mean_of_means_variance(VARIANCE, counts) == pytest.approx(unweighted, rel=1e-12)
    assert weighted == pytest.approx(VARIANCE / sum(counts), rel=1e-12)
    assert (unweighted > weighted * (1 + 1e-9)) == (len(set(counts)) > 1)


def test_unweighted_is_never_less_noisy():
    rng = np.random.default_rng(0)
    for _ in range(200):
        counts = rng.integers(1, 1000, rng.integers(1, 40))
        assert batch.mean_of_means_variance(1.0, counts) >= 1 / counts.sum() * (1 - 1e-12)
    assert batch.mean_of_means_variance(1.0, [1, 1000]) > 0.25  # a rank of one sample has half of the say


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("common", [0, 1, 2])
def test_ranks_that_see_some_samples_in_common(n, common):
    """Two samples a rank, `common` of them the same on all ranks: their means' correlation is common/2."""
    own = 2 - common
    every = draws(common + n * own)
    means = [
        np.concatenate([every[:, :common], every[:, common + r * own : common + (r + 1) * own]], axis=1).mean(axis=1)
        for r in range(n)
    ]
    law = batch.correlated_variance(VARIANCE, 2, n, common / 2)
    assert law == pytest.approx(spread(np.mean(means, axis=0)), rel=1e-12)
    if common == 2:
        assert law == pytest.approx(VARIANCE / 2)
    elif common == 0:
        assert law == pytest.approx(batch.averaged_variance(VARIANCE, 2, n))


@pytest.mark.parametrize(("b", "n"), [(1, 2), (1, 5), (2, 2), (2, 3), (3, 2)])
def test_without_replacement_the_whole_set_has_no_variance(b, n):
    six = np.random.default_rng(1).standard_normal((6, 2))
    mean, variance = six.mean(axis=0), 6 * float(six.var(axis=0).sum()) / 6
    measured = spread(six[np.array(list(itertools.combinations(range(6), b * n)))].mean(axis=1), mean)
    of_a_rank = variance / b * (6 - b) / 5  # what the law calls variance/batch
    law = batch.correlated_variance(of_a_rank * b, b, n, -b / (6 - b))
    assert law == pytest.approx(measured, rel=1e-9, abs=1e-15)
    assert law == pytest.approx(batch.averaged_variance(variance, b, n) * (6 - b * n) / 5, abs=1e-15)


def test_correlated_ranks_are_worth_at_most_one_over_their_correlation():
    for rho in (0.01, 0.1, 0.5):
        worth = 1 / batch.correlated_variance(1.0, 1, [1, 2, 3, 64, 10**6], rho)
        assert worth[0] == 1
        assert (np.diff(worth) > 0).all()
        assert worth[-1] < 1 / rho < worth[-1] * 1.001
    assert 1 / batch.correlated_variance(1.0, 1, 64, 0.1) == pytest.approx(8.77, abs=5e-3)


# --- the noise scale from squares of norms -------------------------------------------------------------------------


@pytest.mark.parametrize(("b", "n"), [(1, 2), (2, 2), (1, 3), (2, 3), (3, 2), (1, 7)])
def test_squares_of_ranks_and_of_their_mean_give_both_without_bias(b, n):
    means = draws(b * n).reshape(-1, n, b, 2).mean(axis=2)
    small = (means**2).sum(axis=2).mean(axis=1)
    large = (means.mean(axis=1) ** 2).sum(axis=1)
    assert batch.expected_square(SQUARE, VARIANCE, b) == pytest.approx(small.mean(), rel=1e-12)
    assert batch.expected_square(SQUARE, VARIANCE, b * n) == pytest.approx(large.mean(), rel=1e-12)
    square, variance = batch.split_squares(small, large, b, b * n)
    assert square.mean() == pytest.approx(SQUARE, rel=1e-11)
    assert variance.mean() == pytest.approx(VARIANCE, rel=1e-11)
    gram = np.einsum("drk,dqk->drq", means, means)
    pairs = (gram.sum(axis=(1, 2)) - np.trace(gram, axis1=1, axis2=2)) / (n * (n - 1))
    np.testing.assert_allclose(square, pairs, atol=1e-12)
    np.testing.assert_allclose(variance, b * means.var(axis=1, ddof=1).sum(axis=1), atol=1e-12)
    wrong = {
        "1 and n for b and bn": batch.split_squares(small, large, 1, n),
        "the sum for the mean": batch.split_squares(small, large * n**2, b, b * n),
        "one rank's norm is |G|": (large, variance),
        "population for sample": (square, b * means.var(axis=1).sum(axis=1)),
    }
    for name, (s, v) in wrong.items():
        off = abs(s.mean() / SQUARE - 1) > 0.03 or abs(v.mean() / VARIANCE - 1) > 0.03
        assert off == (name != "1 and n for b and bn" or b > 1), name
    if b * n < 7:
        assert square.min() < 0  # an estimate may be: so ratios of means, not means of ratios
    with np.errstate(divide="ignore"):
        assert not abs((variance / square).mean() / (VARIANCE / SQUARE) - 1) < 0.03


@pytest.mark.parametrize("n", [2, 4])
def test_ranks_with_the_same_samples_show_no_noise(n):
    means = draws(2).mean(axis=1)
    squares = (means**2).sum(axis=1)
    square, variance = batch.split_squares(squares, squares, 2, 2 * n)
    assert not variance.any()
    assert square.mean() == pytest.approx(SQUARE + VARIANCE / 2)  # and too large a gradient


def normal(batch_size: int, n: int, count: int, seed: int = 2):
    """Estimates from `count` draws of normal gradients on n ranks, and what their covariance is made of."""
    rng = np.random.default_rng(seed)
    root = np.array([[2.0, 0.0, 0.0], [1.0, 1.0, 0.0], [-0.5, 0.3, 0.4]])
    gradient, covariance = np.array([1.0, -0.5, 0.25]), root @ root.T
    noise = rng.standard_normal((count, n, 3)) @ root.T / math.sqrt(batch_size)
    means = gradient + noise
    small, large = (means**2).sum(axis=2).mean(axis=1), (means.mean(axis=1) ** 2).sum(axis=1)
    facts = {
        "square": gradient @ gradient,
        "variance": np.trace(covariance),
        "along": gradient @ covariance @ gradient,
        "trace_square": np.trace(covariance @ covariance),
    }
    return *batch.split_squares(small, large, batch_size, batch_size * n), facts


@pytest.mark.parametrize(("b", "n"), [(1, 2), (4, 2), (2, 3), (64, 4)])
def test_the_standard_errors_of_both_estimates(b, n):
    square, variance, facts = normal(b, n, 200_000)
    along, q = facts["along"], facts["trace_square"]
    assert batch.square_error(along, q, b, n) == pytest.approx(square.std(), rel=0.015)
    assert batch.variance_error(q, n) == pytest.approx(variance.std(), rel=0.015)
    total = b * n
    wrong = [
        math.sqrt(4 * along / total + 2 * q / total**2) if b < 10 else 0.0,  # |ḡ|² alone, without its correction
        math.sqrt(2 * q / total**2 * n / (n - 1)),  # the cross term forgotten
        math.sqrt(along / total + 2 * q / total**2 * n / (n - 1)),
        batch.square_error(along, q, 1, n) if b > 1 else 0.0,
    ]
    assert all(abs(each / square.std() - 1) > 0.015 for each in wrong)
    assert math.sqrt(2 * q / n) < 0.87 * variance.std()
    of_means = square.reshape(-1, 50).mean(axis=1).std()
    assert batch.square_error(along, q, b, n, steps=50) == pytest.approx(of_means, rel=0.05)
    assert batch.variance_error(q, n, steps=[1, 4])[1] == pytest.approx(batch.variance_error(q, n) / 2)


def test_the_noise_scale_is_where_noise_and_gradient_are_alike():
    scale = batch.noise_scale(VARIANCE, SQUARE)
    assert batch.expected_square(SQUARE, VARIANCE, scale) == pytest.approx(2 * SQUARE)
    assert batch.averaged_variance(VARIANCE, scale) == pytest.approx(SQUARE)


# --- descent at rest -----------------------------------------------------------------------------------------------


def at_rest(rate: float, curvature: float, variance: float, momentum: float) -> float:
    """E of ½λx² at rest: the second moments of (x, v) under x' = x − η(μv + λx + e), repeated until they stay."""
    eta, mu = rate, momentum
    step = np.array([[1 - eta * curvature, -eta * mu], [curvature, mu]])
    noise = variance * np.array([[eta**2, -eta], [-eta, 1.0]])
    moments = np.zeros((2, 2))
    for _ in range(40):  # doubling: after k rounds 2^k steps
        moments, step, noise = moments, step @ step, noise + step @ noise @ step.T
    return 0.5 * curvature * float(noise[0, 0])


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("share", [1e-3, 0.1, 0.5, 0.9, 0.99])
def test_the_loss_at_rest_from_the_moments_of_a_step(momentum, share):
    curvatures, variances, of = [0.5, 2.0], [3.0, 0.7], 4
    rate = share * 2 * (1 + momentum) / 2.0
    law = batch.stationary_loss(rate, of, curvatures, variances, momentum)
    found = sum(at_rest(rate, c, v / of, momentum) for c, v in zip(curvatures, variances, strict=True))
    assert law == pytest.approx(found, rel=1e-6)
    if momentum and rate < 1:
        assert batch.stationary_loss(rate, of, curvatures, variances) < found * 0.97
        if share == 1e-3:  # as a rate of η/(1 − μ) has without momentum
            alike = batch.stationary_loss(rate / (1 - momentum), of, curvatures, variances)
            assert law == pytest.approx(alike, rel=0.15)


@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_the_loss_at_rest_of_long_runs(momentum):
    rng, of = np.random.default_rng(4), 3
    curvatures, variances, rate = np.array([0.4, 1.0]), np.array([2.0, 1.0]), 0.7
    x, v, losses = np.zeros((2000, 2)), np.zeros((2000, 2)), []
    for step in range(500):
        # the mean of `of` samples, of which each has a noise of ±√variance
        noise = (rng.integers(2, size=(2000, 2, of)) * 2 - 1).mean(axis=2) * np.sqrt(variances)
        v = momentum * v + curvatures * x + noise
        x = x - rate * v
        if step >= 100:
            losses.append(float((curvatures * x**2).sum(axis=1).mean() / 2))
    law = batch.stationary_loss(rate, of, curvatures, variances, momentum)
    assert np.mean(losses) == pytest.approx(law, rel=0.02)
    assert law / np.mean(losses) != pytest.approx(1.03, rel=0.005)


def test_rate_over_batch_keeps_the_loss_until_curvature_stops_it():
    curvatures, variances = [0.01, 1.0], [1.0, 1.0]
    small = batch.stationary_loss(0.01, 1, curvatures, variances)
    for times, off in [(2, 0.01), (10, 0.03), (100, 0.51), (180, 4.6)]:
        grown = batch.stationary_loss(0.01 * times, times, curvatures, variances)
        assert 0 < grown / small - 1 < off
    assert grown / small > 5
    with pytest.raises(ValueError, match="rate must be below"):
        batch.stationary_loss(0.01 * 200, 200, curvatures, variances)
    many = batch.stationary_loss([0.1, 0.2], [1, 2], curvatures, variances)
    assert many[1] == batch.stationary_loss(0.2, 2, curvatures, variances)


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda: batch.averaged_variance(-1, 1), "variance"),
        (lambda: batch.averaged_variance(1, 0), "batch"),
        (lambda: batch.averaged_variance(1, 1, 1.5), "n"),
        (lambda: batch.averaged_variance(1, 1, [1, 0]), "n"),
        (lambda: batch.mean_of_means_variance(1, [1, 0]), "counts"),
        (lambda: batch.mean_of_means_variance(1, []), "counts"),
        (lambda: batch.mean_of_means_variance(1, 3), "counts"),
        (lambda: batch.correlated_variance(1, 1, 3, -0.6), "correlation"),
        (lambda: batch.correlated_variance(1, 1, 3, 1.1), "correlation"),
        (lambda: batch.correlated_variance(1, 1, 3, float("nan")), "correlation"),
        (lambda: batch.correlated_variance(1, 1, 3, "0.5"), "correlation"),
        (lambda: batch.noise_scale(1, 0), "square"),
        (lambda: batch.split_squares(1, 1, 4, 4), "batch_large"),
        (lambda: batch.split_squares(1, -1, 2, 4), "square_large"),
        (lambda: batch.split_squares(float("inf"), 1, 2, 4), "square_small"),
        (lambda: batch.square_error(1, 1, 1, 1), "n"),
        (lambda: batch.variance_error(1, 2, 0), "steps"),
        (lambda: batch.stationary_loss(0.1, 1, [1, 2], [1]), "variances"),
        (lambda: batch.stationary_loss(0.1, 1, [1, 0], [1, 1]), "curvatures"),
        (lambda: batch.stationary_loss(1.0, 1, [2], [1]), "rate"),
        (lambda: batch.stationary_loss(0.1, 1, [2], [1], 1.0), "momentum"),
        (lambda: batch.stationary_loss(0.1, 1, [2], [1], -0.1), "momentum"),
    ],
)
def test_bad_input_is_named(call, names):
    with pytest.raises(ValueError, match=rf"^{names} must"):
        call()
