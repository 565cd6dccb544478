"""Compressed vectors and matrices, against every draw there is, many draws, and other arithmetic."""

from __future__ import annotations

import math
from itertools import combinations, permutations, product

import numpy as np
import pytest

from dtlib.theory import compression

LEVELS = [1, 2, 3, 7]
VECTORS = {
    "one": [3.0],
    "equal": [1.0, -1.0, 1.0, -1.0],
    "spread": [0.5, -3.0, 0.0, 1.25, 2.0],
    "one large": [1e-3, 100.0, -1e-3],
    "huge": [1e200, -3e200, 2e199],
    "tiny": [1e-200, -3e-200],
}
each_vector = pytest.mark.parametrize("x", [np.array(v) for v in VECTORS.values()], ids=list(VECTORS))


def close(law: float, seen: float, rel: float = 1e-9) -> None:
    """Both agree, and so closely that a law 3 % off would not."""
    assert seen == pytest.approx(law, rel=rel, abs=1e-13)
    if law:
        assert all(seen != pytest.approx(off * law, rel=rel) for off in (1.03, 1 / 1.03))


def error(x, sent) -> float:
    """‖x − C(x)‖²/‖x‖², in units of the largest element, so that squares stay in range."""
    x, sent = np.asarray(x) / np.abs(x).max(), np.asarray(sent) / np.abs(x).max()
    return float(((x - sent) ** 2).sum() / (x**2).sum())


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


# --- bits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "bits"), [(np.float16, 10), (np.float32, 23)])
def test_a_cast_is_off_by_the_round_off_at_most_and_almost_reaches_it(dtype, bits):
    x = np.linspace(1, 2, 1_000_003) if bits == 10 else 1 + np.arange(4001) * 2.0**-28
    for sign in (1, -1):
        off = np.abs((sign * x).astype(dtype) - sign * x) / x
        assert 0.99 * compression.cast_error(bits) < off.max() <= compression.cast_error(bits)


def test_bf16_keeps_seven_bits():
    x = np.linspace(1, 2, 100_001).astype(np.float32)
    upper = x.view(np.uint32).astype(np.uint64)
    rounded = ((upper + 0x7FFF + ((upper >> 16) & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
    assert 0.99 * 2.0**-8 < (np.abs(rounded - x) / x).max() <= compression.cast_error(7) == 2.0**-8


@pytest.mark.parametrize(("n", "bits", "block"), [(0, 8, 4), (1, 1, 1), (10, 8, 4), (10, 4, 3), (17, 1, 64), (9, 3, 9)])
def test_codes_and_scales_are_counted(n, bits, block):
    written = np.packbits(np.ones(n * bits, dtype=bool)).nbytes
    scales = sum(4 for _ in range(0, n, block))
    assert compression.quantised_bytes(n, bits, block) == written + scales
    assert compression.quantised_bytes(n, bits, block, scale_bytes=0) == written


def test_whole_numbers_at_their_limits():
    assert compression.quantised_bytes(1 << 70, 8, 1 << 70) == (1 << 70) + 4  # whole numbers stay exact
    assert compression.qsgd_bytes(1 << 60, 1) == (1 << 60) // 4 + 4


@pytest.mark.parametrize(("bits", "n"), [(2, 1), (2, 3), (3, 4), (4, 9), (8, 1), (8, 2), (8, 129)])
def test_a_sum_of_codes_needs_so_many_bits_and_not_one_less(bits, n):
    most = 2 ** (bits - 1) - 1
    states = 2 * n * most + 1  # −N·most … N·most
    need = compression.sum_bits(bits, n)
    assert 2 ** (need - 1) < states <= 2**need
    assert [compression.sum_bits(8, n) for n in (1, 2)] == [8, 9]


# --- QSGD ----------------------------------------------------------------------------------------------------------


def roundings(x, levels: int):
    """Every way in which the dice can fall, with its chance: an element goes up, or it does not."""
    norm = math.sqrt(sum((x / np.abs(x).max()) ** 2)) * np.abs(x).max()
    chance = np.modf(levels * np.abs(x) / norm)[0]
    for ups in product((True, False), repeat=len(x)):
        weight = math.prod(p if up else 1 - p for p, up in zip(chance, ups, strict=True))
        if weight:
            uniforms = np.where(ups, 0.0, np.nextafter(1.0, 0.0))
            yield weight, compression.qsgd(x, levels, uniforms)


def moments(x, outcomes) -> tuple[np.ndarray, float]:
    """The mean of all outcomes, and the expected error."""
    every = list(outcomes)
    assert sum(weight for weight, _ in every) == pytest.approx(1)
    return sum(weight * sent for weight, sent in every), sum(weight * error(x, sent) for weight, sent in every)


@each_vector
@pytest.mark.parametrize("levels", LEVELS)
def test_qsgd_is_unbiased_and_its_variance_exact_over_all_roundings(x, levels):
    mean, variance = moments(x, roundings(x, levels))
    np.testing.assert_allclose(mean, x, rtol=1e-9, atol=1e-12 * np.abs(x).max())
    close(compression.qsgd_variance(x, levels), variance)
    assert variance <= compression.qsgd_variance_bound(len(x), levels)
    assert variance <= len(x) / (4 * levels**2) + 1e-12  # p (1 − p) is at most a quarter


def test_qsgd_over_many_draws_of_a_long_vector():
    """1,000 draws of 500 elements: the mean error is within 5 of its standard errors, a chance of 6 in ten million."""
    x, levels, rng = normal(500, seed=3) ** 3, 4, np.random.default_rng(4)
    seen = np.array([error(x, compression.qsgd(x, levels, rng.random(500))) for _ in range(1000)])
    law = compression.qsgd_variance(x, levels)
    off = 5 * seen.std() / math.sqrt(1000)
    assert abs(seen.mean() - law) < off < 0.03 * law
    assert law < compression.qsgd_variance_bound(500, levels)


@pytest.mark.parametrize(("n", "levels"), [(10**4, 1), (10**6, 3), (7**6, 2)])
def test_the_bound_is_approached_by_equal_magnitudes(n, levels):
    share = compression.qsgd_variance(np.ones(n), levels) / compression.qsgd_variance_bound(n, levels)
    assert share == pytest.approx(1 - levels / math.sqrt(n), rel=1e-6)


def test_the_bound_takes_the_smaller_and_holds_for_any_vector():
    rng = np.random.default_rng(5)
    for _ in range(300):
        n, levels = int(rng.integers(1, 200)), int(rng.integers(1, 40))
        x = rng.standard_normal(n) * 10.0 ** rng.uniform(-3, 3, n)
        bound = compression.qsgd_variance_bound(n, levels)
        assert compression.qsgd_variance(x, levels) <= bound * (1 + 1e-12)
        assert bound == min(n / levels**2, n**0.5 / levels)


@pytest.mark.parametrize("mutant", ["nearest", "always up", "half", "largest"])
def test_other_roundings_are_biased_or_have_another_variance(mutant):
    x, levels = np.array([0.3, -1.0, 0.55]), 2
    norm = float(np.abs(x).max() if mutant == "largest" else np.linalg.norm(x))
    scaled = levels * np.abs(x) / norm
    low = np.floor(scaled)
    chance = {"nearest": np.round(scaled) - low, "always up": np.ceil(scaled) - low, "half": np.full(3, 0.5)}.get(
        mutant, scaled - low
    )
    outcomes = [
        (math.prod(np.where(ups, chance, 1 - chance)), np.sign(x) * (low + ups) / levels * norm)
        for ups in product((0, 1), repeat=3)
    ]
    mean, variance = moments(x, outcomes)
    assert not np.allclose(mean, x) or variance != pytest.approx(compression.qsgd_variance(x, levels), rel=0.03)


@pytest.mark.parametrize(("n", "levels"), [(1, 1), (10, 1), (10, 2), (33, 7), (8, 8), (1000, 127), (1000, 128)])
def test_codes_of_qsgd_have_the_bits_that_tell_all_of_them_apart(n, levels):
    bits = next(b for b in range(1, 20) if 2**b >= len(range(-levels, levels + 1)))
    assert compression.qsgd_bytes(n, levels) == np.packbits(np.zeros(n * bits, dtype=bool)).nbytes + 4


# --- signs ---------------------------------------------------------------------------------------------------------


@each_vector
def test_signs_lose_what_the_contraction_leaves_and_no_scale_loses_less(x):
    sent, delta = compression.sign(x), compression.sign_contraction(x)
    close(delta, 1 - error(x, sent))
    assert 1 / len(x) - 1e-12 <= delta <= 1 + 1e-12
    assert len(set(np.abs(sent))) == 1  # a bit each, and one scale
    for other in (0.97, 1.03):
        assert error(x, other * sent) >= error(x, sent)
    assert len(x) == 1 or error(x, np.sign(x) * np.abs(x).max()) >= error(x, sent)  # a mutant's scale


def test_signs_at_their_ends():
    assert compression.sign_contraction([2.0, -2.0, 2.0]) == pytest.approx(1)
    assert compression.sign_contraction([0, 0, 7.0, 0]) == pytest.approx(1 / 4)
    assert compression.sign_contraction([0.0, 0.0]) == 1
    assert compression.sign_contraction(normal(200_000)) == pytest.approx(2 / math.pi, rel=0.01)
    np.testing.assert_array_equal(compression.sign([0.0, 0.0]), [0, 0])
    np.testing.assert_array_equal(compression.sign([-2.0, 0.0]), [-1, 1])


# --- few elements --------------------------------------------------------------------------------------------------


@each_vector
def test_the_k_largest_are_the_best_k_and_contract(x):
    for k in range(len(x) + 1):
        sent = compression.top_k(x, k)
        assert np.count_nonzero(sent) <= k
        assert set(sent) <= {*x, 0.0}
        choices = [
            error(x, np.where(np.isin(np.arange(len(x)), kept), x, 0)) for kept in combinations(range(len(x)), k)
        ]
        assert error(x, sent) == pytest.approx(min(choices), abs=1e-15)
        assert error(x, sent) <= 1 - compression.top_k_contraction(len(x), k) + 1e-12


def test_ties_stay_in_order_and_equal_magnitudes_meet_the_contraction():
    x = np.array([1.0, -1.0, 1.0, 1.0, -1.0])
    np.testing.assert_array_equal(compression.top_k(x, 2), [1, -1, 0, 0, 0])
    for k in range(6):
        close(1 - compression.top_k_contraction(5, k), error(x, compression.top_k(x, k)))


def test_the_k_smallest_break_the_contraction():
    x = np.array([1.0, 5.0, 2.0])
    smallest = np.where(np.argsort(np.argsort(np.abs(x))) < 1, x, 0)
    assert error(x, smallest) > 1 - compression.top_k_contraction(3, 1)


@each_vector
def test_k_by_lot_over_all_lots(x):
    n = len(x)
    for k in range(1, n + 1):
        plain = [x * (np.array(lot) < k) for lot in permutations(range(n))]
        scaled = [n / k * sent for sent in plain]
        close(compression.random_k_error(n, k), np.mean([error(x, sent) for sent in plain]), rel=1e-9)
        close(compression.random_k_variance(n, k), np.mean([error(x, sent) for sent in scaled]), rel=1e-9)
        np.testing.assert_allclose(np.mean(np.array(scaled) / np.abs(x).max(), axis=0), x / np.abs(x).max(), atol=1e-9)
    assert compression.random_k_error(n, 0) == 1


@pytest.mark.parametrize(("n", "k", "world"), [(4, 1, 2), (4, 2, 3), (5, 3, 2), (3, 3, 4), (5, 0, 3), (6, 2, 1)])
def test_a_sum_of_lots_has_as_many_elements_as_over_all_lots(n, k, world):
    lots = [set(kept) for kept in combinations(range(n), k)]
    union = [len(set().union(*ranks)) for ranks in product(lots, repeat=world)]
    close(compression.expected_support(n, k, world), np.mean(union))
    assert max(union) <= min(n, k * world)


def test_a_sum_of_few_elements_fills_up():
    assert compression.expected_support(10**9, 1, 3) == pytest.approx(3, rel=1e-8)  # digits of a tiny share
    assert compression.expected_support(1000, 10, 1000) > 999
    assert [compression.sparse_bytes(10, index_bytes=i) for i in (4, 0)] == [80, 40]


# --- low rank ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "columns"), [(1, 4), (3, 3), (5, 3), (4, 7)])
@pytest.mark.parametrize("rank", [1, 2, 3, 9])
def test_the_best_low_rank_is_the_truncated_svd_and_contracts(rows, columns, rank):
    matrix = normal(rows, columns, seed=rank)
    u, values, vt = np.linalg.svd(matrix, full_matrices=False)
    best = error(matrix.ravel(), ((u[:, :rank] * values[:rank]) @ vt[:rank]).ravel())
    close(compression.best_low_rank_error(np.random.default_rng(0).permutation(values), rank), best)
    assert best <= 1 - compression.low_rank_contraction(rows, columns, rank) + 1e-12
    if rank <= min(rows, columns):
        for seed in range(20):  # no other projection is nearer
            p, q = compression.power_sgd(matrix, normal(columns, rank, seed=seed))
            assert error(matrix.ravel(), (p @ q.T).ravel()) >= best - 1e-12


def test_equal_singular_values_meet_the_contraction():
    for n, rank in [(4, 1), (5, 2), (3, 3), (2, 5)]:
        assert 1 - compression.low_rank_contraction(n, n + 2, rank) == pytest.approx(
            compression.best_low_rank_error([2.5] * n, rank)
        )
    assert compression.best_low_rank_error([0.0, 0.0], 1) == 0
    assert compression.best_low_rank_error([1e200, 1e200], 1) == pytest.approx(0.5)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("spectrum", [[1, 1, 1, 1, 1], [5, 2, 1, 0.5, 0.1], [3, 1, 0.2, 0, 0]])
def test_a_step_from_a_drawn_q_contracts_in_the_mean(spectrum, rank):
    """1,000 draws: the mean of what is kept is at least r over the matrix's own rank, less 4 of its standard errors."""
    rng = np.random.default_rng(7)
    left, right = np.linalg.qr(normal(6, 5)).Q, np.linalg.qr(normal(8, 5, seed=1)).Q
    matrix, nonzero = left * spectrum @ right.T, np.count_nonzero(spectrum)
    kept = []
    for _ in range(1000):
        p, q = compression.power_sgd(matrix, rng.standard_normal((8, rank)))
        kept.append(1 - error(matrix.ravel(), (p @ q.T).ravel()))
    margin = 4 * np.std(kept) / math.sqrt(len(kept)) + 1e-12
    assert np.mean(kept) >= min(1, rank / nonzero) - margin
    assert margin < 0.05
    assert np.mean(kept) >= compression.low_rank_contraction(6, 8, rank) - margin
    if len(set(spectrum)) == 1:  # met by equal singular values, in every draw
        np.testing.assert_allclose(kept, rank / 5, atol=1e-9)


def test_a_step_projects_and_steps_end_at_the_best_rank():
    matrix = normal(7, 5, seed=2)
    q = normal(5, 2, seed=3)
    for _ in range(200):
        p, q = compression.power_sgd(matrix, q)
        np.testing.assert_allclose(p.T @ p, np.eye(2), atol=1e-12)
        np.testing.assert_allclose(p @ q.T, p @ p.T @ matrix, atol=1e-12)
    values = np.linalg.svd(matrix, compute_uv=False)
    close(compression.best_low_rank_error(values, 2), error(matrix.ravel(), (p @ q.T).ravel()))


def test_a_warm_start_can_be_blind_and_zeros_stay_zeros():
    matrix, q = np.diag([1.0, 0.1]), np.array([[0.0], [1.0]])
    for _ in range(5):  # orthogonal to the row that matters, and no step turns it
        p, q = compression.power_sgd(matrix, q)
        assert error(matrix.ravel(), (p @ q.T).ravel()) == pytest.approx(1 / 1.01)
    assert 1 - compression.low_rank_contraction(2, 2, 1) < 1 / 1.01
    p, q = compression.power_sgd(np.zeros((3, 2)), np.ones((2, 1)))
    np.testing.assert_array_equal(p @ q.T, np.zeros((3, 2)))


def test_factors_of_the_mean_are_the_mean_of_factors():
    """What lets PowerSGD ride: M q and Mᵀ P are linear in M, where P is that of the sum."""
    matrices, q = normal(3, 6, 4), normal(4, 2, seed=9)
    p, mean_q = compression.power_sgd(matrices.mean(axis=0), q)
    np.testing.assert_allclose(np.mean([m.T @ p for m in matrices], axis=0), mean_q, atol=1e-12)
    apart = [np.matmul(*(f if i == 0 else f.T for i, f in enumerate(compression.power_sgd(m, q)))) for m in matrices]
    assert not np.allclose(np.mean(apart, axis=0), p @ mean_q.T, atol=0.01)  # each rank its own P: something else


@pytest.mark.parametrize(
    ("shape", "rank", "sent"),
    [((), 1, 1), ((7,), 3, 7), ((7, 0), 1, 0), ((10, 20), 2, 60), ((8, 3, 5, 5), 1, 83), ((2, 2), 1, 4),
     ((6, 6), 3, 36), ((1, 50), 1, 50), ((4, 4), 9, 16)],
)  # fmt: skip
def test_elements_of_any_shape(shape, rank, sent):
    assert compression.low_rank_elements([shape], rank) == sent
    assert compression.low_rank_elements([shape, shape, (3,)], rank) == 2 * sent + 3
    factors = compression.matrix_shape(shape)
    if factors and rank <= min(factors) and sent < math.prod(shape):  # counted on the factors themselves
        p, q = compression.power_sgd(normal(*factors), normal(factors[1], rank))
        assert p.size + q.size == sent


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda: compression.cast_error(-1), "mantissa_bits"),
        (lambda: compression.quantised_bytes(-1, 8, 4), "elements"),
        (lambda: compression.quantised_bytes(4, 8, 0), "block"),
        (lambda: compression.quantised_bytes(4.5, 8, 4), "elements"),
        (lambda: compression.sum_bits(1, 2), "bits"),
        (lambda: compression.qsgd([1.0, np.nan], 2, [0, 0]), "x"),
        (lambda: compression.qsgd([1.0, 2.0], 2, [0, 1.0]), "uniforms"),
        (lambda: compression.qsgd([1.0, 2.0], 2, [0.5]), "uniforms"),
        (lambda: compression.qsgd([1.0], 0, [0.5]), "levels"),
        (lambda: compression.qsgd_variance_bound(0, 2), "elements"),
        (lambda: compression.qsgd_bytes(8, 0), "levels"),
        (lambda: compression.sign([[1.0]]), "x"),
        (lambda: compression.sign_contraction([np.inf]), "x"),
        (lambda: compression.top_k([1.0, 2.0], 3), "k"),
        (lambda: compression.top_k_contraction(3, 4), "k"),
        (lambda: compression.random_k_variance(3, 0), "k"),
        (lambda: compression.sparse_bytes(1, 0), "value_bytes"),
        (lambda: compression.expected_support(3, 1, 0), "n"),
        (lambda: compression.low_rank_elements([(3, -1)], 1), "shape"),
        (lambda: compression.low_rank_elements([7], 1), "shape"),
        (lambda: compression.low_rank_elements(7, 1), "shapes"),
        (lambda: compression.top_k([], 1), "elements"),
        (lambda: compression.low_rank_elements([(3, 3)], 0), "rank"),
        (lambda: compression.low_rank_contraction(0, 3, 1), "rows"),
        (lambda: compression.best_low_rank_error([1.0, -1.0], 1), "singular_values"),
        (lambda: compression.power_sgd(np.ones((3, 2)), np.ones((3, 1))), "q"),
        (lambda: compression.power_sgd(np.ones((3, 2)), np.ones((2, 3))), "q"),
    ],
)
def test_bad_input_is_named(call, names):
    with pytest.raises(ValueError, match=rf"^{names} must"):
        call()
