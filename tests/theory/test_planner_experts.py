"""Plans of models with experts: against enumeration, placement by hand, and counts that know no plan."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from dtlib.cli import told
from dtlib.theory import ep, hardware, models, planner
from dtlib.theory.footprint import rank_memory
from dtlib.theory.planner import FITTED, Machine, Plan
from dtlib.theory.planner.memory import _of_stage

H100 = hardware.accelerator("H100")
SHARES = (0.9, 0.8, 2e-5)


def small(**changes):
    """Latent attention, one dense layer before seven with eight experts, and a module for a further token."""
    v3 = models.model("deepseek-v3")
    experts = replace(v3.experts, num_experts=8, top_k=2, hidden=1024, shared_hidden=1024, first_dense=1)
    latent = replace(v3.latent, kv_rank=128, q_rank=256)
    sizes = {"num_layers": 8, "hidden": 1024, "num_heads": 8, "num_kv_heads": 8, "ffn_hidden": 4096, "vocab": 8192}
    return replace(v3, experts=experts, latent=latent, seq=2048, mtp_modules=1, name="small", **(sizes | changes))


def machine(gpus=16, **changes):
    return Machine(accelerator=replace(H100, **changes), gpus=gpus)


def test_no_plan_that_fits_is_faster_than_the_best():
    """Every row of every mesh, its memory counted without the bound from below; what fits is told by hand."""
    of, model = machine(8, memory_bytes=12e9), small()
    found = planner.search(model, of, sequences=16)
    timed = planner.every_plan(model, of, sequences=16, seq=2048)
    assert {each.mesh.ep for each in timed} == {1, 2, 4, 8}
    fits = []
    for each in timed:
        for row, seconds in enumerate(each.seconds):
            memory = planner.plan_memory(model, each.plan(row))
            assert each.least_bytes[row] <= memory.total * (1 + 1e-9)
            if memory.total * (1 + FITTED.margin) <= of.accelerator.memory_bytes:
                fits.append(seconds)
    assert 0 < len(fits) < found.looked_at
    assert found.best.time.total == pytest.approx(min(fits))
    assert found.best.plan.ep > 1


def test_every_plan_has_the_seconds_of_step_time():
    random = np.random.default_rng(0)
    for each in planner.every_plan("mixtral-8x7b", machine(), sequences=32, seq=4096, imbalance=3):
        plan = each.plan(int(random.integers(len(each.seconds))))
        seconds = planner.step_time("mixtral-8x7b", plan, machine()).total
        assert each.seconds[[each.plan(row) for row in range(len(each.seconds))].index(plan)] == pytest.approx(seconds)
        assert plan.imbalance == min(3, plan.ep)


def test_the_fullest_stage_is_among_those_that_are_counted():
    random, counted = np.random.default_rng(0), 0
    while counted < 150:
        experts = replace(small().experts, first_dense=int(random.integers(5)), every=int(random.integers(1, 4)))
        model = small(num_layers=int(random.integers(5, 30)))
        model = replace(model, experts=experts, mtp_modules=int(random.integers(2)))
        pipe, v = int(random.integers(1, 6)), int(random.integers(1, 4))
        v = v if pipe > 1 and pipe * v <= model.num_layers + 2 else 1
        plan = Plan(
            dp=4, pp=pipe, ep=int(2 ** random.integers(3)), zero=int(random.integers(4)), micro_batches=2 * pipe,
            chunks=v, schedule="interleaved" if v > 1 else "1F1B", recompute=str(random.choice(["none", "full"])),
        )  # fmt: skip
        if model.num_expert_layers == 0:
            continue
        every = [_of_stage(model, plan, rank_memory(model, plan, each), each, FITTED).total for each in range(pipe)]
        assert planner.plan_memory(model, plan).total == max(every)
        counted += 1


FULL_NODES = [
    each for each in product((2, 4, 12), (1, 2, 3), (1, 2, 4, 16)) if np.prod(each) < 8 or np.prod(each) % 8 == 0
]


@pytest.mark.parametrize(("dp", "cp", "tp"), FULL_NODES)
def test_groups_lie_where_the_order_of_the_ranks_puts_them(dp, cp, tp):
    """Rank = ((stage · dp + d) · cp + c) · tp + t; nodes of 8 take them in order."""
    of = machine(dp * cp * tp)
    for share in (each for each in (1, 2, 4) if dp % each == 0):
        plan = Plan(dp=dp, cp=cp, tp=tp, ep=share)
        together = {d * cp * tp // of.node for d in range(share)}
        group = of.expert_group(plan, SHARES)
        assert group.world_size == share
        assert group.num_nodes >= len(together)
        copies = [(d * cp + c) * tp // of.node for d in range(0, dp, share) for c in range(cp)]
        group = of.expert_copies(plan, SHARES)
        assert group.world_size == len(copies) == plan.expert_copies
        most = max(copies.count(node) for node in set(copies))
        assert group.ranks_per_node == max(each for each in range(1, most + 1) if len(copies) % each == 0)


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v3", "llama3-8b"])
def test_products_have_the_operations_of_the_active_parameters(name):
    """Six for each parameter that a token is multiplied by, where operands cost nothing."""
    model, k = models.model(name), replace(FITTED, operand_passes=1e-12, matmul_share=1.0)
    found = planner.step_time(model, Plan(seq=1024), machine(1, measured_half_flop_per_s=1e15), k)
    active = models.active_parameters(model)
    met = sum(active.parts[each] for each in ("attention", "mlp", "shared_experts", "experts", "router"))
    assert found.matmuls == pytest.approx(6 * met * 1024 / 1e15, rel=1e-3)
    assert found.expert_parallel == 0


def test_experts_of_few_tokens_wait_for_their_weights():
    """With a slow memory a rank reads each expert that has a token, and each of two products its own weights."""
    model, k = models.model("mixtral-8x7b"), replace(FITTED, operand_passes=1.0)
    slow = {"memory_bytes_per_s": 1e6, "measured_half_flop_per_s": 1e30}
    found = [planner.step_time(model, Plan(dp=8, ep=each, seq=16), machine(8, **slow), k).matmuls for each in (1, 8)]
    a_layer = 3 * model.hidden * model.experts.hidden
    saved = 3 * model.num_layers * (8 - 1) * a_layer * 2 / 1e6  # three passes over seven experts of two bytes
    assert found[0] - found[1] == pytest.approx(saved, rel=0.01)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_tokens_travel_twice_a_pass_at_the_best_of_their_ways(recompute):
    model, of = models.model("mixtral-8x7b"), machine(16)
    plan = Plan(dp=16, ep=8, micro_batch=2, micro_batches=3, seq=4096, recompute=recompute)
    shares = (FITTED.inside_share, FITTED.across_share, FITTED.across_alpha_seconds)
    layer = ep.Layer(hidden=4096, expert_hidden=14336, num_experts=8, top_k=2)
    once = ep.all_to_all_seconds(of.expert_group(plan, shares), layer, 2 * 4096)
    passes = 3 if recompute == "full" else 2
    found = planner.step_time(model, plan, of).expert_parallel
    assert found == pytest.approx(3 * model.num_layers * passes * once)
    busier = planner.step_time(model, plan.changed(imbalance=1.5), of)
    assert busier.expert_parallel == pytest.approx(1.5 * found)
    assert busier.matmuls > planner.step_time(model, plan, of).matmuls


def test_experts_are_summed_over_the_ranks_that_hold_them():
    """Where ep is dp, a rank's experts are its own: nothing of them is summed, and more of the rest than of Mixtral's
    experts travels."""
    model, of, k = models.model("mixtral-8x7b"), machine(8), replace(FITTED, overlap_share=1e-9, contention_share=1e-9)
    shared, own = (planner.step_time(model, Plan(dp=8, ep=each, seq=4096), of, k).data_parallel for each in (1, 8))
    total, experts = models.model_parameters(model).total, models.model_parameters(model).experts
    assert shared / own == pytest.approx(total / (total - experts), rel=0.01)


def test_a_module_for_a_further_token_is_a_layer_and_a_head_more():
    of, plan, model = machine(1), Plan(seq=2048), replace(small(), mtp_modules=0)
    alone, one, two = (planner.step_time(replace(model, mtp_modules=n), plan, of) for n in range(3))
    assert two.total - one.total == pytest.approx(one.total - alone.total, rel=0.01)
    assert one.head > 2 * alone.head
    deeper = planner.step_time(replace(model, num_layers=9), plan, of)
    assert one.attention == pytest.approx(deeper.attention)
    assert one.matmuls == pytest.approx(deeper.matmuls)


def test_the_largest_published_model_on_2048_cards():
    found = planner.search("deepseek-v3", machine(2048), seq=4096, sequences=15360, degrees={"pp": 16, "ep": 64})
    assert {(each.plan.pp, each.plan.ep) for each in found.plans} == {(16, 64)}
    said = " ".join(told.sentences(found))
    assert "no constant of these times was fitted to a run of a model with experts" in said
    assert "experts, latent attention" in said
    assert "ep 64 of dp" in said
    assert told.columns(found)[4] == "ep"
    assert told.row(found, found.best)[4] == "64"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"degrees": {"ep": 3}}, r"ep must be one of 1, 2, 4, 8 with gpus=8, not 3"),
        ({"imbalance": 0.5}, "imbalance must be 1 or more, not 0.5"),
        ({"imbalance": float("nan")}, "imbalance must be"),
        ({"degrees": {"sp": 2}}, "degrees must be some of dp, tp, pp, cp, ep, not sp"),
    ],
)
def test_bad_input_is_refused(how, said):
    with pytest.raises(ValueError, match=said):
        planner.search("mixtral-8x7b", machine(8), sequences=8, seq=2048, **how)


def test_a_dense_model_has_no_ep():
    with pytest.raises(ValueError, match="ep must be 1 for a model without experts, not 2"):
        planner.search("llama3-8b", machine(8), degrees={"ep": 2})
    found = planner.search("llama3-8b", machine(8), sequences=64)
    assert "ep" not in told.columns(found)
    assert len(told.row(found, found.best)) == len(told.columns(found))
