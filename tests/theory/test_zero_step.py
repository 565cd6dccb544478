"""What a step of a rank sends, and ZeRO across nodes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtlib.theory import zero

world = st.integers(1, 12)


def test_weights_that_stay_from_forward_to_backward_are_gathered_once():
    assert zero.traffic(8, 4, 3, reshard_after_forward=False).total == zero.sent_bytes(8, 4, 2)


# --- across nodes ----------------------------------------------------------------------------------------------


def test_hybrid_sharding_two_by_two():
    """Four ranks, D = 8: inside a node of two 3 · 1/2 · 8, and across an all-reduce of half of it, 2 · 1/2 · 4."""
    sent = zero.hybrid_traffic(8, 4, 2)
    assert (sent.within_node, sent.across_nodes) == (12, 4)


@given(full=st.integers(0, 10**9), nodes=world, per_node=world)
def test_hybrid_sharding_between_its_two_ends(full, nodes, per_node):
    n = nodes * per_node
    sent = zero.hybrid_traffic(full, n, per_node)
    assert sent.within_node == pytest.approx(3 * (per_node - 1) / per_node * full)
    assert sent.across_nodes == pytest.approx(2 * (nodes - 1) / nodes * full / per_node)
    assert zero.hybrid_traffic(full, n, n).within_node == pytest.approx(zero.sent_bytes(full, n, 3))
    assert zero.hybrid_traffic(full, n, 1).across_nodes == pytest.approx(zero.sent_bytes(full, n, 0))


@pytest.mark.parametrize(
    ("weights", "shards", "gradients", "factor"),
    [
        (False, False, False, 3),
        (True, False, False, 2),
        (False, True, False, 2),
        (False, False, True, 2.25),
        (True, True, True, 0.75),
    ],
)
def test_zero_plus_plus(weights, shards, gradients, factor):
    volume = zero.zero_plus_plus_volume(
        1e9, quantised_weights=weights, secondary_shards=shards, quantised_gradients=gradients
    )
    assert volume.total == factor * 1e9


def test_zero_plus_plus_counts_scales_and_nodes():
    num, q, block = 3000, 4, 50
    for nodes in (1, 2, 5):
        found = zero.zero_plus_plus_traffic(num, nodes * q, q, block=block)
        int8, int4 = num + 4 * num / block, num / 2 + 4 * num / block
        assert found.within_node == pytest.approx((q - 1) / q * (2 * int8 + int4))
        assert found.across_nodes == pytest.approx((nodes - 1) / nodes * (int8 + int4) / q)
    # of all ranks of a node, without scales and for many nodes: the paper's
    limit = zero.zero_plus_plus_traffic(num, 10**6 * q, q, block=10**9).across_nodes * q
    assert limit == pytest.approx(zero.zero_plus_plus_volume(2 * num).total, rel=1e-5)
    bits = [zero.zero_plus_plus_traffic(num, 8, q, block=10**9, gradient_bits=b).across_nodes for b in (4, 8)]
    assert bits[1] - bits[0] == pytest.approx(num / q / 2 / 2, rel=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: zero.zero_plus_plus_traffic(8, 4, 3, block=1), "ranks_per_node must divide the number of ranks, 4; 3"),
        (lambda: zero.zero_plus_plus_traffic(8, 4, 2, block=0), "block must be at least 1, not 0"),
        (lambda: zero.zero_plus_plus_traffic(8, 4, 2, block=1, gradient_bits=1), "gradient_bits must be at least 2"),
        (lambda: zero.hybrid_traffic(8, 4, 3), "ranks_per_node must divide the number of ranks, 4; 3 does not"),
        (lambda: zero.zero_plus_plus_volume(-1), "full_bytes must be finite and zero or more, not -1"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
