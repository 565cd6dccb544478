"""The habits of frameworks in the time of a step: each constant's law, on a plan where it alone decides."""

from dataclasses import fields, replace

import numpy as np
import pytest

from dtlib.theory import hardware, models, planner
from dtlib.theory.planner import FITTED, Machine, Plan
from dtlib.theory.timing.stages import balanced_stages
from dtlib.theory.units import MiB

H100 = hardware.accelerator("H100")
MODEL = models.model("llama2-7b")


def terms(plan, model=MODEL, **changes):
    machine = Machine(accelerator=H100, gpus=plan.world_size)
    return planner.step_time(model, plan, machine, replace(FITTED, **changes))


def test_profiles_are_megatrons_constants_but_for_what_they_name():
    assert planner.profile("megatron") == FITTED
    for name, constants in planner.PROFILES.items():
        assert planner.profile(name) is constants
        assert constants.margin == FITTED.margin  # what they name is about time
    with pytest.raises(ValueError, match=r"framework must be one of megatron, nanotron, .*, not 'jax'"):
        planner.profile("jax")


def test_a_habit_may_be_none_and_a_constant_may_not():
    habits = [each.name for each in fields(FITTED) if each.default == getattr(FITTED, each.name)]
    assert {"data_hiding", "head_balance", "attention_flop_per_s"} < set(habits)
    for name in habits:
        replace(FITTED, **{name: 0})
        with pytest.raises(ValueError, match=f"{name} must be finite and zero or more, not -1"):
            replace(FITTED, **{name: -1})


def test_an_attention_kernel_has_a_most_on_any_card():
    plan = Plan(dp=8)
    free, reached = terms(plan), H100.measured_half_flop_per_s * FITTED.attention_share
    assert terms(plan, attention_flop_per_s=2 * reached) == free
    assert terms(plan, attention_flop_per_s=reached / 3).attention == pytest.approx(3 * free.attention)


def test_gradients_are_added_up_in_every_micro_batch():
    for m in (1, 4):
        plan = Plan(tp=2, pp=2, micro_batches=m)
        more = terms(plan, accumulated_bytes=10).elementwise - terms(plan).elementwise
        most = max(planner.plan_memory(MODEL, plan.changed(recipe="16-byte")).states / 16, 1)
        assert more == pytest.approx(m * 10 * most / H100.memory_bytes_per_s, rel=1e-4)


def test_messages_of_data_parallelism_that_nothing_hides_are_seen_whole():
    plan = Plan(dp=64, zero=1)
    hidden, seen = (terms(plan, data_hiding=each, contention_share=1e-9).data_parallel for each in (1, 0))
    assert seen > 3 * hidden > 0
    assert terms(plan, data_hiding=0, contention_share=0.5).data_parallel == pytest.approx(seen)  # behind nothing


def test_each_message_of_a_layer_waits_for_every_node():
    """Two ways, each (nodes - 1) waits for the other nodes and 7 for the cards of one."""
    for nodes in (2, 32):
        plan = Plan(dp=8 * nodes, zero=1)
        one, many = (terms(plan, data_hiding=0, sharded_messages=each).data_parallel for each in (0, 6))
        wait = (nodes - 1) * FITTED.across_alpha_seconds + 7 * 5e-6
        assert many - one == pytest.approx(2 * (6 * MODEL.num_layers - 1) * wait)
    plan = plan.changed(zero=0)
    assert terms(plan, sharded_messages=6) == terms(plan)


def test_the_host_meets_each_tensor_rank():
    """More slowly over nodes, where inputs are gathered again, or with a pipeline, there less for each rank of its node
    but once the layer is launched; then messages hide behind it."""
    launch = 1e-3
    slow = {"layer_host_seconds": launch, "rank_host_seconds": 0.1, "staged_rank_host_seconds": 0.2}
    split = Plan(tp=16, sequence_parallel=True)
    for plan, quick, near, far in (
        (Plan(tp=4), 4, 0, 0), (Plan(tp=4, pp=2), 4, 0, 0), (Plan(tp=16), 16, 0, 0),
        (split.changed(keep_gathered=True), 16, 0, 0), (split.changed(tp=8), 8, 0, 0),
        (split, 0, 0, 16), (Plan(tp=8, pp=2), 0, 8, 0), (Plan(dp=8, pp=2), 0, 1, 0), (Plan(tp=16, pp=2), 0, 8, 8),
    ):  # fmt: skip
        found = terms(plan, **slow, far_rank_host_seconds=0.3)
        behind = found.host + found.matmuls + found.attention + found.elementwise
        behind += 0 if quick else found.tensor_parallel
        expected = 0.1 * quick + 0.2 * near + 0.3 * far + (launch if near else 0)
        assert behind / (MODEL.num_layers / plan.pp) == pytest.approx(expected)
    few = terms(Plan(tp=4), rank_host_seconds=1e-6)
    assert few == terms(Plan(tp=4))


def test_logits_have_passes_of_their_own():
    few, as_all, many = (terms(Plan(), logit_passes=each).head for each in (1, 0, 2 * FITTED.kept_passes))
    assert few < as_all < many
    assert as_all == terms(Plan(), logit_passes=FITTED.kept_passes).head
    moved = 3 * 8 * MODEL.seq * MODEL.vocab * FITTED.kept_passes / H100.memory_bytes_per_s
    assert many - as_all == pytest.approx(moved)


def rounds(p, m):
    """How long 1F1B's messages take if each holds both ranks for one; of two with one neighbour any may go first."""
    todo = [[] for _ in range(p)]
    for rank, waiting in enumerate(todo):
        warm_up = min(m, p - 1 - rank)
        turns = [("forward", j) for j in range(warm_up)]
        turns += [turn for j in range(m - warm_up) for turn in (("forward", warm_up + j), ("backward", j))]
        turns += [("backward", j) for j in range(m - warm_up, m)]
        for kind, j in turns:
            links = (rank - 1, rank) if kind == "forward" else (rank, rank - 1)
            waiting += [(kind, j, link) for link in links if 0 <= link < p - 1]
    free = [0] * p

    def next_of(rank):
        first, *second = todo[rank][:2] or [None]
        return {first, *(each for each in second if each[2] == first[2])}

    while any(todo):
        may = [
            (max(free[i], free[i + 1]), i, each) for i in range(p - 1) for each in next_of(i) & next_of(i + 1) if each
        ]
        start, i, message = min(may)
        free[i] = free[i + 1] = start + 1
        todo[i].remove(message)
        todo[i + 1].remove(message)
    return max(free)


@pytest.mark.parametrize("pp", [2, 3, 4, 8, 16])
def test_a_stalled_pipeline_waits_for_the_messages_of_its_slowest_stage(pp):
    model = replace(MODEL, num_layers=16)
    for m in (pp, 3 * pp):
        plan = Plan(dp=64, pp=pp, micro_batches=m, zero=1)
        plain, waits = (terms(plan, model, stall_seconds=each, stall_cards=64 * pp) for each in (0, 0.5))
        assert waits.total - plain.total == pytest.approx(0.5 * rounds(pp, m))
        assert waits.pipeline_messages - plain.pipeline_messages == pytest.approx(0.5 * m * (2 if pp == 2 else 4))
        assert terms(plan, model, stall_seconds=0.5, stall_cards=64 * pp + 1) == plain


@pytest.mark.parametrize(("zero", "messages"), [(0, 2), (1, 1)])
def test_without_a_pipeline_a_stalled_job_waits_for_its_gradients(zero, messages):
    """And for each bucket of gradients that are summed whole, 511 ranks twice."""
    hops = 0 if zero else 2 * 511 * 4 * models.model_parameters(MODEL).total / 2 / (25 * MiB)
    for m in (1, 8):
        plan = Plan(dp=512, tp=2, micro_batches=m, zero=zero)
        plain, waits, rounds = (
            terms(plan, stall_seconds=each, stall_hop_seconds=hop, stall_cards=1024)
            for each, hop in ((0, 0), (0.5, 0), (0, 1e-3))
        )
        for found, more in ((waits, 0.5 * messages), (rounds, 1e-3 * hops)):
            assert found.total - plain.total == pytest.approx(more, rel=1e-3)
            assert found.data_parallel - plain.data_parallel == pytest.approx(more, rel=1e-3)


def test_stages_are_filled_until_they_have_their_share_or_nearly():
    """Eight layers and a head that has the products of two, by hand: shares of 5, 2.5 and 1.25."""
    layer = models.layer_of_rank(MODEL, 1, 1, with_experts=False).total
    model = replace(MODEL, num_layers=8, vocab=2 * layer // MODEL.hidden)
    assert [balanced_stages(model, pp) for pp in (1, 2, 4, 8)] == [(8, 8), (5, 3), (3, 0), (2, 0)]
    near = replace(MODEL, num_layers=32, vocab=round(2.207 * layer / MODEL.hidden))  # 15/16 are 32.07 layers
    assert balanced_stages(near, 16) == (3, 0)
    uneven = replace(MODEL, num_layers=32, vocab=32000)  # with a head of two thirds of a layer
    assert balanced_stages(uneven, 4) == (9, 7)


def test_a_head_is_balanced_by_fewer_layers_beside_it():
    wide = models.model("llama3-8b")
    for stages in (2, 4, 8):
        plan = Plan(pp=stages, micro_batches=64)
        plain, balanced = (terms(plan, wide, head_balance=each, layer_host_seconds=1e-9) for each in (0, 1))
        assert balanced.total < plain.total
        alone = terms(Plan(micro_batches=64), wide, layer_host_seconds=1e-9)
        most, _ = balanced_stages(wide, stages)
        assert balanced.matmuls == pytest.approx(alone.matmuls * most / wide.num_layers)
    assert terms(Plan(micro_batches=4), wide, head_balance=1) == terms(Plan(micro_batches=4), wide)


def test_selective_recompute_by_operations_repeats_products_and_what_memory_bounds():
    plan = Plan(dp=8, recompute="selective")
    attention, products = terms(plan), terms(plan, selective_products=0.5)
    assert attention.recompute == pytest.approx(attention.attention / 3.5)
    assert products.recompute == pytest.approx(0.5 * products.matmuls / 3 + products.elementwise / 3)
    assert np.isclose(terms(Plan(dp=8), selective_products=0.5).recompute, 0)
