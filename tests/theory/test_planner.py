"""The planner against the rooms of theory that it puts together, and its search against every plan."""

from dataclasses import replace

import numpy as np
import pytest

from dtlib.cli import told
from dtlib.theory import footprint, hardware, models, planner, pp
from dtlib.theory.planner import FITTED, Machine, Plan
from dtlib.theory.units import GiB, format_bytes


def eight(name="H100", **sizes):
    return Machine(accelerator=hardware.accelerator(name), gpus=sizes.pop("gpus", 8), **sizes)


def test_hidden_messages_are_not_free():
    """FSDP on one node: all of its gathers travel behind the products, and still cost a share of their time."""
    plan, machine = Plan(dp=8, zero=3, micro_batch=8, micro_batches=4), eight()
    free, dear = (replace(FITTED, contention_share=each) for each in (1e-9, 0.5))
    seconds = [planner.step_time("llama2-7b", plan, machine, each).data_parallel for each in (free, FITTED, dear)]
    more, most = seconds[1] - seconds[0], seconds[2] - seconds[0]
    assert 0 < more < most
    assert most / more == pytest.approx(0.5 / FITTED.contention_share)


@pytest.mark.parametrize("given", [{"plan": Plan()}, {"model": "llama2-7b"}])
def test_a_fit_wants_plan_and_model_or_neither(given):
    with pytest.raises(ValueError, match="plan and model must be given together"):
        planner.fit(planner.plan_memory("llama2-7b", Plan()), eight(), **given)


def test_memory_is_the_footprints_with_what_the_library_adds():
    plan = Plan(dp=4, tp=2, pp=4, zero=1, micro_batch=2, micro_batches=8, sequence_parallel=True)
    found = planner.plan_memory("llama3-8b", plan)
    counted = footprint.rank_memory(models.model("llama3-8b"), plan, 0)
    assert found.states == counted.states
    assert found.activations == pytest.approx(FITTED.staged_activation_factor * counted.layer_activations)
    # whole for a moment: some inputs of b s h entries in two bytes, and with late sums two bytes a parameter
    inputs = FITTED.whole_inputs * 2 * 2 * 8192 * 4096
    assert found.gathered == pytest.approx(inputs)
    late = planner.plan_memory("llama3-8b", plan.changed(sums_late=True))
    assert late.gathered - inputs == pytest.approx(counted.weights)
    assert planner.plan_memory("llama3-8b", plan.changed(sums_late=True, zero=2)).gathered < late.gathered
    one = plan.changed(dp=1, pp=1, zero=0)  # the logits of the one stage are larger, and gone by then
    assert planner.plan_memory("llama3-8b", one).gathered == 0
    alone = planner.plan_memory("llama3-8b", one.changed(tp=1, sequence_parallel=False))
    counted = footprint.rank_memory(models.model("llama3-8b"), one.changed(tp=1, sequence_parallel=False))
    layers = counted.activations - counted.logits
    assert alone.activations == pytest.approx(FITTED.activation_factor * layers)
    # a group that shares each sequence has half of the tokens on a rank, and shares the states as well
    shared = planner.plan_memory("llama3-8b", plan.changed(dp=2, cp=2))
    assert shared.states == found.states
    assert shared.activations == pytest.approx(found.activations / 2)


def test_to_keep_what_is_gathered_costs_its_bytes_and_saves_two_of_ten_phases():
    again = Plan(tp=4, pp=4, dp=2, zero=1, micro_batches=8, sequence_parallel=True, seq=4096)
    keeps, t, entries = again.changed(keep_gathered=True), 4, 4096 * 4096  # b s h of llama3-8b
    for schedule in ("1F1B", "ZB-H1"):
        memory, seconds = [], []
        for each in (again.changed(schedule=schedule), keeps.changed(schedule=schedule)):
            memory.append(planner.plan_memory("llama3-8b", each).activations)
            seconds.append(planner.step_time("llama3-8b", each, eight(gpus=32)).tensor_parallel)
        # two inputs of two bytes, of which a rank has a part of 1/t anyway; eight layers, four micro-batches
        more = 4 * (1 - 1 / t) * entries * 8 * 4 * FITTED.staged_kept_share
        assert memory[1] - memory[0] == pytest.approx(more)
        assert seconds[1] / seconds[0] == pytest.approx(8 / 10)
    full = [planner.plan_memory("llama3-8b", each.changed(recompute="full")) for each in (again, keeps)]
    now = more / 8 / 4 / FITTED.staged_kept_share  # those of the layer of now are all there
    assert full[1].activations - full[0].activations == pytest.approx(FITTED.staged_activation_factor * now)
    timed = planner.every_plan("llama3-8b", eight(gpus=8), sequences=8, seq=4096, degrees={"tp": 4})
    offered = {
        (p.sequence_parallel, p.keep_gathered) for each in timed for p in map(each.plan, range(len(each.seconds)))
    }
    assert offered == {(False, False), (True, False), (True, True)}


def test_the_bubble_is_the_laws():
    machine = eight(gpus=8)
    plan = Plan(pp=8, micro_batches=16)
    time = planner.step_time("llama3-8b", plan, machine)
    # what each stage repeats: the head makes the last one slower, and the others' work is what it waits for
    repeated = time.total - time.bubble - time.optimizer - time.data_parallel - time.head
    assert time.bubble / repeated == pytest.approx(pp.bubble_overhead(8, 16))
    zero_bubble = planner.step_time("llama3-8b", plan.changed(schedule="ZB-H1"), machine)
    assert zero_bubble.bubble == pytest.approx(time.bubble / 3)


def test_utilisation_counts_the_heads_that_there_are_and_the_scores_that_a_window_leaves():
    """By hand: 6Ψ and 12 operations a layer for each entry of the heads and each token seen."""
    qwen, machine = models.model("qwen3-32b"), eight(gpus=64)
    for model in (qwen, replace(qwen, window=4096, windowed_share=0.5)):
        found = planner.search(model, machine, seq=32768, sequences=64, degrees={"pp": 1}, keep=1)
        share = (
            1 if model.window is None else 0.5 + 0.5 * (4096 * 4097 / 2 + (32768 - 4096) * 4096) / (32768 * 32769 / 2)
        )
        flops = 6 * models.model_parameters(model).total + 12 * 64 * 64 * 128 * 32768 * share
        done = flops * 64 * 32768 / found.best.time.total / (64 * machine.accelerator.half_flop_per_s)
        assert found.mfu(found.best) == pytest.approx(done)
    plan = Plan(dp=64, zero=3, seq=32768)
    seconds = [planner.step_time(each, plan, machine).attention for each in (qwen, replace(qwen, window=4096))]
    assert seconds[0] / seconds[1] == pytest.approx(4.27, abs=0.01)


def test_what_takes_the_most_beside_the_products_is_named():
    answer = planner.search("llama3-70b", eight(gpus=128), sequences=512)
    best, name = answer.best.time, answer.best.bottleneck
    share = best.parts[name] / (best.total - best.matmuls)
    said = f"is {name.replace('_', ' ')}, {share:.0%} of the rest"
    assert any(said in each for each in told.sentences(answer))


def test_more_of_a_resource_takes_no_longer():
    found = planner.search("llama3-8b", eight(gpus=16), sequences=128)
    assert all(seconds <= found.best.time.total for seconds in found.buys.values())
    assert found.buys["matmul rate"] < found.best.time.total


def test_each_plan_of_an_answer_fits_and_is_no_faster_than_the_one_before():
    found = planner.search("llama3-8b", eight(gpus=16), sequences=128)
    seconds = [each.time.total for each in found.plans]
    assert seconds == sorted(seconds)
    assert all(each.fit.has_room for each in found.plans)
    assert {each.fit.verdict for each in found.plans} <= {"yes", "unknown"}
    assert {each.plan.world_size for each in found.plans} == {16}
    assert {each.plan.sequences for each in found.plans} == {128}
    assert found.too_large is None or found.too_large.time.total <= seconds[0]
    assert sum(found.lost_to(found.plans[1]).values()) == pytest.approx(seconds[1] - seconds[0])


def test_no_plan_that_fits_is_faster_than_the_best():
    """Every plan of two cards by hand: the search is one of them, and none is faster."""
    machine, sequences = eight("A100", gpus=2), 8
    best = planner.search("gpt2-1.5b", machine, sequences=sequences).best
    seconds = []
    for dp, tp, pipe in ((2, 1, 1), (1, 2, 1), (1, 1, 2)):
        for b in (1, 2, 4, 8):
            for zero in range(4 if dp > 1 else 1):
                for recompute in ("none", "full"):
                    if sequences // dp % b:
                        continue
                    try:
                        plan = Plan(dp=dp, tp=tp, pp=pipe, zero=zero, recompute=recompute, micro_batch=b,
                                    micro_batches=sequences // dp // b)  # fmt: skip
                        memory = planner.plan_memory("gpt2-1.5b", plan)
                    except ValueError:  # 25 heads are not cut in two
                        assert tp == 2
                        continue
                    if planner.fit(memory, machine).verdict == "yes":
                        seconds.append(planner.step_time("gpt2-1.5b", plan, machine).total)
    assert best.time.total <= min(seconds)


def test_no_drawn_plan_that_fits_is_faster_than_the_best():
    """The search leaves out plans by a bound from below of their memory; these are drawn without one."""
    machine, sequences, random = eight(gpus=64), 256, np.random.default_rng(0)
    best = planner.search("llama3-70b", machine, sequences=sequences).best
    seconds = []
    while len(seconds) < 40:
        tp, pipe, cp = (int(2 ** random.integers(0, 4)) for _ in range(3))
        if 64 % (tp * pipe * cp):
            continue
        dp = 64 // (tp * pipe * cp)
        b = int(2 ** random.integers(0, 3))
        schedule = str(random.choice(["1F1B", "ZB-H1", "interleaved"])) if pipe > 1 else "1F1B"
        plan = Plan(
            dp=dp, tp=tp, pp=pipe, cp=cp, zero=int(random.integers(4)), micro_batch=b,
            micro_batches=sequences // dp // b, chunks=80 // pipe // 2 if schedule == "interleaved" else 1,
            schedule=schedule, sequence_parallel=bool(random.integers(2)), keep_gathered=bool(random.integers(2)),
            recompute=str(random.choice(["none", "full"])),
        )  # fmt: skip
        if planner.fit(planner.plan_memory("llama3-70b", plan), machine).verdict == "yes":
            seconds.append(planner.step_time("llama3-70b", plan, machine).total)
    assert best.time.total <= min(seconds)


def test_the_largest_model_on_the_largest_machine():
    found = planner.search("llama3-405b", eight(gpus=16384))
    assert found.looked_at > 50_000
    assert found.sequences * 8192 == 2**24
    assert 0.35 < found.mfu(found.best) < 0.5  # Llama 3 itself: 0.41


def test_what_does_not_fit_is_told_with_the_nearest_that_does():
    with pytest.raises(ValueError, match=r"no plan of llama3-70b fits on gpus=8 .* margin .*; \d+ do \(dp"):
        planner.search("llama3-70b", eight())


@pytest.mark.parametrize(
    ("name", "gpus", "sequences", "seq"),
    [("llama3-8b", 2, 8, 1024), ("llama2-13b", 4, 8, 1024), ("gpt2-1.5b", 2, 8, 1024), ("llama3-8b", 16, 1, 16384)],
)
def test_the_least_that_is_told_is_what_the_smallest_plan_needs(name, gpus, sequences, seq):
    """Every plan's memory, one by one; the bound from below is of another plan in one of the four, and the plan with
    the fewest bytes has a larger margin than another in one."""
    card = replace(hardware.accelerator("H100"), memory_bytes=2.5 * GiB)
    machine = Machine(accelerator=card, gpus=gpus)
    timed = planner.every_plan(name, machine, sequences=sequences, seq=seq)
    plans = [each.plan(row) for each in timed for row in range(len(each.seconds))]
    needs = [(planner.plan_memory(name, plan).total * (1 + planner.margin_of(plan)), plan) for plan in plans]
    needed, best = min(needs, key=lambda each: each[0])
    margin = f"{planner.margin_of(best):.0%}"
    with pytest.raises(ValueError, match=f"the least is {format_bytes(needed, digits=3)} with a margin of {margin}"):
        planner.search(name, machine, sequences=sequences, seq=seq)


def test_batches_and_sequences_of_any_size_are_looked_at_in_few_plans():
    for asked in ({"sequences": 10**8, "seq": 8192}, {"sequences": 64, "seq": 10**8}):
        timed = planner.every_plan("llama3-8b", eight(gpus=64), **asked)
        assert 1000 < sum(len(each.seconds) for each in timed) < 10**6, asked
        for each in timed:
            assert np.isfinite(each.seconds).all()
            assert (each.seconds > 0).all()
            assert (each.least_bytes > 0).all()
    wide = replace(models.model("llama3-8b"), hidden=10**9, ffn_hidden=10**9, vocab=10**9)
    timed = planner.every_plan(wide, eight(), sequences=2**20, seq=8192)
    assert all((each.least_bytes > 0).all() and (each.seconds > 0).all() for each in timed)
    with pytest.raises(ValueError, match=r"the states alone take [\d,]+ such cards"):
        planner.search(wide, eight(), sequences=8)


def test_degrees_may_be_held_fixed():
    asked = {"dp": 4, "tp": 8, "pp": 4}
    machine = eight(gpus=128)
    found = planner.search("llama3-70b", machine, degrees=asked)
    assert {(each.plan.dp, each.plan.tp, each.plan.pp, each.plan.cp) for each in found.plans} == {(4, 8, 4, 1)}
    free = planner.search("llama3-70b", machine)
    assert free.best.time.total <= found.best.time.total
    assert found.looked_at < free.looked_at
    one = planner.search("llama3-70b", machine, degrees={"tp": free.best.plan.tp})
    assert one.best.plan == free.best.plan


def test_fixed_degrees_that_do_not_fit_are_told_with_others_that_do():
    with pytest.raises(ValueError, match=r"no plan of llama3-70b .*tp 1, .*cp 1, .*; other degrees do \(dp"):
        planner.search("llama3-70b", eight(gpus=128), degrees={"tp": 1, "cp": 1}, seq=2**17, sequences=128)


def test_every_plan_has_the_seconds_of_step_time():
    machine, random = eight(gpus=16), np.random.default_rng(0)
    timed = planner.every_plan("llama3-8b", machine, sequences=64, seq=8192)
    for each in timed:
        row = int(random.integers(len(each.seconds)))
        plan = each.plan(row)
        assert each.seconds[row] == pytest.approx(planner.step_time("llama3-8b", plan, machine).total)
        assert each.least_bytes[row] <= planner.plan_memory("llama3-8b", plan).total * 1.0001


def test_a_product_takes_its_operations_and_its_operands():
    share = planner.product_share(64, 128, 256, 1e12, 1e9)
    operations, operands = 2 * 64 * 128 * 256 / 1e12, 2 * (64 * 128 + 128 * 256 + 64 * 256) / 1e9
    assert share == pytest.approx(operations / (operations + operands))
    assert planner.product_share(64, 128, 256, 1e12, 1e9, element_bytes=4) < share
    assert list(planner.product_share([64, 64], 128, 256, 1e12, 1e9)) == [share, share]


@pytest.mark.parametrize("share", [0.5, 0.8, 0.95])
def test_cut_so_often_a_product_has_the_share(share):
    sides, rates = (8192, 4096, 14336), (600e12, 4e12)
    cuts = planner.cuts_for(share, *sides, *rates)
    if cuts == 0:
        assert planner.product_share(*sides, *rates) < share
    else:
        assert planner.product_share(*sides[:2], sides[2] / cuts, *rates) == pytest.approx(share)


@pytest.mark.parametrize("recipe", ["12-byte", "18-byte"])
def test_no_search_finds_a_plan_below_the_least_number_of_cards(recipe):
    for name in ("llama3-8b", "llama2-13b", "qwen2.5-32b"):
        least = planner.least_cards(name, hardware.accelerator("H100"), recipe)
        gpus = 2 ** int(np.ceil(np.log2(least)))
        assert gpus // 2 < least
        if gpus > 1:
            with pytest.raises(ValueError, match="no plan of"):
                planner.search(name, eight(gpus=gpus // 2, node=min(8, gpus // 2)), recipe=recipe)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: planner.search("llama3-8b", eight(), degrees={"tp": 3}), r"tp must be one of 1, 2, 4, 8 with gpus=8"),
        (lambda: planner.search("llama3-8b", eight(), sequences=3, degrees={"dp": 8}), r"and a batch of 3, not 8"),
        (lambda: planner.search("llama3-8b", eight(), degrees={"tp": 4, "pp": 4}), r"tp=4 and pp=4 do not go together"),
        (lambda: planner.search("llama3-8b", eight(), degrees={"sp": 4}), r"degrees must be some of dp, .* not sp"),
        (lambda: planner.cuts_for(1.0, 8, 8, 8, 1, 1), r"share must be between 0 and 1, not 1.0"),
        (lambda: planner.product_share(0, 8, 8, 1, 1), r"x must be finite and positive, not 0"),
        (lambda: eight(gpus=12), r"gpus must be a multiple of node=8, not 12"),
        (lambda: eight(gpus=0), r"gpus must be at least 1, not 0"),
        (lambda: Plan(schedule="GPipe"), r"schedule must be one of 1F1B, interleaved, ZB-H1, not 'GPipe'"),
        (lambda: Plan(chunks=2, pp=2, micro_batches=2), r"chunks must be above 1 where .* not 2"),
        (lambda: Plan(cp=0), r"cp must be at least 1, not 0"),
        (lambda: planner.step_time("llama3-8b", Plan(dp=4), eight()), r"dp·tp·pp·cp must be gpus=8, not 4"),
        (lambda: planner.plan_memory("llama3-8b", Plan(cp=2, seq=4095)), r"seq must be a multiple of 2·cp=4"),
    ],
)
def test_bad_input_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
