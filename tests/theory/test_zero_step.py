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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: zero.hybrid_traffic(8, 4, 3), "ranks_per_node must divide the number of ranks, 4; 3 does not"),
        (lambda: zero.zero_plus_plus_volume(-1), "full_bytes must be finite and zero or more, not -1"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
