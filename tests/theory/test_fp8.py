"""Products in fp8: what they move, how long they take, what they need, and runs that others measured."""

import csv
from pathlib import Path

import numpy as np
import pytest

from dtlib.theory import hardware, models, planner
from dtlib.theory.calibration import fp8, published
from dtlib.theory.planner import FITTED, Machine, Plan, errors
from dtlib.theory.timing import CAST_BYTES, FP8_BYTES

H100 = hardware.accelerator("H100")
MODEL = models.model("llama3-8b")
EIGHT, SIXTEEN = np.int8, np.float16  # stand-ins of one byte and of two


class Memory:
    """Counts the bytes that kernels read and write, apart for products and for casts."""

    def __init__(self):
        self.products = self.casts = 0

    def product(self, one, other):
        found = (one.astype(np.float32) @ other.astype(np.float32)).astype(SIXTEEN)
        self.products += one.nbytes + other.nbytes + found.nbytes
        return found

    def cast(self, tensor, transposed=True):
        plain = tensor.astype(EIGHT)
        turned = np.ascontiguousarray(plain.T)
        self.casts += tensor.nbytes + plain.nbytes + (turned.nbytes if transposed else 0)
        return plain, turned


def trained(x, w, dy, *, transposed=True):
    """One layer forward and backward; fp8 products read both operands along the sum, so they need both layouts."""
    memory = Memory()
    x8, x8t = memory.cast(x, transposed)
    w8, w8t = memory.cast(w, transposed)
    dy8, dy8t = memory.cast(dy, transposed)
    found = memory.product(x8, w8), memory.product(dy8, w8t), memory.product(x8t, dy8)
    assert np.array_equal(found[2], (dy8t.astype(np.float32) @ x8.astype(np.float32)).astype(SIXTEEN).T)
    return memory, found


@pytest.mark.parametrize("sides", [(6, 4, 10), (3, 5, 7), (16, 8, 8)])
def test_bytes_are_those_that_kernels_move(sides):
    tokens, rows, columns = sides
    rng = np.random.default_rng(sum(sides))
    x, w, dy = (
        rng.integers(-3, 4, shape).astype(SIXTEEN) for shape in ((tokens, rows), (rows, columns), (tokens, columns))
    )
    memory, (y, dx, dw) = trained(x, w, dy)
    for found, exact in ((y, x @ w), (dx, dy @ w.T), (dw, x.T @ dy)):
        assert np.array_equal(found, exact)
    entries = x.size + w.size + dy.size
    assert memory.products == pytest.approx(3 * FP8_BYTES * entries, rel=1e-12)
    assert memory.casts == CAST_BYTES * entries
    assert trained(x, w, dy, transposed=False)[0].casts == 3 * entries  # without transposed copies it is another law


def terms(plan, precision, model=MODEL, card=H100):
    machine = Machine(accelerator=card, gpus=plan.world_size)
    return planner.step_time(model, plan.changed(precision=precision), machine).parts


def test_products_of_layers_alone_are_faster():
    for plan in (Plan(dp=4, zero=1), Plan(tp=2, sequence_parallel=True), Plan(pp=2, micro_batches=4)):
        half, eight = (terms(plan, each) for each in ("bf16", "fp8"))
        differ = {name for name in half if half[name] != eight[name]} - {"bubble", "data_parallel", "host"}
        assert differ == {"matmuls", "casts"}
        assert half["casts"] == 0
        assert half["matmuls"] / 2.1 < eight["matmuls"] < half["matmuls"] / 1.5


def test_seconds_are_operations_and_bytes_of_each_matrix():
    """Counted from the model's matrices by themselves, with no layer function of the planner."""
    plan, h, tokens = Plan(micro_batch=2, seq=1024), MODEL.hidden, 2048
    kv, f = MODEL.kv_width, MODEL.ffn_hidden
    matrices = [(h, h + 2 * kv), (h, h), (h, 2 * f), (f, h)]
    rate = H100.measured_half_flop_per_s / H100.half_flop_per_s * H100.fp8_flop_per_s * FITTED.matmul_share
    entries = sum(tokens * x + x * y + tokens * y for x, y in matrices)
    flops = sum(6 * tokens * x * y for x, y in matrices)
    found = terms(plan, "fp8")
    moved = 4 * FITTED.operand_passes * entries / H100.memory_bytes_per_s
    assert found["matmuls"] == pytest.approx(MODEL.num_layers * (flops / rate + moved))
    assert found["casts"] == pytest.approx(MODEL.num_layers * 4 * entries / H100.memory_bytes_per_s)


def test_recomputed_products_are_in_fp8_too():
    half, eight = (terms(Plan(recompute="full"), each)["recompute"] for each in ("bf16", "fp8"))
    plain = terms(Plan(), "fp8")
    assert eight < half
    forward = (plain["matmuls"] + plain["casts"] + plain["elementwise"]) / 3 + plain["attention"] / 3.5
    assert eight == pytest.approx(forward)


def test_copies_are_two_bytes_of_each_weight_that_is_there():
    matrices = models.model_parameters(MODEL)
    layers = matrices.attention + matrices.mlp
    for tp in (1, 4):
        found = planner.plan_memory(MODEL, Plan(tp=tp, precision="fp8"))
        assert found.fp8_copies == 2 * layers / tp
        plain = planner.plan_memory(MODEL, Plan(tp=tp))
        assert found.total - found.fp8_copies == plain.total
    sharded = planner.plan_memory(MODEL, Plan(dp=8, zero=3, precision="fp8"))
    assert sharded.fp8_copies == sharded.gathered - planner.plan_memory(MODEL, Plan(dp=8, zero=2)).gathered
    assert planner.plan_memory(MODEL, Plan(dp=8, zero=3)).fp8_copies == 0


def test_what_is_not_known_is_refused():
    with pytest.raises(ValueError, match=r"precision must be bf16 on A100-80GB-SXM, not 'fp8'"):
        terms(Plan(), "fp8", card=hardware.accelerator("A100"))
    for recipe in ("mxfp8", "nvfp4", "fp8-rowwise"):
        with pytest.raises(ValueError, match=rf"precision must be one of bf16, fp8, not '{recipe}'"):
            Plan(precision=recipe)


def test_a_changed_card_keeps_how_much_faster_fp8_is():
    faster = H100.at_rate(2 * H100.half_flop_per_s, None)
    assert faster.fp8_flop_per_s == 2 * H100.fp8_flop_per_s
    a100 = hardware.accelerator("A100")
    assert a100.at_rate(1.0, None).fp8_flop_per_s is None


def test_the_search_plans_in_fp8_throughout():
    machine = Machine(accelerator=H100, gpus=8)
    found = planner.search(MODEL, machine, sequences=64, keep=2, like=Plan(precision="fp8"))
    assert {each.plan.precision for each in found.plans} == {"fp8"}
    assert found.best.fit.verdict == "unknown"
    assert "products in fp8" in found.best.fit.outside
    assert found.best.interval.regime.endswith("fp8")


# What others measured


DATA = Path(__file__).parents[2] / "chapters" / "data"


def rows(table):
    with (DATA / f"{table}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def off(run, **changes):
    run_as = [plan.changed(**changes) for plan in run.plans]
    found = planner.step_time(run.model, run_as[0], run.machine, planner.profile(run.framework)).total
    return found / run.seconds - 1


@pytest.mark.parametrize(
    ("table", "number", "most", "at_least"),
    [
        ("llmfoundry_mpt_half", 5, 0.08, 0.2),
        ("torchtitan_half", 11, 0.17, 0.25),
        ("megatron_bridge_half", 12, 0.06, 0.5),
    ],
)
def test_published_runs_are_met_without_a_constant_of_fp8(table, number, most, at_least):
    """As if they were in 16 bits, or all of them twice as fast, the same runs are further off."""
    runs = [run for run in fp8.runs(table, rows(table)) if run.model.experts is None]
    assert len(runs) == number
    assert {run.plans[0].precision for run in runs} == {"fp8"}
    found, half = (np.array([off(run, precision=each) for run in runs]) for each in ("fp8", "bf16"))
    assert np.mean(np.abs(found)) < most
    assert np.mean(np.abs(half)) > at_least
    assert np.mean(np.abs((1 + half) / 2 - 1)) > 1.5 * np.mean(np.abs(found))


def test_published_speedups_are_met():
    """The seconds a token in fp8 over those in 16 bits, of runs that print both with one model, cards and batch."""
    titan, mpt = rows("torchtitan_half"), rows("llmfoundry_mpt_half")
    pairs = [
        (published._torchtitan(titan[1]), fp8.runs("torchtitan_half", titan[2:3])),
        *((published._torchtitan(half), fp8.runs("torchtitan_half", [eight])) for half in titan for eight in titan
          if half["technique"] == "asyncTP bf16" and eight["technique"] == "asyncTP fp8 tensorwise"
          and half["table"] == eight["table"]),
        *((published._mpt(half), fp8.runs("llmfoundry_mpt_half", [eight])) for half in mpt for eight in mpt
          if half["precision"] == "amp_bf16" and eight["precision"] == "amp_fp8"
          and all(half[each] == eight[each] for each in ("model", "seq", "gpus", "mbs"))),
    ]  # fmt: skip
    assert len(pairs) == 3
    for (half,), (eight,) in pairs:
        found = (1 + off(eight)) / (1 + off(half))
        assert 0.95 < found < 1.05
    with pytest.raises(ValueError, match="table must be one of llmfoundry_mpt_half"):
        fp8.runs("sc21_table1", [])


def test_rows_with_scales_of_rows_or_blocks_are_left_out():
    titan = [row for row in rows("torchtitan_half") if "rowwise" in row["technique"]]
    bridge = [row for row in rows("megatron_bridge_half") if row["Precision"] in ("MXFP8", "NVFP4", "FP8-MX", "")]
    assert len(titan) == 2
    assert len(bridge) > 50
    assert fp8.runs("torchtitan_half", titan) == []
    assert all(run.model.experts is not None for run in fp8.runs("megatron_bridge_half", bridge))


def test_rows_with_experts_that_print_a_whole_layout_are_read():
    """Of the table of models with experts seven, in scales of 32 entries: one job, as its software was tuned."""
    table = rows("moe_training_throughput")
    runs = fp8.runs("moe_training_throughput", table)
    assert [row["layout"].startswith("TP1 PP8 VPP4 EP32") for row in table].count(True) == len(runs) == 7
    (plan,) = {run.plans[0] for run in runs}
    assert (plan.world_size, plan.pp, plan.ep, plan.chunks, plan.sequences) == (256, 8, 32, 4, 2048)
    assert (plan.seq, plan.precision) == (4096, "fp8")
    for run, rate in zip(runs, (494.46, 540.0, 610.71, 691.49, 797.67, 943.56, 970.01), strict=True):
        tokens = plan.sequences * plan.seq / 256 / run.seconds
        assert tokens * 0.25 == pytest.approx(rate)  # TFLOP a token


def test_left_out_errors_are_told():
    assert errors.known()["megatron, a pipeline, fp8"]["mean"] < 0.06
    plan = Plan(dp=2, tp=4, pp=8, zero=1, micro_batches=128, sequence_parallel=True, chunks=5, schedule="interleaved",
                precision="fp8")  # fmt: skip
    machine = Machine(accelerator=H100, gpus=64)
    told = errors.interval(plan, "llama3-70b", machine)
    assert told.low < planner.step_time("llama3-70b", plan, machine).total * 1.01 < 1.01 * told.high
    assert errors.interval(plan.changed(cp=2, dp=1), "llama3-70b", machine).low is None
