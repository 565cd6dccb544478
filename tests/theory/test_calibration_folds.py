"""How far a step time is believed: errors of left-out runs by regime, and the interval that they give."""

import csv
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dtlib.theory import hardware, models, planner
from dtlib.theory.calibration import fitting, folds, fp8, published
from dtlib.theory.planner import FITTED, Machine, Plan, errors
from dtlib.theory.planner.memory import SURELY
from dtlib.theory.timing import profile, step_time
from dtlib.theory.timing.space import PLAIN, choices

DATA = Path(__file__).parents[2] / "chapters" / "data"
H100 = hardware.accelerator("H100")


def runs_of(table, read=published.runs):
    with (DATA / f"{table}.csv").open(encoding="utf-8") as file:
        return read(table, csv.DictReader(file))


TABLES = {table: runs_of(table) for table in published.EVERY}
FP8 = {table: runs_of(table, fp8.runs) for table in fp8.TABLES}
RUNS = folds.told_apart(folds.unrepeated(run for runs in (*TABLES.values(), *FP8.values()) for run in runs))


def test_half_of_the_sweep_is_counted_once():
    assert len(RUNS) < sum(map(len, TABLES.values()))
    assert len({(run.model.name, run.plans, run.machine, run.seconds) for run in RUNS}) == len(RUNS)


def test_what_is_known_counts_every_run_in_its_regime():
    counts = {name: of["runs"] for name, of in errors.known().items()}
    seen = [folds.regime_of(run) for run in RUNS]
    assert counts == {name: seen.count(name) for name in sorted(set(seen))}
    behind = [folds.regime_of(run) for run in RUNS if run.plans[0].tp_overlap and run.plans[0].tp > 1]
    assert {name: of["tp_overlap"] for name, of in errors.known().items()} == {
        name: behind.count(name) for name in counts
    }
    matrix = [folds.regime_of(run) for run in RUNS if run.plans[0].attention == "matrix"]
    assert {name: of["matrix"] for name, of in errors.known().items()} == {name: matrix.count(name) for name in counts}


def test_attention_as_a_matrix_has_no_interval_where_too_few_runs_had_it():
    plan, of = Plan(dp=8, tp=2, zero=1, micro_batches=32), Machine(accelerator=H100, gpus=16)
    llama, matrix = models.model("llama2-7b"), plan.changed(attention="matrix")
    assert errors.interval(plan, llama, of, "nanotron").unlike == ()
    assert errors.interval(matrix, llama, of, "nanotron").unlike == ("attention as a matrix",)
    assert errors.interval(matrix, llama, of, "megatron").unlike == ()  # six of its ten runs had it


@pytest.mark.soak
@pytest.mark.timeout(3600)  # as many fits as folds
def test_what_is_known_is_what_fits_without_each_fold_give():
    found = folds.measured(RUNS)
    assert set(found) == set(errors.known())
    for name, of in errors.known().items():
        for each in ("low", "high", "median", "mean"):
            assert found[name][each] == pytest.approx(of[each], rel=0.02), (name, each)


LARGE = ((8, 6), (8, 12), (4, 12))  # three folds of nine: each is a fit


def test_a_run_is_planned_with_constants_that_have_not_seen_its_fold():
    """Runs of one tp and pp ten times as slow: their own fold does not see them, others do."""
    bloom = [run for run in RUNS if run.framework == "deepspeed" and (run.plans[0].tp, run.plans[0].pp) in LARGE]
    slow = [replace(run, seconds=10 * run.seconds) if run.plans[0].tp == 8 else run for run in bloom]
    plain, changed = (
        {(run.plans, run.model): ratio for run, ratio in folds.left_out(those, "deepspeed")} for those in (bloom, slow)
    )
    for run in bloom:
        key, fold = (run.plans, run.model), run.plans[0].tp == 8 and run.plans[0].pp == 6
        assert changed[key] < 10 * plain[key] * 1.01
        if fold:  # other folds with tp 8 are slow too, and pull
            assert changed[key] > 1.5 * plain[key]


def test_most_runs_of_a_regime_lie_in_its_interval():
    for name, of in errors.known().items():
        those = [run for run in RUNS if folds.regime_of(run) == name]
        if of["runs"] < 40:
            continue
        found = [errors.interval(run.plans[0], run.model, run.machine, run.framework) for run in those]
        found = [each.stall if run.stalled else each for each, run in zip(found, those, strict=True)]
        few = [run.plans[0].tp_overlap and run.plans[0].tp > 1 and of["tp_overlap"] < errors.FEWEST for run in those]
        behind = ("messages of tp behind products",)  # one run of FSDP: it counts in its regime, and has no interval
        assert [each.unlike for each in found] == [behind if each else () for each in few]
        held = [pair for pair, alone in zip(zip(found, those, strict=True), few, strict=True) if not alone]
        assert len(held) >= len(those) - 1
        inside = np.mean([each.low <= run.seconds <= each.high for each, run in held])
        assert errors.INSIDE - 0.08 <= inside <= errors.INSIDE + 0.12, name


def test_runs_of_pipelines_stall_or_they_do_not():
    """Of those on fewer cards hardly any lie between: nobody's label, found in the seconds."""
    plain, stalls = planner.profile("nanotron"), replace(planner.profile("nanotron"), stall_cards=0)
    parts = []
    for run in RUNS:
        plan = run.plans[0]
        if run.framework == "nanotron" and plan.pp > 1 and plan.tp <= 8 and 8 < plan.world_size < 512:
            least, most = (planner.step_time(run.model, plan, run.machine, k).total for k in (plain, stalls))
            parts.append((run.seconds - least) / (most - least))
    parts = np.array(parts)
    assert np.mean((parts > 0.3) & (parts < 0.7)) < 0.02
    assert 0.15 < np.mean(parts >= 0.7) < 0.35
    large = [run for run in RUNS if run.framework == "nanotron" and run.plans[0].pp > 1 and run.machine.gpus == 512]
    assert (
        published.mean_error(large, plain) < 0.06 < 0.5 < published.mean_error(large, replace(plain, stall_cards=513))
    )


def test_no_run_that_ran_is_surely_too_large():
    needs = [planner.plan_memory(r.model, r.plans[0]).total / r.machine.accelerator.memory_bytes for r in RUNS]
    assert 1 < max(needs) < 0.8 * SURELY


def off(runs, /, **changes):
    k = replace(planner.profile("nanotron"), **changes)
    return np.median([abs(np.expm1(run.log_error(k))) for run in runs])


def test_runs_that_gather_again_over_nodes_wait_for_their_host():
    """Their memory says that they did; pipelines gave the constant, and keep it where these runs are left out."""
    over = [run for run in RUNS if run.framework == "nanotron" and run.plans[0].pp == 1 and run.plans[0].tp > 8]
    again, keeps = ([run for run in over if run.plans[0].keep_gathered == each] for each in (False, True))
    assert (len(again), len(keeps)) == (31, 104)
    quick = planner.profile("nanotron").rank_host_seconds
    assert off(again) < 0.1 < 0.5 < off(again, far_rank_host_seconds=quick)
    assert off(keeps) < 0.1
    turned = [replace(run, plans=(run.plans[0].changed(keep_gathered=not run.plans[0].keep_gathered),)) for run in over]
    assert off(turned) > 0.5


def test_pipelines_over_nodes_wait_for_their_host_after_each_launch():
    """Of few tensor ranks the launch is a large part; a wait that grows with the ranks alone is too short for them."""
    staged = [run for run in RUNS if run.framework == "nanotron" and run.plans[0].pp > 1 and not run.stalled]
    over = [run for run in staged if 8 < run.machine.gpus < 512 and run.plans[0].micro_batch == 1]
    two, eight = ([run for run in over if run.plans[0].tp == each and run.plans[0].dp < 32] for each in (2, 8))
    assert off(two) < 0.1 < 0.15 < off(two, layer_host_seconds=1e-9)
    assert off(eight) < 0.1 < off(eight, staged_rank_host_seconds=3.05e-3)  # as for ranks of other nodes
    deep = [run for run in staged if run.model.num_layers == 32 and run.plans[0].pp >= 16 and run.plans[0].tp <= 2]
    assert len(deep) > 8
    assert off(deep) < 0.1  # the head alone on its stage


def test_each_pipeline_over_32_tensor_ranks_stalls():
    wide = [run for run in RUNS if run.plans[0].pp > 1 and run.plans[0].tp == 32 and run.machine.gpus < 512]
    assert len(wide) == 46
    assert not any(run.stalled for run in wide)  # none is left to tell apart
    errors = [abs(np.expm1(run.log_error(planner.profile("nanotron")))) for run in wide]
    assert np.quantile(errors, 0.9) < 0.15
    assert off(wide, stall_ranks=0) > 0.3


def test_gradients_of_many_cards_go_round_in_buckets_where_they_are_summed_whole():
    large = [run for run in RUNS if run.framework == "nanotron" and run.machine.gpus == 512 and run.plans[0].pp == 1]
    whole, sharded = ([run for run in large if (run.plans[0].zero == 0) == each] for each in (True, False))
    few = [run for run in whole if run.plans[0].tp <= 8]
    assert off(few) < 0.1 < 0.3 < off(few, stall_hop_seconds=0)
    assert off(sharded) < 0.1
    assert off(large, stall_seconds=0.56) > 1.3 * off(large) < off(large, stall_seconds=0) / 1.3


def test_a_stall_is_told_beside_the_interval():
    """A share of the runs, in a regime of its own: the seconds with each message held up."""
    model = models.llama("ours", num_layers=24, hidden=3072, num_heads=32, vocab=64000, seq=4096, ffn_hidden=8192)
    plan, k = Plan(dp=8, tp=2, pp=4, zero=1, micro_batches=16, sequence_parallel=True), planner.profile("nanotron")
    found = planner.interval(plan, model, Machine(accelerator=H100, gpus=64), "nanotron")
    of = errors.known()[found.regime + ", stalled"]
    seconds = planner.step_time(model, plan, Machine(accelerator=H100, gpus=64), replace(k, stall_cards=64)).total
    assert (found.stall.low, found.stall.high) == pytest.approx((seconds * of["low"], seconds * of["high"]))
    like = [run for run in RUNS if folds.regime_of(replace(run, stalled=False)) == found.regime]
    assert found.stalled == pytest.approx(np.mean([run.stalled for run in like if run.machine.gpus > 8]), abs=1e-4)
    for without in (plan.changed(pp=1, dp=32), plan.changed(dp=1)):  # no pipeline; one node
        machine = Machine(accelerator=H100, gpus=without.world_size)
        assert planner.interval(without, model, machine, "nanotron").stall is None


def test_runs_with_experts_are_met_within_a_half_in_bf16_and_farther_off_in_fp8():
    """No constant was fitted to them; what they computed again is not printed. In fp8 software alone was half of it."""
    took = {"bf16": [], "fp8": []}
    for run in RUNS:
        if run.model.experts is not None:
            took[run.plans[0].precision].append(np.exp(-run.log_error()))
    ends = {name: (len(those), round(min(those), 2), round(max(those), 2)) for name, those in took.items()}
    assert ends == {"bf16": (7, 0.77, 1.48), "fp8": (29, 0.43, 1.94)}
    tuned = sorted(np.exp(-run.log_error()) for run in FP8["moe_training_throughput"])
    assert len(tuned) == 7
    assert len({(run.plans, run.machine) for run in FP8["moe_training_throughput"]}) == 1  # one job
    assert (round(tuned[0], 2), round(tuned[-1], 2)) == (0.81, 1.59)


def test_an_interval_is_the_regimes_quantiles_around_the_time():
    plan, machine = (
        Plan(dp=8, tp=8, zero=1, sequence_parallel=True, keep_gathered=True),
        Machine(accelerator=H100, gpus=64),
    )
    model = models.llama("ours", num_layers=24, hidden=3072, num_heads=32, vocab=64000, seq=4096, ffn_hidden=8192)
    found = planner.interval(plan, model, machine, "nanotron")
    seconds = planner.step_time(model, plan, machine, planner.profile("nanotron")).total
    of = errors.known()[found.regime]
    assert (found.low / seconds, found.high / seconds) == pytest.approx((of["low"], of["high"]))
    assert found.low < seconds < found.high
    assert (found.regime, found.unlike) == ("nanotron, no pipeline", ())


def test_what_nothing_like_it_was_seen_of_has_no_interval():
    model, machine = models.model("llama2-7b"), Machine(accelerator=H100, gpus=64)
    plan = Plan(dp=8, tp=8, zero=1, seq=4096)
    reasons = {
        "another card": planner.interval(
            plan, model, replace(machine, accelerator=hardware.accelerator("B200")), "nanotron"
        ),
        "more cards": planner.interval(plan.changed(dp=256), model, replace(machine, gpus=2048), "nanotron"),
        "a model of another size": planner.interval(plan, "llama2-70b", machine, "nanotron"),
        "sequences of another length": planner.interval(plan.changed(seq=32768), model, machine, "nanotron"),
        "megatron, no pipeline, experts": planner.interval(plan, "mixtral-8x7b", machine),
        "megatron, no pipeline, cp": planner.interval(plan.changed(dp=4, cp=2), model, machine),
    }
    for reason, found in reasons.items():
        assert (found.unlike, found.low, found.high) == ((reason,), None, None)
    few = planner.interval(plan.changed(pp=2, cp=2, dp=2), model, machine)
    assert few.runs < errors.FEWEST
    assert few.unlike == (few.regime,)


def test_folds_are_quantiles_of_the_ratio_and_errors_of_the_time():
    run = RUNS[0]
    of = folds._summary([(run, ratio) for ratio in (0.5, 1.0, 1.0, 1.0, 2.0)])
    assert (of["low"], of["high"], of["runs"]) == (0.5, 2.0, 5)
    assert of["mean"] == pytest.approx((1 + 0.5) / 5)


SWEEP = [run for run in RUNS if run.framework == "nanotron"]


def mean_regret(fewest, most, framework="nanotron", of=SWEEP):
    """The speed of the run that the planner picks, the fastest by its own time of those that fit, over the best one's:
    the mean over models and numbers of cards. Who picks a run that failed, of infinite seconds, gets 0."""
    groups = defaultdict(list)
    for run in folds.unrepeated(of):
        plan = run.plans[0]
        if planner.fit(planner.plan_memory(run.model, plan), run.machine).has_room:
            planned = step_time(run.model, plan, run.machine, profile(framework)).total
            groups[run.model.name, run.machine.gpus].append((planned / plan.sequences, run.seconds / plan.sequences))
    best = {key: min(took for _, took in found) / min(found)[1] for key, found in groups.items()}
    return np.mean([speed for (_, cards), speed in best.items() if fewest <= cards <= most])


def test_the_pick_of_a_measured_sweep_is_nearly_the_best():
    assert mean_regret(1, 64) >= 0.95 > mean_regret(1, 64, "megatron")
    assert mean_regret(128, 256) >= 0.85 > mean_regret(128, 256, "megatron")
    assert mean_regret(512, 512) >= 0.9 > 0.7 > mean_regret(512, 512, "megatron")


def test_runs_that_failed_are_worth_nothing_where_memory_does_not_exclude_them():
    with (DATA / "ultrascale_half.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["status"] != "ok" and int(row["pp"]) <= int(row["layers"])]
    failed = [published.ultrascale(row) for row in rows]
    assert {run.seconds for run in failed} == {math.inf}
    assert 0.9 <= mean_regret(1, 64, of=[*SWEEP, *failed]) <= mean_regret(1, 64)


LEFT_OUT = {  # mean or median error of runs that the fit had not seen, as the issue asks
    "megatron, a pipeline": ("mean", 0.08), "megatron, no pipeline": ("mean", 0.08),
    "fsdp, no pipeline, sharded weights": ("mean", 0.10), "deepspeed, a pipeline": ("mean", 0.10),
    "nanotron, no pipeline": ("mean", 0.08), "nanotron, no pipeline, stalled": ("mean", 0.15),
    "nanotron, no pipeline, tp over 8": ("mean", 0.15), "nanotron, no pipeline, tp over 8, stalled": ("mean", 0.15),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT_OUT)
def test_left_out_runs_are_met(name):
    kind, most = LEFT_OUT[name]
    assert errors.known()[name][kind] <= most


def test_profiles_meet_their_own_tables_and_others_do_not():
    for framework, most in (("fsdp", 0.07), ("deepspeed", 0.08)):
        those = [run for run in RUNS if run.framework == framework]
        own = published.mean_error(those, planner.profile(framework))
        assert own <= most < published.mean_error(those, FITTED)
    assert all(math.isfinite(run.seconds) for run in RUNS)
    assert set(fitting.HABITS) | {"megatron"} == set(planner.PROFILES)


def test_what_was_run_is_among_what_its_framework_runs():
    """Each published run, but for a selective recompute beside flash attention, which leaves it nothing."""
    held = 0
    for table, runs in TABLES.items():
        for run in runs:
            for plan in run.plans:
                space = planner.FRAMEWORKS[run.framework]
                assert all(getattr(plan, name) == getattr(PLAIN, name) for name in space.without), (table, plan)
                found, _ = choices(run.model, plan, plan.sequences, planner.FITTED, space)
                again = "none" if plan.attention == "flash" and plan.recompute == "selective" else plan.recompute
                assert plan.pp == 1 or plan.schedule in space.schedule  # of chunks equal ones alone are looked at
                has = found["recompute"] == again
                if plan.dp * plan.cp > 1:
                    has &= found["zero"] == plan.zero
                if plan.tp > 1:
                    has &= found["sequence_parallel"] == plan.sequence_parallel
                    has &= found["keep_gathered"] == plan.keep_gathered
                assert has.any(), (table, plan)
                held += 1
    assert held > 1000
