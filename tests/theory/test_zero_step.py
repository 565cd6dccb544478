"""The step of a rank played moment by moment, and ZeRO across nodes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtlib.theory import memory, models, zero

world = st.integers(1, 12)
stages = st.sampled_from(zero.STAGES)
modules = st.lists(st.integers(0, 50), min_size=1, max_size=6)


def test_stage_3_worked_out_by_hand():
    """Three modules of 8, 4 and 12 parameters on 4 ranks, one prefetched; each keeps 100 bytes for backward."""
    played = zero.step_timeline([8, 4, 12], 4, 3, saved_bytes=[100, 100, 100])
    assert [(moment.phase, moment.module) for moment in played] == [
        ("rest", -1), ("forward", 0), ("forward", 1), ("forward", 2),
        ("backward", 2), ("backward", 1), ("backward", 0), ("step", -1),
    ]  # fmt: skip
    shard = 6  # parameters of 24
    assert all(moment.held.weights == 2 * shard for moment in played)
    assert all(moment.held.optimizer == 12 * shard for moment in played)
    assert [moment.held.gathered_weights for moment in played] == [0, 2 * 12, 2 * 16, 2 * 12, 2 * 16, 2 * 12, 2 * 8, 0]
    assert [moment.held.unsharded_gradients for moment in played] == [0, 0, 0, 0, 2 * 12, 2 * 4, 2 * 8, 0]
    assert [moment.held.gradients for moment in played] == [0, 0, 0, 0, 2 * 3, 2 * 4, 2 * 6, 2 * 6]
    assert [moment.held.activations for moment in played] == [0, 100, 200, 300, 300, 200, 100, 0]
    assert zero.peak(played) is played[4]


@pytest.mark.parametrize(
    ("stage", "weights", "optimizer", "gradients"),
    [
        (0, 2 * 24, 12 * 24, [2 * 12, 2 * 16, 2 * 24]),
        (1, 2 * 24, 12 * 6, [2 * 12, 2 * 16, 2 * 24]),
        (2, 2 * 24, 12 * 6, [2 * 3, 2 * 4, 2 * 6]),
    ],
)
def test_the_other_stages_worked_out_by_hand(stage, weights, optimizer, gradients):
    played = zero.step_timeline([8, 4, 12], 4, stage)
    backward = [moment.held for moment in played if moment.phase == "backward"]
    assert {moment.held.weights for moment in played} == {weights}
    assert {moment.held.optimizer for moment in played} == {optimizer}
    assert [held.gradients for held in backward] == gradients
    assert [held.unsharded_gradients for held in backward] == ([2 * 12, 2 * 4, 2 * 8] if stage == 2 else [0, 0, 0])
    assert {moment.held.gathered_weights for moment in played} == {0}


def test_outer_parameters_are_whole_through_both_passes():
    """Two modules of 8 and 4, and 16 outside of them, on 4 ranks."""
    played = zero.step_timeline([8, 4], 4, 3, outer_params=16)
    assert [moment.held.weights for moment in played] == [2 * 7] * 6
    assert [moment.held.gathered_weights for moment in played] == [0, 2 * 28, 2 * 20, 2 * 28, 2 * 24, 0]
    assert [moment.held.unsharded_gradients for moment in played] == [0, 0, 0, 2 * 20, 2 * 24, 0]
    assert [moment.held.gradients for moment in played] == [0, 0, 0, 2 * 1, 2 * 3, 2 * 7]
    whole = zero.step_timeline([8, 4], 4, 1, outer_params=16)
    assert [moment.held.gradients for moment in whole] == [0, 0, 0, 2 * 20, 2 * 28, 2 * 28]


def test_weights_that_stay_from_forward_to_backward():
    played = zero.step_timeline([8, 4, 12], 4, 3, reshard_after_forward=False)
    assert [moment.held.gathered_weights for moment in played] == [0, 24, 48, 48, 48, 24, 16, 0]
    assert zero.traffic(8, 4, 3, reshard_after_forward=False).total == zero.sent_bytes(8, 4, 2)


@settings(deadline=None)
@given(modules=modules, n=world, stage=stages, recipe=st.sampled_from(sorted(memory.RECIPES)), data=st.data())
def test_states_before_the_update_are_those_of_the_stage(modules, n, stage, recipe, data):
    rank = data.draw(st.integers(0, n - 1))
    *_, update = zero.step_timeline(modules, n, stage, recipe, outer_params=17, rank=rank)
    exact = zero.states_of_rank([(17,), *((size,) for size in modules)], n, stage, rank, recipe)
    held = update.held
    assert held.weights == exact.weights
    assert held.gradients == exact.gradients
    assert held.optimizer == pytest.approx(exact.optimizer, rel=1e-12)
    assert held.total == pytest.approx(exact.total, rel=1e-12)


@given(modules=modules, outer=st.integers(0, 50), stage=stages)
def test_on_one_rank_all_stages_are_the_same(modules, outer, stage):
    alone = zero.step_timeline(modules, 1, stage, outer_params=outer)
    assert alone == zero.step_timeline(modules, 1, 0, outer_params=outer)


@given(n=st.integers(2, 12), per_rank=st.integers(1, 20), layers=st.integers(2, 6))
def test_the_peak_of_stage_3_is_shards_and_two_modules(n, per_rank, layers):
    """Equal layers of Φ parameters: all shards, two gathered, one gradient; while the first of them runs backward
    nothing is prefetched, so the peak is the second: there all gradients but one are there."""
    size = per_rank * n
    fullest = zero.peak(zero.step_timeline([size] * layers, n, 3))
    shards = layers * per_rank * (2 + 12) + (layers - 1) * per_rank * 2
    assert fullest.held.total == shards + zero.gathered_bytes(2 * size) + 2 * size
    assert (fullest.phase, fullest.module) == ("backward", 1)


def test_wrapping_coarsely_costs_memory():
    layer = models.layer_parameters(models.model("llama3-8b")).total
    peaks = [zero.peak(zero.step_timeline([layer * k] * (32 // k), 64, 3)).held.total for k in (1, 2, 4, 8, 16, 32)]
    assert peaks == sorted(peaks)
    assert peaks[-1] > 3 * peaks[0]


def test_each_stage_lowers_the_peak():
    layer = models.layer_parameters(models.model("llama3-8b")).total
    peaks = [zero.peak(zero.step_timeline([layer] * 32, 64, stage)).held.total for stage in zero.STAGES]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 4


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
        (lambda: zero.step_timeline([1, 2], 2, 3, saved_bytes=[1]), "saved_bytes must hold one number for each of 2"),
        (lambda: zero.step_timeline([1], 2, 5), "stage must be 0, 1, 2 or 3, not 5"),
        (lambda: zero.step_timeline([-1], 2, 3), "module_params must be at least 0, not -1"),
        (lambda: zero.step_timeline([1], 2, 3, rank=2), "rank must be below the number of ranks, 2, not 2"),
        (lambda: zero.step_timeline([1], 2, 3, saved_bytes=[-1]), "saved_bytes must be finite and zero or more"),
        (lambda: zero.peak([]), "timeline must hold at least one moment"),
        (lambda: zero.hybrid_traffic(8, 4, 3), "ranks_per_node must divide the number of ranks, 4; 3 does not"),
        (lambda: zero.zero_plus_plus_volume(-1), "full_bytes must be finite and zero or more, not -1"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
