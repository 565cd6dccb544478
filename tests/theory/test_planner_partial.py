"""Some layers computed again: their bytes against a schedule played out, their seconds, and the fewest that fit."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from dtlib.cli import told
from dtlib.theory import footprint, hardware, models, planner
from dtlib.theory.activations import layer_activations
from dtlib.theory.planner import FITTED, Machine, Plan, Space, laws

LLAMA = models.model("llama3-8b")
DENSE_FIRST = replace(models.model("deepseek-v3"), mtp_modules=0)


def machine(gpus):
    return Machine(accelerator=hardware.accelerator("H100"), gpus=gpus)


def actions(p, stage, m):
    """1F1B: forward passes until the first backward can begin, then one after the other."""
    ahead = min(m, p - stage - 1)
    turns = ["F"] * ahead
    for _ in range(m - ahead):
        turns += ["F", "B"]
    return turns + ["B"] * ahead


def played(model, plan, stage, again):
    """The most bytes that layers hold at once: each forward keeps, each backward of a layer in `again` computes it
    anew, to the full, and then lets it go; layers go backward from the last."""
    begins = [sum(each) for each in np.split(np.array(footprint.stage_layers(model.num_layers, plan.pp)), [stage])]
    layers = footprint.stage_layers(model.num_layers, plan.pp)[stage]

    def bytes_of(layer, recompute):
        experts = model.experts is not None and model.experts.layers(begins[0] + layer, begins[0] + layer + 1) > 0
        return layer_activations(
            model, plan.micro_batch, seq=plan.seq_of(model), recompute=recompute, attention="flash", dropout=False,
            with_experts=experts,
        ).total  # fmt: skip

    full, kept = ([bytes_of(layer, word) for layer in range(layers)] for word in ("none", "full"))
    holds = [kept[layer] if layer in again else full[layer] for layer in range(layers)]
    now = most = 0
    for turn in actions(plan.pp, stage, plan.micro_batches):
        if turn == "F":
            now += sum(holds)
            most = max(most, now)
            continue
        for layer in reversed(range(layers)):
            most = max(most, now - holds[layer] + full[layer])
            now -= holds[layer]
    assert now == 0
    return most


CASES = [(LLAMA, 4), (LLAMA, 1), (LLAMA, 5), (DENSE_FIRST, 16)]


@pytest.mark.parametrize(("model", "stages"), CASES)
def test_bytes_are_those_of_a_schedule_played_out(model, stages):
    plan = Plan(pp=stages, micro_batches=6, seq=1024, recompute="full")
    for layers, stage in product((1, 2, 3, 100, None), sorted({0, 1 % stages, stages - 1})):
        found = footprint.rank_memory(model, plan.changed(recompute_layers=layers), stage)
        again = range(model.num_layers if layers is None else layers)
        assert found.layer_activations + found.recomputed_layer == played(model, plan, stage, again), (layers, stage)
    none = footprint.rank_memory(model, plan.changed(recompute="none"), 0)
    assert none.layer_activations == played(model, plan, 0, ())


@pytest.mark.parametrize("wrong", ["always one more", "the last layers", "a part of all"])
def test_another_law_of_the_bytes_is_off(wrong):
    """One layer more on top, as where all are computed again; the last layers, whose work comes first; k of l bytes."""
    plan = Plan(pp=4, micro_batches=6, seq=1024, recompute="full", recompute_layers=3)
    found = footprint.rank_memory(LLAMA, plan, 0)
    whole, none = (
        footprint.rank_memory(LLAMA, plan.changed(recompute=word, recompute_layers=None), 0)
        for word in ("full", "none")
    )
    right = played(LLAMA, plan, 0, range(3))
    law = {
        "always one more": found.layer_activations + whole.recomputed_layer,
        "the last layers": played(LLAMA, plan, 0, range(5, 8)),
        "a part of all": none.layer_activations * (1 - 3 / 32) + whole.layer_activations * 3 / 32,
    }[wrong]
    assert found.layer_activations + found.recomputed_layer == right
    assert law != pytest.approx(right, rel=1e-3)


def idle(p, m, forward, backward):
    """Seconds that the last stage of 1F1B waits, played event by event."""
    done, clock, turn = {}, [0.0] * p, [0] * p
    lists = []
    for stage in range(p):
        counts = {"F": 0, "B": 0}
        lists.append(
            [(each, counts.__setitem__(each, counts[each] + 1) or counts[each] - 1) for each in actions(p, stage, m)]
        )
    while any(turn[stage] < len(lists[stage]) for stage in range(p)):
        for stage in range(p):
            while turn[stage] < len(lists[stage]):
                kind, number = lists[stage][turn[stage]]
                before = (stage - 1, kind, number) if kind == "F" else (stage + 1, kind, number)
                waits = stage > 0 if kind == "F" else stage < p - 1
                if waits and before not in done:
                    break
                ready = done[before] if waits else 0.0
                clock[stage] = max(clock[stage], ready) + (forward if kind == "F" else backward)
                done[stage, kind, number] = clock[stage]
                turn[stage] += 1
    return max(clock) - m * (forward + backward)


@pytest.mark.parametrize(("tp", "layers"), [(1, 1), (1, 3), (4, 2), (4, 7)])
def test_seconds_are_those_of_the_layers_that_are_computed_again(tp, layers):
    """Of eight layers a stage: forward passes and messages by count, the bubble by a schedule that is played."""
    plan = Plan(tp=tp, pp=4, micro_batches=8, seq=4096, recompute="full")
    k = replace(FITTED, layer_host_seconds=1e-12, across_alpha_seconds=1e-12, step_host_seconds=1e-12)
    of = Machine(
        accelerator=hardware.accelerator("H100"),
        gpus=4 * tp,
        network=replace(hardware.link("InfiniBand NDR"), link_bytes_per_s=1e18),
    )
    small = replace(LLAMA, vocab=4 * tp)  # no head to speak of
    some, whole, none = (
        planner.step_time(small, plan.changed(recompute=word, recompute_layers=count), of, k)
        for word, count in (("full", layers), ("full", None), ("none", None))
    )
    forward = none.matmuls / 3 + none.attention / 3.5 + none.elementwise / 3
    assert some.recompute == pytest.approx(layers / 8 * forward)
    assert some.tensor_parallel == pytest.approx(none.tensor_parallel * (8 * 4 + layers * 2) / (8 * 4))  # all-reduces
    assert some.matmuls == whole.matmuls == none.matmuls
    assert none.total < some.total < whole.total
    if tp == 1:  # forward and backward of a micro-batch on a stage, in units of a forward pass
        busy = sum(some.parts[each] for each in ("matmuls", "attention", "elementwise", "recompute", "head")) / 8
        unit = busy / (3 + layers / 8)
        assert some.bubble == pytest.approx(idle(4, 8, unit, (2 + layers / 8) * unit), rel=0.01)
        wrong = planner.step_time(small, plan, of, k).bubble * layers / 8  # a part of the bubble with all layers
        assert wrong != pytest.approx(some.bubble, rel=0.01)


@pytest.mark.parametrize(
    ("name", "gpus", "degrees", "attention"),
    [
        ("llama2-13b", 8, {"tp": 2, "pp": 4}, "flash"), ("llama3-8b", 4, {"tp": 1, "pp": 4}, "flash"),
        ("llama3-8b", 8, {"tp": 2, "pp": 2}, "flash"), ("llama3-8b", 8, {"tp": 2, "pp": 4}, "matrix"),
    ],
)  # fmt: skip
def test_no_number_of_layers_that_fits_is_faster_than_the_best(name, gpus, degrees, attention):
    """Every plan of a mesh with every number of layers, one by one."""
    of, asked = machine(gpus), {"sequences": 32, "seq": 8192, "degrees": {"dp": 1, "cp": 1} | degrees}
    asked["like"] = Plan(attention=attention)
    asked["degrees"]["dp"] = gpus // degrees["tp"] // degrees["pp"]
    every = planner.every_plan(name, of, **asked, space=Space(recompute=("none", "selective", "full", *range(1, 20))))
    rows = [(each.seconds[row], place, row) for place, each in enumerate(every) for row in range(len(each.seconds))]

    def fits(plan):
        return planner.fit(planner.plan_memory(name, plan), of, plan=plan, model=name).has_room

    def fastest(wanted):
        found = ((seconds, every[place].plan(row)) for seconds, place, row in sorted(rows))
        return next((seconds, plan) for seconds, plan in found if wanted(plan) and fits(plan))

    best = planner.search(name, of, **asked, keep=1).best
    assert best.time.total == pytest.approx(fastest(lambda plan: True)[0])
    partly = planner.search(name, of, **asked, keep=1, space=Space(recompute=("some",))).best
    assert partly.time.total == pytest.approx(fastest(lambda plan: plan.recompute_layers)[0])
    fewer = partly.plan.recompute_layers - 1
    less = partly.plan.changed(recompute_layers=fewer or None, recompute="full" if fewer else "none")
    if attention == "matrix":  # which selective recompute does not keep
        assert best.plan.recompute == "selective"
        none = planner.search(name, of, **asked, keep=1, space=Space(recompute=("none", "some", "full"))).best
        assert none.time.total > best.time.total
    else:
        assert (best.plan == partly.plan) == (not fits(less)) == (degrees["pp"] == 4)


def test_every_number_of_layers_has_its_seconds_and_its_bound():
    for name, gpus in (("llama3-8b", 16), ("mixtral-8x7b", 16)):
        timed = planner.every_plan(name, machine(gpus), sequences=16, seq=4096, space=Space(recompute=(1, 2, 5)))
        random = np.random.default_rng(0)
        for each in random.choice(np.array(timed, dtype=object), 12):
            row = int(random.integers(len(each.seconds)))
            plan = each.plan(row)
            assert plan.recompute_layers in (1, 2, 5)
            assert each.seconds[row] == pytest.approx(planner.step_time(name, plan, machine(gpus)).total)
            assert each.least_bytes[row] <= planner.plan_memory(name, plan).total
    full = [each for each in planner.every_plan("llama3-8b", machine(16), sequences=16, seq=4096) if each.mesh.pp < 9]
    for each in full:  # what prunes the search is no more than the seconds without a recompute
        again, none = each.choices["recompute"] == "full", each.choices["recompute"] == "none"
        assert (each.without[again] <= each.seconds[none] + 1e-9).all()


def test_a_piece_has_more_layers_than_a_number_of_them_says():
    timed = planner.every_plan("llama3-8b", machine(16), sequences=16, seq=4096, space=Space(recompute=(8,)))
    plans = [each.plan(row) for each in timed for row in range(len(each.seconds))]
    assert {max(max(pieces) for pieces in plan.pieces(LLAMA)) for plan in plans} == {16, 32}  # 8 of 8 are full
    assert {plan.recompute_layers for plan in plans} == {8}
    with pytest.raises(ValueError, match="recompute must be below the 32 layers, all of which are full, not 32"):
        planner.every_plan("llama3-8b", machine(16), sequences=16, seq=4096, space=Space(recompute=(8, 32)))


def test_it_is_told_and_not_held_to_anything():
    found = planner.search(
        "llama2-13b", machine(8), sequences=32, seq=8192, degrees={"dp": 1, "tp": 2, "pp": 4}, keep=1
    )
    plan = found.best.plan
    assert (plan.recompute, plan.recompute_layers) == ("full", 1)
    assert "the first 1 layer of each stage computed again" in told.in_words(found)
    assert "1 layer" in told.row(found, found.best)
    assert "some layers computed again" in found.best.interval.regime
    assert found.best.interval.high is None
    assert "recompute" in found.best.fit.outside
    said = laws.explained(found.best.time, found.model, plan, laws.OF_TIME)
    assert "recompute 1 layer" in {each.name: each for each in said}["recompute"].number


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Plan(recompute_layers=2), r"recompute_layers must be absent with recompute=none, not 2"),
        (lambda: Plan(recompute="full", recompute_layers=0), r"recompute_layers must be at least 1, not 0"),
        (lambda: Space(recompute=(0,)), r"recompute must be some of none, selective, some, full, not 0"),
    ],
)
def test_bad_numbers_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def behind_products(compute, travel, pieces=8):
    """Seconds that messages add: each piece's leaves once it is computed, and the one before it has arrived."""
    computed = arrived = 0.0
    for _ in range(pieces):
        computed += compute / pieces
        arrived = max(arrived, computed) + travel / pieces
    return arrived - compute


@pytest.mark.parametrize(("tp", "again"), [(2, "none"), (4, "full")])
def test_messages_of_tp_travel_behind_products_in_eight_pieces(tp, again):
    of, k = machine(tp), replace(FITTED, overlap_share=1, contention_share=1e-12)
    plan = Plan(tp=tp, micro_batch=4, seq=8192, recompute=again)
    bare, hidden = (planner.step_time(LLAMA, plan.changed(tp_overlap=each), of, k) for each in (False, True))
    compute = bare.matmuls * (4 if again == "full" else 3) / 3
    assert hidden.tensor_parallel == pytest.approx(behind_products(compute, bare.tensor_parallel))
    assert hidden.tensor_parallel != pytest.approx(behind_products(compute, bare.tensor_parallel, 4), rel=0.1)
    assert hidden.total < bare.total
    seen = planner.interval(plan, LLAMA, of), planner.interval(plan.changed(tp_overlap=True), LLAMA, of, "nanotron")
    assert "messages of tp behind products" not in seen[0].unlike
    assert "messages of tp behind products" in seen[1].unlike
