"""Closed forms of data parallelism against brute force, simulation and numbers worked out by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from dtlib.theory import dp
from dtlib.theory.collectives import ring_all_reduce_seconds
from dtlib.theory.units import GB, MB, Gbit, ms, us

seconds = st.floats(0, 10, allow_subnormal=False)


# --- which gradient --------------------------------------------------------------------------------------------


def test_effective_batch():
    assert dp.effective_batch(32, 8) == 256
    assert dp.effective_batch(32, 8, accumulation=4) == 1024


def test_averaged_gradient_of_four_scalars():
    assert_allclose(dp.averaged_gradient([0.20, 0.10, -0.05, 0.15]), 0.10, rtol=1e-15)


def descent(x, y, rate, steps):
    """The oracle: gradient descent on the whole batch; weights (steps + 1, p)."""
    path = [np.zeros(x.shape[1])]
    for _ in range(steps):
        path.append(path[-1] - rate * x.T @ (x @ path[-1] - y) / len(x))
    return np.array(path)


def test_equal_shards_of_a_mean_loss_average_to_the_full_gradient():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 3)), rng.normal(size=12)
    for n in (1, 2, 3, 4):
        whole = descent(x, y, rate=0.1, steps=5)
        parts = dp.data_parallel_sgd(x, y, shares=[12 // n] * n, learning_rate=0.1, steps=5)
        # sums of 12 float64 products in another order: a few units of 2⁻⁵³
        assert_allclose(parts.weights, np.broadcast_to(whole[:, None], parts.weights.shape), rtol=1e-12, atol=1e-14)
        assert parts.spread.max() == 0  # every rank adds the same array: equal to the bit


def test_unequal_shards_need_the_weights():
    rng = np.random.default_rng(1)
    x, y, shares = rng.normal(size=(12, 3)), rng.normal(size=12), [1, 3, 8]
    whole = descent(x, y, rate=0.1, steps=3)
    weighted = dp.data_parallel_sgd(x, y, shares=shares, learning_rate=0.1, steps=3, combine="weighted")
    mean = dp.data_parallel_sgd(x, y, shares=shares, learning_rate=0.1, steps=3, combine="mean")
    assert_allclose(weighted.weights[-1, 0], whole[-1], rtol=1e-12)
    assert np.abs(mean.weights[-1, 0] - whole[-1]).max() > 1e-2


def test_a_sum_for_a_mean_is_a_learning_rate_n_times_as_large():
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(8, 2)), rng.normal(size=8)
    summed = dp.data_parallel_sgd(x, y, shares=[2] * 4, learning_rate=0.01, steps=4, combine="sum")
    whole = descent(x, y, rate=0.04, steps=4)
    assert_allclose(summed.weights[:, 0], whole, rtol=1e-12)


def test_ranks_that_start_apart_stay_exactly_as_far_apart():
    rng = np.random.default_rng(3)
    x, y, start = rng.normal(size=(8, 2)), rng.normal(size=8), rng.normal(size=(4, 2))
    path = dp.data_parallel_sgd(x, y, shares=[2] * 4, learning_rate=0.1, steps=50, start=start)
    assert_allclose(path.spread, path.spread[0], rtol=1e-10)
    assert path.spread[0] > 0.1


def test_a_pause_of_the_sync_leaves_a_spread_for_good():
    rng = np.random.default_rng(4)
    x, y = rng.normal(size=(8, 2)), rng.normal(size=8)
    path = dp.data_parallel_sgd(
        x, y, shares=[2] * 4, learning_rate=0.1, steps=60, combine=lambda step: "none" if step < 20 else "mean"
    )
    assert path.spread[20] > 0.1
    assert_allclose(path.spread[20:], path.spread[20], rtol=1e-10)
    assert path.sent_bytes_per_rank == dp.sent_bytes_per_step(2 * 8, 4, syncs=40)


def test_token_weights_leave_out_a_rank_without_tokens():
    gradients = [[1.0, 2.0], [np.nan, np.nan], [4.0, 8.0]]
    assert_allclose(dp.token_weighted_gradient(gradients, [1, 0, 2]), [3.0, 6.0])


def test_bytes():
    assert dp.sent_bytes_per_step(20 * GB, 64) == pytest.approx(39.375 * GB)
    assert dp.sent_bytes_per_step(100, 1) == 0
    assert dp.sent_bytes_per_step(100, 4, syncs=3) == pytest.approx(450)
    assert dp.sent_bytes_per_step(100, 4, syncs=0) == 0
    assert dp.sent_bytes_per_sample(120, 4, micro_batch=2, accumulation=3) == pytest.approx(30)


# --- buckets ---------------------------------------------------------------------------------------------------


def test_plan_closes_a_bucket_once_it_is_full():
    assert dp.plan_buckets([4, 4, 4, 4, 4], 8) == [[0, 1], [2, 3], [4]]
    assert dp.plan_buckets([4, 4, 4, 4, 4], 8, first_bucket_bytes=4) == [[0], [1, 2], [3, 4]]
    assert dp.plan_buckets([100, 1], 8) == [[0], [1]]
    assert dp.plan_buckets([], 8) == []


def test_plan_keeps_kinds_apart():
    plan = dp.plan_buckets([4, 2, 4, 2], 8, kinds=["f32", "bf16", "f32", "bf16"])
    assert plan == [[0, 2], [1, 3]]


@given(
    st.lists(st.integers(0, 50), max_size=40),
    st.integers(1, 100),
    st.integers(1, 100),
    st.data(),
)
def test_plan_is_a_partition_with_full_buckets(sizes, cap, first, data):
    kinds = data.draw(st.lists(st.integers(0, 2), min_size=len(sizes), max_size=len(sizes)))
    plan = dp.plan_buckets(sizes, cap, first_bucket_bytes=first, kinds=kinds)
    assert sorted(i for bucket in plan for i in bucket) == list(range(len(sizes)))
    assert [bucket[-1] for bucket in plan] == sorted(bucket[-1] for bucket in plan)  # in order of readiness
    for kind in set(kinds):
        mine = [bucket for bucket in plan if kinds[bucket[0]] == kind]
        assert [i for bucket in mine for i in bucket] == [i for i, other in enumerate(kinds) if other == kind]
        assert all(sum(sizes[i] for i in bucket) >= min(cap, first) for bucket in mine[:-1])
        assert all(sum(sizes[i] for i in bucket[:-1]) < max(cap, first) for bucket in mine)


# --- the clock -------------------------------------------------------------------------------------------------


def test_blocking_step_is_the_sum():
    step = dp.blocking_step_seconds(0.5, 4 * GB, 1000, 0.0, 100 * Gbit)
    assert step == pytest.approx(0.5 + 2 * 0.999 * 4 / 12.5)
    assert dp.blocking_step_seconds(0.5, 4 * GB, 1, 1.0, 1.0) == 0.5


def test_ready_seconds():
    assert_allclose(dp.ready_seconds(6.0, [1, 2, 3]), [1.0, 3.0, 6.0])


def test_schedule_by_hand():
    # bucket 0 is ready at 1 and travels until 4; bucket 1 waits for it; bucket 2 finds the link busy too
    schedule = dp.overlap_schedule(6.0, [1, 2, 6], [3, 3, 1])
    assert_array_equal(schedule.start, [1, 4, 7])
    assert_array_equal(schedule.end, [4, 7, 8])
    assert schedule.exposed_seconds == 2
    assert schedule.communication_seconds == 7
    assert schedule.hidden_share == pytest.approx(5 / 7)


@given(st.lists(st.tuples(seconds, seconds), max_size=12), seconds)
def test_exposed_closed_form_is_the_simulation(buckets, extra):
    ready = np.cumsum([gap for gap, _ in buckets])
    durations = [duration for _, duration in buckets]
    backward = float(ready[-1]) + extra if buckets else extra
    schedule = dp.overlap_schedule(backward, ready, durations)
    assert_allclose(dp.exposed_seconds(backward, ready, durations), schedule.exposed_seconds, rtol=1e-9, atol=1e-9)
    assert schedule.exposed_seconds <= schedule.communication_seconds + 1e-9
    assert 0 - 1e-9 <= schedule.hidden_share <= 1


links = st.tuples(
    st.floats(1e-3, 1.0),  # backward seconds
    st.floats(1e3, 1e9),  # bytes
    st.integers(2, 64),
    st.floats(1e-6, 1e-2),  # alpha
    st.floats(1e8, 1e11),  # bytes a second
)


@given(links, st.integers(1, 60))
def test_even_buckets_closed_form_is_the_simulation(link, k):
    backward, size, n, alpha, rate = link
    each = 2 * (n - 1) * (alpha + size / k / n / rate)
    schedule = dp.overlap_schedule(backward, dp.ready_seconds(backward, [1] * k), [each] * k)
    assert_allclose(dp.even_exposed_seconds(*link, k), schedule.exposed_seconds, rtol=1e-6, atol=1e-9)


@settings(deadline=None)
@given(links)
def test_optimal_number_of_buckets_by_brute_force(link):
    best = dp.optimal_num_buckets(*link)
    around = {1, 2, 3, *(max(1, best + d) for d in range(-3, 4)), *np.geomspace(1, 1e6, 200).astype(int).tolist()}
    exposed = {k: dp.even_exposed_seconds(*link, k) for k in around}
    assert exposed[best] <= min(exposed.values()) * (1 + 1e-9)


def test_one_bucket_is_the_blocking_step():
    arguments = (0.4, 100 * MB, 8, 10 * us, 50 * GB)
    assert dp.overlapped_step_seconds(0.2, *arguments, num_buckets=1) == pytest.approx(
        dp.blocking_step_seconds(0.6, *arguments[1:])
    )


def test_hidden_share():
    assert dp.hidden_share(0.0, 2.0) == 1
    assert dp.hidden_share(2.0, 2.0) == 0
    assert dp.hidden_share(0.0, 0.0) == 1


# --- when it stops paying --------------------------------------------------------------------------------------


def test_efficiency_is_a_ratio_over_one_more_than_itself():
    link = (200 * MB, 16, 10 * us, 10 * GB)
    ratio = 0.1 / ring_all_reduce_seconds(*link)
    assert dp.efficiency(0.1, *link) == pytest.approx(ratio / (1 + ratio))
    assert dp.efficiency(0.1, 200 * MB, 1, 10 * us, 10 * GB) == 1


def test_weak_scaling_ends_at_compute_over_two_alpha():
    speed_up = 10**9 * dp.efficiency(0.1, 200 * MB, 10**9, 10 * us, 10 * GB)
    assert speed_up == pytest.approx(0.1 / (2 * 10 * us), rel=1e-3)


@given(st.floats(1e-3, 10), st.floats(0, 1e10), st.floats(1e-6, 1e-2), st.floats(1e8, 1e11))
def test_best_world_size_by_brute_force(total, size, alpha, rate):
    best = dp.best_world_size(total, size, alpha, rate)
    tried = {*range(1, 50), *(max(1, best + d) for d in range(-3, 4)), *np.geomspace(1, 1e5, 100).astype(int).tolist()}
    step = {n: dp.strong_step_seconds(total, size, n, alpha, rate) for n in tried}
    assert step[best] <= min(step.values()) * (1 + 1e-9)


def test_one_rank_is_best_when_the_batch_is_smaller_than_the_wire():
    assert dp.best_world_size(0.1, 1 * GB, 1 * us, 20 * GB) == 1  # 2D/B = 0.1 s


def test_break_even_tokens_make_compute_equal_communication():
    params, flops, rate, n = 7e9, 400e12, 50e9, 64
    tokens = dp.break_even_tokens(flops, rate, n)
    compute = 6 * params * tokens / flops
    assert compute == pytest.approx(ring_all_reduce_seconds(2 * params, n, 0.0, rate))
    # against the backward pass alone and in bf16 the rule of thumb is F/B
    assert dp.break_even_tokens(flops, rate, 10**9, flops_per_param=4) == pytest.approx(flops / rate)


def test_bucket_count_of_a_real_training_run_is_not_one():
    best = dp.optimal_num_buckets(100 * ms, 1 * GB, 8, 10 * us, 25 * GB)
    assert best == 214


# --- bad input -------------------------------------------------------------------------------------------------

LINK = (1e6, 4, 1e-5, 1e9)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: dp.effective_batch(0, 4), "micro_batch must be at least 1, not 0"),
        (lambda: dp.effective_batch(8, 4, accumulation=1.5), "accumulation must be a whole number"),
        (lambda: dp.effective_batch(8, 0), "n must be at least 1, not 0"),
        (lambda: dp.averaged_gradient([]), "gradients must hold one row"),
        (lambda: dp.token_weighted_gradient([[1.0], [2.0]], [3]), "num_tokens must hold one number"),
        (lambda: dp.token_weighted_gradient([[1.0], [2.0]], [0, 0]), "above 0 on some rank"),
        (lambda: dp.token_weighted_gradient([[1.0], [2.0]], [-1, 2]), "num_tokens must be"),
        (lambda: dp.sent_bytes_per_step(-1, 4), "grad_bytes must be"),
        (lambda: dp.sent_bytes_per_step(1, 4, syncs=-1), "syncs must be at least 0, not -1"),
        (lambda: dp.plan_buckets([4], 0), "bucket_bytes must be at least 1, not 0"),
        (lambda: dp.plan_buckets([4], 8, kinds=[]), "kinds must hold one label for each of 1 sizes, not 0"),
        (lambda: dp.plan_buckets([-4], 8), "sizes must be at least 0, not -4"),
        (lambda: dp.blocking_step_seconds(-1, *LINK), "compute_seconds must be"),
        (lambda: dp.blocking_step_seconds(1, 1e6, 4, 1e-5, 0), "link_bytes_per_s must be"),
        (lambda: dp.overlap_schedule(1.0, [2, 1], [1, 1]), "ready_seconds must not decrease"),
        (lambda: dp.exposed_seconds(1.0, [1], [1, 1]), "bucket_seconds must have one entry for each of 1"),
        (lambda: dp.ready_seconds(1.0, [0, 0]), "work must be above 0 somewhere"),
        (lambda: dp.even_exposed_seconds(1.0, *LINK, 0), "num_buckets must be at least 1, not 0"),
        (lambda: dp.optimal_num_buckets(1.0, 1e6, 4, 0.0, 1e9), "alpha_seconds must be finite and positive"),
        (lambda: dp.best_world_size(1.0, 1e6, 0.0, 1e9), "alpha_seconds must be finite and positive"),
        (lambda: dp.best_world_size(1.0, 1e6, 1e-5, 0.0), "link_bytes_per_s must be finite and positive"),
        (lambda: dp.efficiency(0.0, *LINK), "compute_seconds must be finite and positive"),
        (lambda: dp.break_even_tokens(1e12, 1e9, 4, flops_per_param=0), "flops_per_param must be"),
        (lambda: dp.data_parallel_sgd([[1.0]], [1.0], shares=[2], learning_rate=1, steps=1), "shares must add up"),
        (
            lambda: dp.data_parallel_sgd([[1.0]], [1.0], shares=[1], learning_rate=1, steps=1, combine="avg"),
            "combine must be one of mean, weighted, sum, none, not 'avg'",
        ),
        (lambda: dp.data_parallel_sgd([1.0], [1.0], shares=[1], learning_rate=1, steps=1), "x must have shape"),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()
