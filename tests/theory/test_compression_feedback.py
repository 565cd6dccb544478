"""Error feedback: its identity for any compressor, its bound and who meets it, and descent on quadratics."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dtlib.theory import compression


def shrink(delta: float):
    """The compressor that meets the bound: it contracts each vector by exactly `delta`."""
    return lambda x: (1 - math.sqrt(1 - delta)) * x


def shuffled(n: int, k: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    return lambda x: x * (rng.permutation(n) < k)


def qsgd(n: int, levels: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    return lambda x: compression.qsgd(x, levels, rng.random(n))


COMPRESSORS = {
    "top-k": lambda x: compression.top_k(x, 2),
    "sign": compression.sign,
    "random-k": shuffled(7, 2),
    "qsgd": qsgd(7, 1),
    "nothing": np.zeros_like,
    "rubbish": lambda x: np.full_like(x, 3.0),
}


@pytest.mark.parametrize("compress", COMPRESSORS.values(), ids=COMPRESSORS)
def test_what_was_sent_follows_what_was_meant_up_to_the_last_residual(compress):
    gradients = np.random.default_rng(1).standard_normal((40, 7)) + 0.5
    sent, left = compression.feedback(gradients, compress)
    for t in range(40):
        np.testing.assert_allclose(sent[: t + 1].sum(axis=0), gradients[: t + 1].sum(axis=0) - left[t], atol=1e-9)


@pytest.mark.parametrize("name", ["top-k", "sign", "random-k", "qsgd"])
def test_without_feedback_nothing_explains_the_rest(name):
    gradients = np.random.default_rng(1).standard_normal((40, 7)) + 0.5
    alone = np.array([COMPRESSORS[name](g) for g in gradients])
    left = compression.feedback(gradients, COMPRESSORS[name])[1]
    assert not np.allclose(alone.sum(axis=0), gradients.sum(axis=0) - left[-1], atol=1e-3)


def test_a_compressor_that_writes_into_its_input_changes_nothing():
    def careless(x):
        x[1:] = 0
        return x

    gradients = np.random.default_rng(2).standard_normal((5, 3))
    sent, left = compression.feedback(gradients, careless)
    np.testing.assert_allclose(sent.sum(axis=0) + left[-1], gradients.sum(axis=0))
    assert not sent[:, 1:].any()


@pytest.mark.parametrize("delta", [0.001, 0.1, 0.5, 0.99, 1.0])
def test_the_bound_is_approached_by_a_constant_gradient_that_is_shrunk(delta):
    gradient, steps = np.array([3.0, -4.0]), math.ceil(40 / delta)
    left = compression.feedback(np.tile(gradient, (steps, 1)), shrink(delta))[1]
    bound = compression.feedback_error_bound(delta, 5.0)
    norms = np.linalg.norm(left, axis=1)
    assert norms[-1] == pytest.approx(bound, rel=1e-6, abs=1e-12)
    assert (norms <= bound * (1 + 1e-12)).all()
    assert delta == 1 or norms[-1] > bound / 1.03
    assert bound <= 2 * math.sqrt(1 - delta) / delta * 5.0 + 1e-12  # Karimireddy et al. 2019, Lemma 3: its square root


@pytest.mark.parametrize(("n", "k"), [(5, 1), (20, 3), (64, 60)])
def test_top_k_keeps_below_the_bound_on_gradients_that_try_to_break_it(n, k):
    """The worst next gradient adds to the residual in its own direction, or evens its elements out."""
    bound, left = compression.feedback_error_bound(compression.top_k_contraction(n, k), 1.0), np.zeros(n)
    rng, largest = np.random.default_rng(3), 0.0
    for step in range(400):
        aim = left if step % 2 else rng.standard_normal(n) * (left == np.abs(left).min())
        gradient = np.ones(n) if not np.linalg.norm(aim) else aim
        meant = left + gradient / np.linalg.norm(gradient)
        left = meant - compression.top_k(meant, k)
        largest = max(largest, float(np.linalg.norm(left)))
    assert 0.05 * bound < largest <= bound


def test_the_bound_holds_for_the_root_mean_square_where_dice_decide():
    """2,000 runs of random-k: the mean square after 60 steps against the bound, and without dice's mean above it."""
    n, k, gradient = 6, 1, np.full(6, 6**-0.5)
    ends = np.zeros((2000, n))
    rng = np.random.default_rng(4)
    for _ in range(60):  # all runs at once
        meant = ends + gradient
        stay = rng.integers(n, size=2000)
        meant[np.arange(2000), stay] = 0
        ends = meant
    squares = (ends**2).sum(axis=1)
    bound = compression.feedback_error_bound(k / n, 1.0) ** 2
    assert squares.mean() + 5 * squares.std() / math.sqrt(2000) < bound
    assert squares.max() > squares.mean() * 1.2  # single runs may lie far above their mean


def test_the_mean_of_residuals_obeys_the_bound_of_one():
    rng, n, ranks = np.random.default_rng(5), 12, 4
    gradients = rng.standard_normal((ranks, 200, n))
    gradients /= np.linalg.norm(gradients, axis=2, keepdims=True)
    runs = [compression.feedback(each, lambda x: compression.top_k(x, 3)) for each in gradients]
    left = np.mean([left for _, left in runs], axis=0)
    sent = np.mean([sent for sent, _ in runs], axis=0)
    assert np.linalg.norm(left, axis=1).max() <= compression.feedback_error_bound(3 / n, 1.0)
    np.testing.assert_allclose(sent.sum(axis=0), gradients.mean(axis=0).sum(axis=0) - left[-1], atol=1e-9)


# --- descent -------------------------------------------------------------------------------------------------------


def descend(curvatures, rate: float, steps: int, compress, *, keep: bool = True) -> np.ndarray:
    """f = ½ xᵀHx from ones in a turned basis, the largest norm of x and the residual at each step."""
    n = len(curvatures)
    turn = np.linalg.qr(np.random.default_rng(6).standard_normal((n, n))).Q
    hessian, x, left, norms = turn * curvatures @ turn.T, np.ones(n), np.zeros(n), []
    for _ in range(steps):
        meant = hessian @ x + left
        sent = compress(meant)
        left = (meant - sent) * keep
        x = x - rate * sent
        norms.append(max(np.linalg.norm(x), np.linalg.norm(left)))
    return np.array(norms)


@pytest.mark.parametrize("seed", range(1, 4))
def test_below_the_rate_feedback_converges_to_the_optimum(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 7))
    curvatures = np.exp(rng.uniform(-0.5, 0.5, n))
    for k in range(1, n + 1):
        rate = 0.99 * compression.feedback_rate(max(curvatures), min(curvatures), k / n)
        steps = math.ceil(20 / (rate * min(curvatures)))
        norms = descend(curvatures, rate, steps, lambda x, k=k: compression.top_k(x, k))
        assert norms[-1] < 1e-6
        assert norms[-1] < norms[steps // 2] < norms[0]


def test_the_rate_is_one_over_the_smoothness_without_a_loss_and_the_proof_s_matrix_agrees():
    assert compression.feedback_rate(4.0, 0.5, 1.0) == 0.25
    for most, least, delta in [(2.0, 0.3, 0.1), (1.0, 1.0, 0.01), (10.0, 0.01, 0.6), (3.0, 2.0, 0.999)]:
        rate, q = compression.feedback_rate(most, least, delta), math.sqrt(1 - delta)

        def radius(g, most=most, least=least, q=q):
            step = [[1 - g * least, g * g * most], [q * most, q * (1 + g * most)]]
            return max(abs(np.linalg.eigvals(step)))

        assert radius(0.99 * rate) < 1
        if rate < 1 / most:
            assert radius(rate) == pytest.approx(1)
            assert radius(1.03 * rate) > 1


def test_above_what_descent_itself_bears_nothing_converges():
    norms = descend([1.0, 3.0], 2.1 / 3, 500, lambda x: compression.top_k(x, 1))
    assert norms[-1] > 1
    assert compression.feedback_rate(3.0, 1.0, 0.5) < 2.1 / 3


def stalling(rate: float, steps: int, *, keep: bool) -> np.ndarray:
    """Two ranks that pull a ways apart along the first axis, and agree on the second: ½|x − (±10, 1)|², top-1 of 2."""
    aims, x, left = np.array([[10.0, 1.0], [-10.0, 1.0]]), np.zeros(2), np.zeros((2, 2))
    for _ in range(steps):
        meant = x - aims + left
        sent = np.array([compression.top_k(each, 1) for each in meant])
        left = (meant - sent) * keep
        x = x - rate * sent.mean(axis=0)
    return x


def test_top_k_of_ranks_that_disagree_stalls_without_feedback_and_arrives_near_the_optimum_with_it():
    np.testing.assert_array_equal(stalling(0.01, 500, keep=False), [0, 0])
    off = [np.linalg.norm(stalling(rate, int(30 / rate), keep=True) - [0, 1]) for rate in (0.1, 0.01)]
    bound = compression.feedback_error_bound(0.5, 11.5)  # gradients at their norms near the optimum and on the way
    assert off[0] <= 0.1 * bound
    assert off[1] <= 0.01 * bound


@pytest.mark.parametrize(("before", "after"), [(0.1, 0.01), (0.01, 0.1)])
def test_a_residual_is_owed_at_the_rate_at_which_it_was_left(before, after):
    """Σ rate · sent = Σ rate · g − rate · e across a change of rate, where e is multiplied by old over new."""
    rng = np.random.default_rng(7)
    gradients, rates = rng.standard_normal((20, 5)), np.repeat([before, after], 10)

    def off(factor: float) -> float:
        moved, left = np.zeros(5), np.zeros(5)
        for t, (gradient, rate) in enumerate(zip(gradients, rates, strict=True)):
            left = left * (factor if t == 10 else 1.0)
            meant = gradient + left
            sent = compression.top_k(meant, 1)
            left, moved = meant - sent, moved + rate * sent
        return float(np.abs(moved + after * left - (rates[:, None] * gradients).sum(axis=0)).max())

    assert off(before / after) < 1e-12
    assert off(1.0) > 1e-3  # not rescaled
    assert off(after / before) > 1e-3  # the wrong way round


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda: compression.feedback_error_bound(0.0, 1.0), "delta"),
        (lambda: compression.feedback_error_bound(1.1, 1.0), "delta"),
        (lambda: compression.feedback_error_bound(0.5, -1.0), "gradient_norm"),
        (lambda: compression.feedback_error_bound(float("nan"), 1.0), "delta"),
        (lambda: compression.feedback_rate(1.0, 2.0, 0.5), "convexity"),
        (lambda: compression.feedback_rate(1.0, 0.0, 0.5), "convexity"),
        (lambda: compression.feedback_error_bound([0.5, 0.6], 1.0), "delta"),
        (lambda: compression.feedback([1.0], np.copy), "gradients"),
        (lambda: compression.feedback([[1.0, 2.0]], lambda x: x[:1]), "compress"),
    ],
)
def test_bad_input_is_named(call, names):
    with pytest.raises(ValueError, match=rf"^{names} must"):
        call()
