"""Context parallelism as algebra: merging against one softmax, orders against masks entry by entry, closed forms."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtlib.theory import cp

few = st.integers(1, 12)
sizes, rates = st.integers(1, 10**4), st.floats(1e9, 1e16)


@given(n=few, blocks=st.lists(few, min_size=1, max_size=6), scale=st.sampled_from([1, 1000]), seed=st.integers(0, 99))
def test_merged_in_any_order_blocks_give_one_softmax(n, blocks, scale, seed):
    random = np.random.default_rng(seed)
    x, v = scale * random.standard_normal((n, sum(blocks))), random.standard_normal((sum(blocks), 3))
    x[:, : blocks[0] - 1] = -np.inf  # most of a block is masked
    expected = cp.partial(x, v)
    ends = np.cumsum(blocks)[:-1]
    parts = [cp.partial(*each) for each in zip(np.split(x, ends, 1), np.split(v, ends), strict=True)]
    for order in (parts, parts[::-1]):
        found = order[0]
        for each in order[1:]:
            found = cp.merge(found, each)
        # sums of a dozen terms of at most 1, in another order
        np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=1e-12)
        np.testing.assert_allclose(found[1], expected[1], rtol=1e-12)


def test_a_block_in_which_all_is_masked_has_no_weight():
    nothing = cp.partial([[-np.inf, -np.inf]], [[1.0], [2.0]])
    something = cp.partial([[0.0]], [[5.0]])
    assert nothing[1] == -np.inf
    assert nothing[0] == 0
    for merged in (cp.merge(nothing, something), cp.merge(something, nothing)):
        assert merged[0] == 5
        assert merged[1] == 0
    assert cp.merge(nothing, nothing)[1] == -np.inf


@given(n=few, more=st.integers(0, 40), order=st.sampled_from(cp.ORDERS))
def test_each_token_is_on_one_rank_and_parts_are_even(n, more, order):
    ranges = cp.pieces(2 * n + more, n, order)
    assert sorted(p for own in ranges for each in own for p in each) == list(range(2 * n + more))
    lengths = [sum(map(len, own)) for own in ranges]
    assert max(lengths) - min(lengths) <= (1 if order == "contiguous" else 2)


@given(n=few, more=st.integers(0, 30), order=st.sampled_from(cp.ORDERS), causal=st.booleans())
def test_what_is_left_out_is_masked_entry_by_entry(n, more, order, causal):
    """Counted on the matrix: of each rank's rows and each owner's columns, whole tiles in which nothing is seen."""
    s = 2 * n + more
    ranges, seen = cp.pieces(s, n, order), np.tril(np.ones((s, s))) if causal else np.ones((s, s))
    found = cp.scores(s, n, order, causal=causal)
    for rank, own in enumerate(ranges):
        for i in range(n):
            tiles = [seen[np.ix_(q, k)] for q in own for k in ranges[(rank - i) % n]]
            assert found[rank, i] == sum(tile.size for tile in tiles if tile.any())


@given(n=few, half=few)
def test_in_zigzag_order_all_ranks_have_the_same_to_do_in_every_round(n, half):
    block = (2 * half) ** 2
    found = cp.scores(2 * half * n, n)
    assert (found[:, 0] == 3 * block // 4).all()
    assert (found[:, 1:] == block // 2).all()
    contiguous = cp.scores(2 * half * n, n, "contiguous")
    assert (contiguous.max(axis=0) == block).all()  # somebody has a whole block to do, in every round
    assert (contiguous == block * np.tri(n)).all()


@given(b=few, s=sizes, g=few, d=few, n=few)
def test_a_ring_sends_three_all_gathers_of_keys_and_values(b, s, g, d, n):
    gather = (n - 1) / n * 2 * b * s * g * d
    assert cp.ring_elements(b, s, g, d, n) == pytest.approx(3 * gather)
    assert cp.ring_elements(b, s, g, d, n, backward=False) == pytest.approx(gather)


@given(b=few, s=sizes, g=few, shared=few, d=few, n=few)
def test_ulysses_counted_tensor_by_tensor(b, s, g, shared, d, n):
    a, g = g * shared * n, g * n
    sent = sum((n - 1) / n * b * s / n * heads * d for heads in (a, g, g, a))  # queries, keys, values, results
    assert cp.ulysses_elements(b, s, a, g, d, n) == pytest.approx(2 * sent)
    assert cp.ulysses_elements(b, s, a, 1, d, n) == cp.ulysses_elements(b, s, a, n, d, n)  # one key for each rank


@given(a=few, g=few, flops=rates, link=rates, causal=st.booleans(), b=few, d=few)
def test_at_the_hiding_length_a_block_travels_as_long_as_another_is_computed(a, g, flops, link, causal, b, d):
    own = cp.hiding_tokens(a * g, g, flops, link, causal=causal)
    compute = cp.forward_flops(b, own**2 / (2 if causal else 1), a * g, d) / flops
    travel = 2 * 2 * b * g * d * own / link
    assert compute == pytest.approx(travel)
    # backward: five products instead of two, and twice the bytes
    assert 2.5 * compute >= 2 * travel * (1 - 1e-9)


def test_a_ring_hides_all_but_the_last_round():
    assert cp.ring_step_seconds(4, 2, 1) == 8
    assert cp.ring_step_seconds(4, 1, 2) == 7
    assert cp.ring_step_seconds(1, 3, 9) == 3


def test_kept_are_four_tensors_and_a_number():
    assert cp.kept_bytes(2, 24, 6, 3, 8, 4) == 2 * 6 * (2 * (6 + 6 + 3 + 3) * 8 + 4 * 6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cp.pieces(4, 3), "seq must be at least 6, the parts of 3 ranks in zigzag order, not 4"),
        (lambda: cp.pieces(4, 3, "snake"), "order must be one of contiguous, zigzag, not 'snake'"),
        (lambda: cp.scores(4, 0), "cp must be"),
        (lambda: cp.ring_elements(1, 0, 1, 1, 1), "seq must be"),
        (lambda: cp.ulysses_elements(1, 1, 6, 6, 1, 4), "cp must divide num_heads=6, and 4 does not"),
        (lambda: cp.ulysses_elements(1, 1, 12, 3, 1, 4), "cp must divide num_kv_heads=3 or be a multiple of it, not 4"),
        (lambda: cp.hiding_tokens(1, 1, 0, 1), "flop_per_s must be"),
        (lambda: cp.kept_bytes(1, 1, 1, 1, 0, 1), "head_dim must be"),
        (lambda: cp.ring_step_seconds(2, -1, 1), "compute_seconds must be"),
        (lambda: cp.partial([1.0], [[1.0]]), "scores and values must be of shapes"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
