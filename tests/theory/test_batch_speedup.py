"""The linear speed-up: each line of its proof on a loss that is not convex, the bound on runs, and where it ends."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dtlib.theory import batch

SMOOTHNESS = 2.0
"""f(x) = Σ x²/(1 + x²): its second derivative lies in [−1/2, 2], its infimum is 0."""


def loss(x: np.ndarray) -> np.ndarray:
    return (x**2 / (1 + x**2)).sum(axis=-1)


def slope(x: np.ndarray) -> np.ndarray:
    return 2 * x / (1 + x**2) ** 2


def square(x: np.ndarray) -> np.ndarray:
    return (x**2).sum(axis=-1)


# --- the proof, line by line ---------------------------------------------------------------------------------------


def test_the_loss_is_smooth_and_not_convex():
    x = np.linspace(-5, 5, 100_001)
    second = np.gradient(slope(x), x)
    assert second.min() == pytest.approx(-0.5, abs=1e-6)
    assert second.max() == pytest.approx(SMOOTHNESS, rel=1e-6)


def test_a_step_s_loss_is_below_the_parabola_of_smoothness():
    rng = np.random.default_rng(0)
    x, way = 2 * rng.standard_normal((2, 20_000, 3))
    parabola = loss(x) + (slope(x) * way).sum(axis=1) + SMOOTHNESS / 2 * square(way)
    assert (loss(x + way) <= parabola + 1e-12).all()
    small = np.full(1, 1e-3)  # from the bottom, where slope and loss are zero, a flatter parabola lies too low
    assert loss(small) > 0.97 * SMOOTHNESS / 2 * square(small)


@pytest.mark.parametrize("rate", [0.01, 0.2, 0.5])
def test_a_step_gains_in_the_mean_half_of_the_rate_times_the_square(rate):
    """Noise ±σ in each direction, B = 1: every sign is looked at, so the mean is exact."""
    signs = np.array(np.meshgrid(*[[-1, 1]] * 3)).reshape(3, -1).T
    sigma, rng = 0.7, np.random.default_rng(1)
    for x in 2 * rng.standard_normal((300, 3)):
        after = loss(x - rate * (slope(x) + sigma * signs)).mean()
        noise = rate**2 * SMOOTHNESS / 2 * 3 * sigma**2
        exact = loss(x) - rate * (1 - rate * SMOOTHNESS / 2) * square(slope(x)) + noise
        simple = loss(x) - rate / 2 * square(slope(x)) + noise
        assert after <= exact + 1e-12
        assert exact <= simple + 1e-12  # since rate ≤ 1/L


def run(of: int, steps: int, rate: float, *, runs: int = 200, start: float = 1.5, seed: int = 2) -> float:
    """The mean over steps and runs of |∇f|², each gradient the mean of `of` samples with a noise of ±1 in each of 3."""
    rng = np.random.default_rng(seed)
    x, total = np.full((runs, 3), start), 0.0
    for _ in range(steps):
        gradient = slope(x)
        total += float(square(gradient).mean())
        heads = rng.binomial(of, 0.5, size=x.shape)
        x = x - rate * (gradient + (2 * heads - of) / of)
    return total / steps


GAP, VARIANCE = float(loss(np.full(3, 1.5))), 3.0


@pytest.mark.parametrize(("of", "steps"), [(1, 50), (1, 400), (8, 200), (64, 100)])
def test_runs_stay_below_the_bound(of, steps):
    for rate in (0.02, 0.1, 0.3, 1 / SMOOTHNESS):
        bound = batch.nonconvex_bound(GAP, SMOOTHNESS, VARIANCE, of, steps, rate)
        assert run(of, steps, rate) < bound


def test_no_smaller_bound_holds():
    """Both parts are reached on a parabola at a rate of 1/L: one step without noise, and long runs from the bottom."""
    bend, x0, variance, of = 3.0, 2.0, 5.0, 4
    square_at_start = (bend * x0) ** 2
    assert batch.nonconvex_bound(bend * x0**2 / 2, bend, 0.0, 1, 1, 1 / bend) == pytest.approx(square_at_start)
    steps = 1000  # at 1/L each x is minus the last noise over L: E|∇f|² = σ²/B from the second point on
    mean = (square_at_start + (steps - 1) * variance / of) / steps
    bound = batch.nonconvex_bound(bend * x0**2 / 2, bend, variance, of, steps, 1 / bend)
    assert mean <= bound < mean * 1.002


# --- the best rate, and what more ranks buy ------------------------------------------------------------------------


@pytest.mark.parametrize("of", [1, 30, 100, 333, 334, 1000])
def test_the_best_rate_by_trying_all(of):
    gap, bend, variance, steps = 1.5, 2.0, 10.0, 200  # linear until B = 333.3
    rates = np.geomspace(1e-4, 1 / bend, 200_001)
    bounds = batch.nonconvex_bound(gap, bend, variance, of, steps, rates)
    best = batch.best_rate(gap, bend, variance, of, steps)
    assert best == pytest.approx(rates[bounds.argmin()], rel=1e-3)
    assert batch.nonconvex_bound(gap, bend, variance, of, steps, best) <= bounds.min() * (1 + 1e-9)
    assert (best < 1 / bend) == (of < batch.linear_until(gap, bend, variance, steps))


def test_the_rate_grows_as_the_root_of_the_ranks_until_one_over_the_smoothness():
    until = batch.linear_until(1.5, 2.0, 10.0, 200)
    rates = batch.best_rate(1.5, 2.0, 10.0, until * np.array([1 / 16, 1 / 4, 1 / 1.001, 1, 4]), 200)
    assert rates[1] / rates[0] == pytest.approx(2)
    assert rates[2] < rates[3] == pytest.approx(0.5)
    assert rates[4] == 0.5
    assert batch.best_rate(1.5, 2.0, 0.0, 1, 200) == 0.5


@pytest.mark.parametrize("n", [2, 3, 8])
def test_n_ranks_need_an_nth_of_the_steps_for_the_same_bound(n):
    gap, bend, variance, b, steps = 1.5, 2.0, 10.0, 2, 4800

    def bound(ranks: int, steps: float) -> float:
        rate = batch.best_rate(gap, bend, variance, b * ranks, steps)
        return batch.nonconvex_bound(gap, bend, variance, b * ranks, steps, rate)

    assert bound(n, steps / n) == pytest.approx(bound(1, steps))
    assert bound(1, steps) == pytest.approx(2 * math.sqrt(2 * gap * bend * variance / (b * steps)))
    assert bound(n, steps / n / 1.03) > bound(1, steps) * 1.01
    beyond = 10**6  # ranks: noise is gone, steps are not
    assert bound(beyond, steps / beyond) > 100 * bound(1, steps)


def test_measured_runs_of_more_ranks_with_fewer_steps_are_as_good():
    """On the loss that is not convex, each at its own best rate: 1, 4 and 16 ranks, the same samples in all."""
    examples = 12_800

    def mean(n: int, rate: float) -> float:
        return run(n, examples // n, rate, runs=100)

    means = [mean(n, float(batch.best_rate(GAP, SMOOTHNESS, VARIANCE, n, examples // n))) for n in (1, 4, 16)]
    assert max(means) / min(means) < 1.1
    not_grown = float(batch.best_rate(GAP, SMOOTHNESS, VARIANCE, 1, examples))
    assert mean(16, not_grown) > 1.5 * means[0]


@pytest.mark.parametrize("of", [0.5, 7, 19.9, 20, 20.1, 60, 1e9])
def test_steps_for_a_goal_by_halving(of):
    gap, bend, variance, goal = 1.5, 2.0, 10.0, 1.0
    low, high = 1e-3, 1e6

    def bound(steps: float) -> float:
        return batch.nonconvex_bound(gap, bend, variance, of, steps, batch.best_rate(gap, bend, variance, of, steps))

    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if bound(middle) <= goal else (middle, high)
    assert batch.steps_for(gap, bend, variance, of, goal) == pytest.approx(high, rel=1e-9)


def test_steps_fall_as_one_over_the_batch_up_to_twice_the_noise_scale_of_the_goal():
    gap, bend, variance, goal = 1.5, 2.0, 10.0, 0.25
    until = batch.linear_batch(variance, goal)
    assert until == pytest.approx(2 * batch.noise_scale(variance, goal))
    of = np.geomspace(until / 100, until * 100, 4001)
    steps = batch.steps_for(gap, bend, variance, of, goal)
    slopes = np.diff(np.log(steps)) / np.diff(np.log(of))
    assert slopes[of[1:] <= until * (1 + 1e-9)] == pytest.approx(-1)
    assert (slopes[of[:-1] >= until * 1.01] > -0.999).all()
    least = 2 * gap * bend / goal
    assert batch.steps_for(gap, bend, variance, until, goal) == pytest.approx(2 * least)
    assert batch.linear_until(gap, bend, variance, 2 * least) == pytest.approx(until)
    assert (steps > least).all()
    assert batch.steps_for(gap, bend, 0.0, 1, goal) == pytest.approx(least)
    assert steps[-1] < least * 1.01


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda: batch.nonconvex_bound(1, 2, 1, 1, 1, 0.51), "rate"),
        (lambda: batch.nonconvex_bound(1, 2, 1, 1, 1, [0.1, 0.51]), "rate"),
        (lambda: batch.nonconvex_bound(1, 2, 1, 1, 1, 0), "rate"),
        (lambda: batch.nonconvex_bound(1, 0, 1, 1, 1, 0.1), "smoothness"),
        (lambda: batch.nonconvex_bound(-1, 2, 1, 1, 1, 0.1), "gap"),
        (lambda: batch.best_rate(1, 2, 1, 0, 1), "global_batch"),
        (lambda: batch.best_rate(1, 2, 1, 1, 0), "steps"),
        (lambda: batch.linear_until(0, 2, 1, 1), "gap"),
        (lambda: batch.linear_batch(1, 0), "goal"),
        (lambda: batch.steps_for(1, 2, -1, 1, 1), "variance"),
        (lambda: batch.steps_for(1, 2, 1, 1, float("nan")), "goal"),
    ],
)
def test_bad_input_is_named(call, names):
    with pytest.raises(ValueError, match=rf"^{names} must"):
        call()
