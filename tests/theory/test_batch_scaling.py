"""The learning rate at another batch: what each rule keeps, and the best rate by trying all."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from dtlib.theory import batch

# --- what the rules keep -------------------------------------------------------------------------------------------


def way(rate: float, of: int, examples: int = 8, *, normed: bool = False) -> tuple[float, float]:
    """Mean and variance of how far `examples` samples move x on a slope of 0.1, over all signs of a noise of ±1.

    With `normed` the step divides by the root of E g², as Adam with long averages does.
    """
    signs = np.array(list(itertools.product([-1, 1], repeat=examples)))
    gradients = (0.1 + signs).reshape(len(signs), -1, of).mean(axis=2)
    if normed:
        gradients = gradients / math.sqrt(0.1**2 + 1 / of)
    moved = -rate * gradients.sum(axis=1)
    return float(moved.mean()), float(moved.var())


@pytest.mark.parametrize("times", [2, 4, 8])
def test_linear_scaling_keeps_way_and_variance_over_the_same_examples(times):
    assert way(batch.linear_rate(0.3, 1, times), times) == pytest.approx(way(0.3, 1))
    mean, variance = way(batch.sqrt_rate(0.3, 1, times), times)
    assert mean == pytest.approx(way(0.3, 1)[0] / math.sqrt(times))
    assert variance == pytest.approx(way(0.3, 1)[1] / times)


@pytest.mark.parametrize("times", [2, 4, 8])
def test_the_root_keeps_both_for_steps_that_divide_by_the_size_of_a_noisy_gradient(times):
    """The noise scale is 100: the batch stays below a twelfth of it."""
    before, after = way(0.3, 1, normed=True), way(batch.sqrt_rate(0.3, 1, times), times, normed=True)
    assert after == pytest.approx(before, rel=0.08)
    linear = way(batch.linear_rate(0.3, 1, times), times, normed=True)
    assert abs(linear[0]) > 1.3 * abs(before[0])
    exact = way(batch.adam_rate(0.3, 1, times, 100), times, normed=True)
    assert exact[0] / before[0] == pytest.approx(101 / (100 + times))  # way ∝ (E/B) η G/√(G² + σ²/B)


def test_large_steps_leave_what_linear_scaling_promises():
    """k steps of η against one of kη on ½λx², without noise: alike while kηλ is small, apart at 2."""
    for k, off in [(2, 1e-4), (10, 5e-3), (100, 0.5)]:
        small, large = (1 - 0.01) ** k, 1 - batch.linear_rate(0.01, 1, k)
        assert abs(small - large) < off
    assert abs(1 - batch.linear_rate(0.01, 1, 250)) > 1  # further off than before


@pytest.mark.parametrize(("scale", "now", "then"), [(100, 1, 10), (100, 30, 1000), (5, 1, 5), (0, 1, 7)])
def test_the_exact_rules_lie_between_none_and_linear(scale, now, then):
    sgd, adam = batch.sgd_rate(1.0, now, then, scale), batch.adam_rate(1.0, now, then, scale)
    assert 1 <= adam <= sgd <= batch.linear_rate(1.0, now, then)
    assert adam <= batch.sqrt_rate(1.0, now, then)
    assert batch.sgd_rate(sgd, then, now, scale) == pytest.approx(1)
    assert batch.sgd_rate(1.0, now, then, 1e12) == pytest.approx(batch.linear_rate(1.0, now, then))
    assert batch.adam_rate(1.0, now, then, 1e12) == pytest.approx(batch.sqrt_rate(1.0, now, then))


def test_goyal_s_rate_for_eight_thousand_images():
    assert batch.linear_rate(0.1, 256, 8192) == pytest.approx(3.2)


# --- the best rate of Adam -----------------------------------------------------------------------------------------

NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(80)
WEIGHTS = WEIGHTS / WEIGHTS.sum()
GRADIENT, CURVATURES = np.array([1.0, -0.3, 2.0]), np.array([0.5, 2.0, 1.0])


def best_adam_rate(scale: float, of: float, direction) -> float:
    """The rate with the greatest mean gain of a step, of 40,001; each direction's noise has σ² = 𝓑 G_i²."""
    rates = np.linspace(0, 2 * np.abs(GRADIENT).sum() / CURVATURES.sum(), 40_001)
    noises = GRADIENT[:, None] + np.abs(GRADIENT)[:, None] * math.sqrt(scale / of) * NODES
    ways = direction(noises, np.sqrt(GRADIENT**2 * (1 + scale / of))[:, None])
    first, second = ways @ WEIGHTS, ways**2 @ WEIGHTS
    return float(rates[(rates * (GRADIENT @ first) - rates**2 / 2 * (CURVATURES @ second)).argmax()])


def test_the_best_rate_of_normed_steps_by_trying_all():
    scale = 40.0
    now = best_adam_rate(scale, 4, lambda g, size: g / size)
    for of in (1, 16, 40, 400, 1e6):
        then = best_adam_rate(scale, of, lambda g, size: g / size)
        assert batch.adam_rate(now, 4, of, scale) == pytest.approx(then, rel=1e-3)
        for wrong in (batch.sgd_rate, lambda rate, a, b, _: batch.sqrt_rate(rate, a, b)):
            assert of == 1 or wrong(now, 4, of, scale) != pytest.approx(then, rel=0.03)


def test_the_average_that_adam_keeps_is_near_enough_to_the_mean_square():
    """β₂ = 0.999 for 8,000 draws at one point: the best rates of batches of 1 and 100."""
    rng, scale, rates = np.random.default_rng(0), 40.0, []
    for of in (1, 100):
        noise = math.sqrt(scale / of) * np.abs(GRADIENT)
        v = np.zeros((200, 3))
        for step in range(8000):
            g = GRADIENT + noise * rng.standard_normal((200, 3))
            v += (1 - 0.999) * (g * g - v)
            if step == 7998:
                last = v / (1 - 0.999 ** (step + 1))
        first = GRADIENT * (1 / np.sqrt(last)).mean(axis=0)  # the next gradient does not depend on the average
        second = (GRADIENT**2 + noise**2) * (1 / last).mean(axis=0)
        rates.append(float(GRADIENT @ first / (CURVATURES @ second)))
    assert batch.adam_rate(rates[0], 1, 100, scale) == pytest.approx(rates[1], rel=0.01)


def test_the_sign_of_a_gradient_has_the_same_two_ends():
    """E sign(G + e) = erf(√(B/2𝓑)) and sign² = 1: from far below to above its best rate grows by up to a third more."""
    rng, of, scale = np.random.default_rng(1), 10.0, 40.0
    signs = np.sign(1 + math.sqrt(scale / of) * rng.standard_normal(1_000_000))
    assert signs.mean() == pytest.approx(math.erf(math.sqrt(of / (2 * scale))), abs=5e-3)
    batches = np.geomspace(scale * 1e-6, scale * 1e4, 400)
    ends = np.array([math.erf(math.sqrt(b / (2 * scale))) for b in batches])
    ratio = ends / batch.adam_rate(1.0, 1e12, batches, scale)
    assert ratio[0] == pytest.approx(math.sqrt(2 / math.pi), rel=1e-4)
    assert ratio[-1] == pytest.approx(1, rel=1e-4)
    assert 1.3 < ratio.max() / ratio.min() < 1.35


# --- warm-up -------------------------------------------------------------------------------------------------------


def test_a_warm_up_is_a_line_and_then_flat():
    assert batch.warmup([0, 1, 2, 4, 5, 100], 5, 3.2, 0.1) == pytest.approx([0.1, 0.72, 1.34, 2.58, 3.2, 3.2])
    assert batch.warmup(0, 5, 3.2) == 0
    assert batch.warmup(0, 0, 3.2, 0.1) == 3.2
    assert batch.warmup(3, 1, 3.2) == 3.2
    down = batch.warmup([0, 1, 2], 2, 0.1, 0.3)
    assert down == pytest.approx([0.3, 0.2, 0.1])


def test_a_warm_up_carries_descent_past_a_curvature_that_the_full_rate_diverges_on():
    """Curvature falls from 30 to 1 over 50 steps: at a rate of 0.5 descent first grows without bound, warmed up not."""
    curvatures = 1 + 29 * np.maximum(0, 1 - np.arange(200) / 50)
    cold, warm = 1.0, 1.0
    most = [1.0, 1.0]
    for step, curvature in enumerate(curvatures):
        cold *= 1 - 0.5 * curvature
        warm *= 1 - float(batch.warmup(step, 100, 0.5)) * curvature
        most = [max(most[0], abs(cold)), max(most[1], abs(warm))]
    assert most[1] == 1
    assert most[0] > 1e20


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda: batch.linear_rate(-1, 1, 1), "rate"),
        (lambda: batch.linear_rate(1, 0, 1), "batch"),
        (lambda: batch.sqrt_rate(1, 1, 0), "new_batch"),
        (lambda: batch.sgd_rate(1, 1, 1, -1), "noise_scale"),
        (lambda: batch.adam_rate(1, 1, float("inf"), 1), "new_batch"),
        (lambda: batch.adam_rate(-1, 1, 1, 1), "rate"),
        (lambda: batch.warmup(-1, 5, 1), "step"),
        (lambda: batch.warmup(0.5, 5, 1), "step"),
        (lambda: batch.warmup(1, -5, 1), "steps"),
        (lambda: batch.warmup(1, 5, -1), "rate"),
        (lambda: batch.warmup(1, 5, 1, -1), "start"),
    ],
)
def test_bad_input_is_named(call, names):
    with pytest.raises(ValueError, match=rf"^{names} must"):
        call()
