"""The closed forms, the exact integers, the schedules and the simulations must tell one story."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtlib import theory
from dtlib.theory import collectives
from dtlib.theory.units import GB, MB, MiB

N = st.integers(1, 17)
LENGTH = st.integers(0, 60)
ALL_REDUCES = [name for name in collectives.ALGORITHMS if name.endswith("all_reduce")]


def options_for(algorithm, n, data):
    if algorithm == "two_level_all_reduce":
        return {"ranks_per_node": data.draw(st.sampled_from([g for g in range(1, n + 1) if n % g == 0]))}
    if algorithm in collectives.ROOTED:
        return {"src": data.draw(st.integers(0, n - 1))}
    return {}


def closed(algorithm, quantity, *args, **options):
    options.pop("src", None)
    return getattr(collectives, f"{algorithm}_{quantity}")(*args, **options)


def cut(row, n):
    bounds = collectives.chunk_bounds(len(row), n)
    return [row[bounds[i] : bounds[i + 1]] for i in range(n)]


# Values -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALL_REDUCES)
@given(n=N, length=LENGTH, op=st.sampled_from(["sum", "mean", "max"]), data=st.data())
def test_a_simulated_all_reduce_gives_every_rank_numpys_answer(algorithm, n, length, op, data):
    rows = np.random.default_rng(length).integers(-99, 99, (n, length)).astype(np.float64)
    before = rows.copy()
    result = collectives.simulate(algorithm, rows, op, **options_for(algorithm, n, data))
    expected = {"sum": rows.sum(0), "mean": rows.sum(0) / n, "max": rows.max(0)}[op]
    for rank in range(n):
        np.testing.assert_array_equal(result.results[rank], expected)
    np.testing.assert_array_equal(rows, before)


@given(n=N, length=LENGTH, data=st.data())
def test_the_other_simulated_collectives_give_what_their_names_say(n, length, data):
    rows = np.random.default_rng(n).integers(-99, 99, (n, length))
    total, src = rows.sum(0), data.draw(st.integers(0, n - 1))
    for got, want in zip(collectives.simulate("ring_reduce_scatter", rows).results, cut(total, n), strict=True):
        np.testing.assert_array_equal(got, want)
    gathered = np.concatenate([cut(row, n)[rank] for rank, row in enumerate(rows)])
    for got in collectives.simulate("ring_all_gather", rows).results:
        np.testing.assert_array_equal(got, gathered)
    for rank, got in enumerate(collectives.simulate("pairwise_all_to_all", rows).results):
        np.testing.assert_array_equal(got, np.concatenate([cut(row, n)[rank] for row in rows]))
    for got in collectives.simulate("tree_broadcast", rows, src=src).results:
        np.testing.assert_array_equal(got, rows[src])
    np.testing.assert_array_equal(collectives.simulate("tree_reduce", rows, src=src).results[src], total)


def test_the_mean_of_a_reduce_stands_at_its_root():
    rows = np.array([[2.0, 4.0], [4.0, 8.0], [6.0, 0.0]])
    np.testing.assert_array_equal(collectives.simulate("tree_reduce", rows, "mean", src=1).results[1], [4.0, 4.0])
    scattered = collectives.simulate("ring_reduce_scatter", rows, "mean").results
    assert [chunk.tolist() for chunk in scattered] == [[4.0], [4.0], []]


# Traffic ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", collectives.ALGORITHMS)
@given(n=N, length=LENGTH, itemsize=st.sampled_from([1, 2, 4, 8]), data=st.data())
def test_exact_traffic_equals_what_the_schedule_sends(algorithm, n, length, itemsize, data):
    options = options_for(algorithm, n, data)
    rounds = collectives.schedule(algorithm, length, n, **options)
    sent = [0] * n
    for transfer in (t for transfers in rounds for t in transfers):
        sent[transfer.source] += (transfer.stop - transfer.start) * itemsize
    traffic = collectives.traffic(algorithm, length, itemsize, n, **options)
    assert traffic.sent_bytes == tuple(sent)
    assert traffic.steps == len(rounds)
    assert traffic.total_bytes == sum(sent)
    assert [collectives.sent_bytes(algorithm, length, itemsize, n, rank, **options) for rank in range(n)] == sent


@pytest.mark.parametrize("algorithm", collectives.ALGORITHMS)
@given(n=N, chunk=st.integers(1, 9), data=st.data())
def test_closed_forms_are_exact_for_equal_chunks(algorithm, n, chunk, data):
    options = options_for(algorithm, n, data)
    length = chunk * n * (1 << (n.bit_length() - 1))
    rows = np.zeros((n, length), dtype=np.float32)
    simulated = collectives.simulate(algorithm, rows, **options)
    assert closed(algorithm, "bytes", rows[0].nbytes, n, **options) == pytest.approx(
        max(simulated.sent_bytes), rel=1e-12
    )
    assert closed(algorithm, "steps", n, **options) == simulated.steps
    assert closed(algorithm, "seconds", rows[0].nbytes, n, 3e-6, 2e9, **options) == pytest.approx(
        simulated.seconds(3e-6, 2e9), rel=1e-12, abs=1e-15
    )


@pytest.mark.parametrize("algorithm", collectives.ALGORITHMS)
@given(n=N, length=LENGTH, data=st.data())
def test_a_round_never_asks_a_rank_for_two_messages(algorithm, n, length, data):
    for transfers in collectives.schedule(algorithm, length, n, **options_for(algorithm, n, data)):
        assert len({t.source for t in transfers}) == len({t.target for t in transfers}) == len(transfers)
        assert all(t.source != t.target and t.start < t.stop for t in transfers)


@pytest.mark.parametrize("algorithm", ALL_REDUCES)
@given(n=N, chunk=st.integers(1, 9), data=st.data())
def test_no_all_reduce_beats_the_lower_bounds(algorithm, n, chunk, data):
    options, full_bytes = options_for(algorithm, n, data), 8 * chunk * n
    traffic = collectives.traffic(algorithm, chunk * n, 8, n, **options)
    assert max(traffic.sent_bytes) >= collectives.all_reduce_lower_bound_bytes(full_bytes, n)
    assert traffic.total_bytes >= 2 * (n - 1) * full_bytes
    assert traffic.steps >= collectives.lower_bound_steps(n)
    seconds = closed(algorithm, "seconds", full_bytes, n, 1e-6, 1e9, **options)
    assert seconds >= collectives.all_reduce_lower_bound_seconds(full_bytes, n, 1e-6, 1e9) * (1 - 1e-12)


def test_who_meets_the_bounds():
    n, length = 8, 64
    bound = collectives.all_reduce_lower_bound_bytes(8 * length, n)
    meets = [
        name
        for name in ALL_REDUCES
        if bound
        == max(
            collectives.traffic(
                name, length, 8, n, **({"ranks_per_node": 4} if name.startswith("two") else {})
            ).sent_bytes
        )
    ]
    assert meets == ["ring_all_reduce", "halving_doubling_all_reduce", "two_level_all_reduce"]
    assert collectives.recursive_doubling_all_reduce_steps(n) == collectives.lower_bound_steps(n)


def test_two_level_spares_the_slow_links():
    n, per_node, length = 12, 4, 120
    crossing = [0] * n
    for transfers in collectives.schedule("two_level_all_reduce", length, n, ranks_per_node=per_node):
        for t in transfers:
            if t.source // per_node != t.target // per_node:
                crossing[t.source] += t.stop - t.start
    assert crossing == [collectives.two_level_slow_link_bytes(length, n, ranks_per_node=per_node)] * n
    slow = collectives.two_level_all_reduce_seconds(MiB, n, 0, 1e12, ranks_per_node=per_node, slow_link_bytes_per_s=1e6)
    assert slow == pytest.approx(2 * 2 / 3 * MiB / 4 / 1e6, rel=1e-5)


# Knowledge ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALL_REDUCES)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, 7, 8])
def test_every_contribution_arrives_exactly_once(algorithm, n):
    options = {"ranks_per_node": 2 - n % 2} if algorithm.startswith("two") else {}
    history = collectives.contributions(algorithm, n, **options)
    assert history.shape == (len(history), n, n, n)
    assert (history[-1] == 1).all()


def test_a_schedule_without_its_last_round_leaves_a_rank_ignorant():
    rows = np.arange(1, 17.0).reshape(4, 4)
    state = rows.copy()
    for transfers in collectives.schedule("ring_all_reduce", 4, 4)[:-1]:
        collectives.run_round(state, transfers)
    assert (state != rows.sum(0)).sum() == 4  # one chunk on each rank


def test_a_ring_that_goes_round_once_too_often_counts_twice():
    rows = np.ones((3, 3))
    scatter = collectives.schedule("ring_reduce_scatter", 3, 3)
    for transfers in (*scatter, scatter[-1]):
        collectives.run_round(rows, transfers)
    assert rows.max() == 5  # three right, and two of them again


# Numbers of the real world, worked by hand --------------------------------------------------------------------------


def test_known_numbers():
    assert collectives.ring_all_reduce_bytes(2 * GB, 8) == 3.5 * GB
    assert collectives.naive_all_reduce_bytes(2 * GB, 8) == 14 * GB
    assert collectives.ring_all_reduce_seconds(200 * MB, 16, 0, 100 * GB) == pytest.approx(3.75e-3)
    assert collectives.recursive_doubling_all_reduce_steps(6) == 4
    assert collectives.halving_doubling_all_reduce_bytes(MiB, 6) == 2.5 * MiB
    assert collectives.tree_all_reduce_steps(9) == 8
    assert collectives.traffic("ring_all_reduce", 10, 4, 4).sent_bytes == (56, 60, 64, 60)
    assert collectives.traffic("tree_broadcast", 3, 2, 6, src=5).sent_bytes == (0, 6, 0, 6, 0, 18)


def test_sizes_may_be_arrays():
    sizes = np.array([0.0, MiB, GB])
    np.testing.assert_allclose(collectives.ring_all_reduce_bytes(sizes, 4), 1.5 * sizes)
    np.testing.assert_allclose(collectives.tree_all_reduce_seconds(sizes, 4, 1e-5, 1e9), 4 * (1e-5 + sizes / 1e9))


@given(n=st.integers(4, 4096), alpha=st.floats(1e-7, 1e-2), rate=st.floats(1e6, 1e12))
def test_ring_and_tree_take_equally_long_at_the_crossover(n, alpha, rate):
    size = collectives.ring_tree_crossover_bytes(n, alpha, rate)
    times = [
        f(size, n, alpha, rate) for f in (collectives.ring_all_reduce_seconds, collectives.tree_all_reduce_seconds)
    ]
    assert times[0] == pytest.approx(times[1], rel=1e-9)
    if size > 0:
        assert collectives.ring_all_reduce_seconds(size / 2, n, alpha, rate) > collectives.tree_all_reduce_seconds(
            size / 2, n, alpha, rate
        )


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_ring_is_never_slower_for_few_ranks(n):
    assert collectives.ring_tree_crossover_bytes(n, 1e-5, 1e9) == 0


def test_bandwidths():
    assert collectives.algbw_bytes_per_s(8e9, 2.0) == 4e9
    assert collectives.busbw_bytes_per_s(8e9, 2.0, 8) == 7e9
    assert collectives.busbw_bytes_per_s(8e9, 2.0, 8, "all_gather") == 3.5e9
    assert collectives.busbw_bytes_per_s(8e9, 2.0, 8, "broadcast") == 4e9
    for name, algorithm in [("all_reduce", "ring_all_reduce"), ("reduce_scatter", "ring_reduce_scatter")]:
        assert collectives.busbw_factor(5, name) == pytest.approx(closed(algorithm, "bytes", 1.0, 5))


# Chunks and refusals ------------------------------------------------------------------------------------------------


@given(length=st.integers(0, 500), n=st.integers(1, 40))
def test_chunks_are_numpys(length, n):
    sizes = [len(chunk) for chunk in np.array_split(np.arange(length), n)]
    assert np.diff(collectives.chunk_bounds(length, n)).tolist() == sizes
    assert [collectives.chunk_elements(length, n, i) for i in range(n)] == sizes
    assert collectives.chunk_elements(length, n, n) == sizes[0]


REFUSED = [
    (lambda: collectives.ring_all_reduce_bytes(-1, 4), "full_bytes"),
    (lambda: collectives.ring_all_reduce_bytes(math.nan, 4), "full_bytes"),
    (lambda: collectives.ring_all_reduce_bytes("1", 4), "full_bytes"),
    (lambda: collectives.ring_all_reduce_bytes(1, 0), "n must be at least 1, not 0"),
    (lambda: collectives.tree_all_reduce_steps(2.5), "n must be a whole number"),
    (lambda: collectives.naive_all_reduce_steps(True), "n must be a whole number"),
    (lambda: collectives.ring_all_reduce_seconds(1, 4, -1e-6, 1e9), "alpha_seconds"),
    (lambda: collectives.ring_all_reduce_seconds(1, 4, 1e-6, 0), "link_bytes_per_s"),
    (lambda: collectives.two_level_all_reduce_bytes(1, 6, ranks_per_node=4), "ranks_per_node must divide"),
    (lambda: collectives.two_level_all_reduce_seconds(1, 4, 0, 1, ranks_per_node=2, slow_link_bytes_per_s=0), "slow"),
    (lambda: collectives.algbw_bytes_per_s(1, 0), "seconds"),
    (lambda: collectives.busbw_bytes_per_s(1, 1, 2, "gossip"), "gossip"),
    (lambda: collectives.chunk_bounds(-1, 2), "num_elements"),
    (lambda: collectives.schedule("ring", 4, 2), "algorithm must be one of"),
    (lambda: collectives.schedule("two_level_all_reduce", 4, 2), "ranks_per_node"),
    (lambda: collectives.schedule("ring_all_reduce", 4, 2, ranks_per_node=2), "ranks_per_node"),
    (lambda: collectives.schedule("ring_all_reduce", 4, 2, src=1), "src is for"),
    (lambda: collectives.schedule("tree_broadcast", 4, 2, src=2), "src must be below"),
    (lambda: collectives.traffic("ring_all_reduce", 4, 0, 2), "itemsize"),
    (lambda: collectives.sent_bytes("ring_all_reduce", 4, 4, 2, 2), "rank must be below"),
    (lambda: collectives.simulate("ring_all_reduce", np.zeros(4)), "rows must be"),
    (lambda: collectives.simulate("ring_all_reduce", np.zeros((2, 4)), "min"), "op must be one of"),
    (lambda: collectives.simulate("ring_all_reduce", np.zeros((2, 4), int), "mean"), "op must be sum or max"),
    (lambda: collectives.contributions("pairwise_all_to_all", 2), "algorithm must be one that works in place"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_every_algorithm_has_its_three_registered_closed_forms():
    registered = theory.formulas("collectives")
    for name in collectives.ALGORITHMS:
        for quantity in ("bytes", "steps", "seconds"):
            known = registered[f"collectives.{name}_{quantity}"]
            assert known.equation
            assert known.function is getattr(collectives, f"{name}_{quantity}")
    assert len({known.title for known in registered.values()}) == len(registered)
