"""Adapters in the plan of a step: what they move, what they save, and what is refused."""

import math

import pytest

from dtlib.theory import hardware, models, planner
from dtlib.theory.footprint import Setup, rank_memory
from dtlib.theory.models import Adapters, model_parameters
from dtlib.theory.planner import FITTED, Machine, Plan

H100, MODEL = hardware.accelerator("H100"), models.model("llama3-8b")
LORA = Adapters(16)


def terms(plan, model=MODEL):
    return planner.step_time(model, plan, Machine(accelerator=H100, gpus=plan.world_size)).parts


def test_parameters_are_those_of_the_paper():
    """GPT-3 175B, queries and values of rank 4, prints 18.9 million; both are square, as "out" is."""
    gpt3 = models.model("gpt3-175b")
    one = 96 * Adapters(4, ("out",)).layer_parameters(gpt3)
    assert 2 * one == pytest.approx(18.9e6, rel=2e-3)


def test_a_rank_of_tp_holds_one_side_of_each_adapter():
    whole, eighth = LORA.matrices(MODEL), LORA.matrices(MODEL, 8)
    for (inputs, outputs), (x, y) in zip(whole, eighth, strict=True):
        assert (inputs // 8 == x) != (outputs // 8 == y)


def test_matrices_take_two_passes_of_three():
    for plan in (Plan(dp=2), Plan(tp=2, sequence_parallel=True), Plan(pp=2, micro_batches=4), Plan(precision="fp8")):
        whole, lora = terms(plan), terms(plan.changed(adapters=LORA))
        for name in ("matmuls", "casts"):
            assert lora[name] == pytest.approx(2 / 3 * whole[name])
        assert lora["attention"] == whole["attention"]
        assert lora["elementwise"] == whole["elementwise"]
        assert whole["adapters"] == 0 < lora["adapters"]
        assert 0.5 * whole["head"] < lora["head"] < whole["head"]


def test_products_of_adapters_are_three_of_each():
    plan, rate = Plan(adapters=Adapters(64), seq=1024), H100.measured_half_flop_per_s * FITTED.matmul_share
    operands = H100.memory_bytes_per_s / FITTED.operand_passes
    seconds = 0
    for x, y in Adapters(64).matrices(MODEL):
        for rows, columns in ((x, 64), (64, y)):
            moved = 1024 * rows + rows * columns + 1024 * columns
            seconds += 3 * (2 * 1024 * rows * columns / rate + 2 * moved / operands)
    assert terms(plan)["adapters"] == pytest.approx(MODEL.num_layers * seconds)


def test_traffic_and_update_are_those_of_adapters():
    share = MODEL.num_layers * LORA.layer_parameters(MODEL) / model_parameters(MODEL).total
    whole, lora = terms(Plan(dp=64)), terms(Plan(dp=64, adapters=LORA))
    update = whole["optimizer"] - FITTED.step_host_seconds
    assert lora["optimizer"] - FITTED.step_host_seconds == pytest.approx(share * update, rel=1e-9)
    assert lora["data_parallel"] < 0.1 * whole["data_parallel"]
    streamed = terms(Plan(dp=64, zero=3, adapters=LORA))["data_parallel"]
    assert streamed > 10 * lora["data_parallel"]  # the model itself is still gathered


def test_bubbles_stay_and_zero_bubbles_have_nothing_to_fill_them():
    pipe = Plan(pp=4, micro_batches=8, adapters=LORA)
    f1b, zb = (terms(pipe.changed(schedule=name))["bubble"] for name in ("1F1B", "ZB-H1"))
    assert zb == f1b
    assert terms(pipe.changed(adapters=None, schedule="ZB-H1"))["bubble"] < terms(pipe.changed(adapters=None))["bubble"]


@pytest.mark.parametrize("zero", range(4))
def test_bytes_of_states(zero):
    psi, own = model_parameters(MODEL).total, MODEL.num_layers * LORA.layer_parameters(MODEL)
    found = rank_memory(MODEL, Setup(dp=8, zero=zero, recipe="18-byte", adapters=LORA))
    assert found.weights == pytest.approx(2 * (psi + own) / (8 if zero == 3 else 1))
    assert found.gradients == pytest.approx(4 * own / (8 if zero >= 2 else 1))
    assert found.master_weights == found.first_moment == pytest.approx(4 * own / (8 if zero else 1))
    assert found.unsharded_gradients == (4 * LORA.layer_parameters(MODEL) if zero >= 2 else 0)


def test_the_bound_of_the_search_stays_below():
    machine = Machine(accelerator=H100, gpus=8)
    for like in (Plan(adapters=LORA), Plan(adapters=Adapters(8, ("qkv",)), precision="fp8")):
        timed = planner.every_plan(MODEL, machine, sequences=16, seq=2048, like=like)
        for each in timed:
            for row in range(0, len(each.seconds), 37):
                assert each.least_bytes[row] <= planner.plan_memory(MODEL, each.plan(row)).total * (1 + 1e-9)


def test_a_search_finds_room_where_training_all_has_none():
    machine = Machine(accelerator=H100, gpus=4)
    with pytest.raises(ValueError, match="no plan of llama3-70b fits"):
        planner.search("llama3-70b", machine, sequences=16, seq=4096)
    found = planner.search("llama3-70b", machine, sequences=16, seq=4096, like=Plan(adapters=LORA))
    assert found.best.plan.adapters == LORA
    assert "adapters alone trained" in found.best.fit.outside
    assert found.best.interval.low is None
    assert 0.3 < found.mfu(found.best) < 0.6
    kept = planner.keeping(found, 1e6, 1e9)
    llama = models.model("llama3-70b")
    assert kept.save_bytes < 20 * llama.num_layers * LORA.layer_parameters(llama)


def test_published_speedup_of_adapters():
    """70B in fp8 with two stages of 20 chunks: 7,481 tokens a second and card with adapters, 4,819 with all weights
    (Megatron-Bridge's page, GB300, whose rates in bf16 and fp8 are those of GB200). Three passes would be 1."""
    gb200 = hardware.accelerator("GB200")
    speeds = []
    for gpus, adapters in ((8, Adapters(16, ("qkv",))), (32, None)):
        plan = Plan(
            pp=2, dp=gpus // 2, micro_batches=64 // gpus, chunks=20, schedule="interleaved", zero=1, seq=4096,
            precision="fp8", adapters=adapters,
        )  # fmt: skip
        machine = Machine(accelerator=gb200, gpus=gpus, node=64)
        seconds = planner.step_time("llama3-70b", plan, machine).total
        speeds.append(32 * 4096 / gpus / seconds)
    assert math.isclose(speeds[0] / speeds[1], 7481 / 4819, rel_tol=0.1)


def test_what_adapters_cannot_be_is_refused():
    for wrong in ((), ("qkv", "qkv"), ("gate",)):
        with pytest.raises(ValueError, match="modules must be some of qkv, out, up, down, each once"):
            Adapters(8, wrong)
    with pytest.raises(ValueError, match="rank must be at least 1"):
        Adapters(0)
    for name in ("mixtral-8x7b", "deepseek-v3"):
        with pytest.raises(ValueError, match="model must be dense"):
            terms(Plan(adapters=LORA), name)
