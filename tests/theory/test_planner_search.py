"""What the planner looks at: a part of it is a part, bounds leave out no plan that fits, and refusals say what is."""

import math
from dataclasses import replace

import numpy as np
import pytest

from dtlib.cli import told
from dtlib.theory import hardware, planner
from dtlib.theory.planner import Machine, Plan, Space
from dtlib.theory.units import GiB

ASKED = {"sequences": 64, "seq": 4096}


def eight(gpus=16, **sizes):
    return Machine(accelerator=hardware.accelerator("H100"), gpus=gpus, **sizes)


def plans(timed):
    return [each.plan(row) for each in timed for row in range(len(each.seconds))]


@pytest.mark.parametrize(
    ("space", "stays"),
    [
        (Space(zero=(1, 3)), lambda plan: plan.zero in (1, 3) or plan.dp * plan.cp == 1),
        (Space(schedule=("ZB-H1",)), lambda plan: plan.schedule == "ZB-H1" or plan.pp == 1),
        (Space(recompute=("full",)), lambda plan: plan.recompute == "full"),
        (Space(sequence_parallel=("keep",)), lambda plan: plan.keep_gathered or plan.tp == 1),
        (
            Space(zero=(2,), schedule=("1F1B", "interleaved"), sequence_parallel=("none", "again")),
            lambda plan: plan.zero in (0, 2) and plan.schedule != "ZB-H1" and not plan.keep_gathered,
        ),
    ],
)
def test_a_part_of_the_choices_leaves_those_plans_and_no_others(space, stays):
    def of_one_rank(plan):  # where there is nothing to shard, the stage's name is any of those asked for
        return replace(plan, zero=0) if plan.dp * plan.cp == 1 else plan

    every = plans(planner.every_plan("llama3-8b", eight(), **ASKED))
    some = plans(planner.every_plan("llama3-8b", eight(), **ASKED, space=space))
    wanted = {of_one_rank(plan) for plan in every if stays(plan)}
    if space.zero == (2,):
        wanted = {plan for plan in wanted if plan.zero == 2 or plan.dp * plan.cp == 1}
    assert {of_one_rank(plan) for plan in some} == wanted
    assert 0 < len(some) < len(every)


def test_nothing_is_left_out_by_the_bound_that_a_card_has_room_for():
    """Seconds of what was not timed are infinite; what was is as without a bound, and holds all plans that fit."""
    limit = 40 * GiB
    free = planner.every_plan("llama3-8b", eight(), **ASKED)
    bound = planner.every_plan("llama3-8b", eight(), **ASKED, most_bytes=limit)
    timed, left = 0, 0
    for one, other in zip(free, bound, strict=True):
        maybe = np.isfinite(other.seconds)
        assert (one.least_bytes[~maybe] > limit).all()
        np.testing.assert_allclose(other.seconds[maybe], one.seconds[maybe], rtol=1e-12)
        timed, left = timed + maybe.sum(), left + (~maybe).sum()
    assert timed > 100
    assert left > 100
    random = np.random.default_rng(0)
    gone = [plan for each in bound for plan in map(each.plan, np.flatnonzero(np.isinf(each.seconds)))]
    for index in random.integers(0, len(gone), 40):
        assert planner.plan_memory("llama3-8b", gone[index]).total > limit


def test_the_best_of_a_part_is_the_best_of_all_in_it():
    free = planner.search("llama3-8b", eight(), **ASKED, keep=1)
    p = free.best.plan
    same = Space(zero=(p.zero,), schedule=(p.schedule,), recompute=(p.recompute,))
    assert planner.search("llama3-8b", eight(), **ASKED, keep=1, space=same).best == free.best
    other = Space(recompute=("full" if p.recompute == "none" else "none",))
    assert planner.search("llama3-8b", eight(), **ASKED, keep=1, space=other).best.time.total > free.best.time.total


def test_what_does_not_fit_since_a_choice_is_held_is_told_with_that():
    """The same degrees first, then the same choices with other degrees."""
    copies, whole = {"degrees": {"dp": 64}, "sequences": 64, "seq": 8192}, Space(zero=(0,))
    assert planner.search("llama2-13b", eight(64), **copies, keep=1).best.plan.zero > 0
    with pytest.raises(ValueError, match=r"no plan .* fits .*; without zero held fixed others do \(dp 64, tp 1"):
        planner.search("llama2-13b", eight(64), **copies, space=whole)
    alone = {"degrees": {"tp": 1, "cp": 1}, "sequences": 128, "seq": 2**17}
    with pytest.raises(ValueError, match=r"ZeRO \d, recompute full\); other degrees do \(dp"):
        planner.search("llama3-70b", eight(128), **alone, space=Space(recompute=("full",)))


def test_plans_that_nothing_tells_apart_tie_and_the_simplest_stands_first():
    """Without an interval times within 2 % tie, with one those whose intervals overlap; `plans` stay by time."""
    found = planner.search("llama3-70b", eight(128), sequences=512)
    a, b = found.plans[:2]
    known, none = a.interval, replace(a.interval, low=None, high=None)
    for off, ratio, tie in (
        ((None, None), 1.019, True), ((None, None), 1.021, False), ((0.9, 1.1), 1.2, True), ((0.9, 1.1), 1.23, False),
    ):  # fmt: skip

        def like(each, seconds, off=off):
            low, high = (None if share is None else share * seconds for share in off)
            time = replace(each.time, **dict.fromkeys(each.time.parts, 0) | {"matmuls": seconds})
            return replace(each, time=time, interval=replace(known, low=low, high=high))

        assert like(a, 10.0).ties(like(b, 10.0 * ratio)) == tie, (off, ratio)
    one_axis = replace(b, plan=Plan(dp=128, zero=3), interval=none)
    staged = replace(b, plan=Plan(dp=64, pp=2), interval=none)
    rarer = replace(staged, plan=Plan(dp=64, pp=2, schedule="ZB-H1", micro_batches=2))
    far = replace(one_axis, time=replace(b.time, matmuls=2 * b.time.matmuls))
    plans = (replace(rarer, time=a.time), staged, one_axis, far)
    answer = replace(found, plans=plans, simpler=None)
    assert b.time.total < 1.02 * a.time.total
    assert answer.best is plans[0]
    assert answer.shown == (one_axis, staged, plans[0], far)
    assert answer.tied == answer.shown[:3]
    marks = [told.row(answer, each)[-1] for each in answer.shown]
    assert marks == ["≈", "≈", "≈", "≟"]
    said = " ".join(told.sentences(answer))
    assert "The first 3 are a tie (≈), since no time is known to 2%; the simplest of them stands first: dp 128" in said
    held = replace(staged, interval=replace(known, low=0.9 * a.time.total, high=1.1 * a.time.total))
    mixed = replace(found, plans=(replace(one_axis, time=a.time), held), simpler=None)
    assert mixed.tied == (held, mixed.best)  # one axis and the faster, but nothing holds its time
    said = " ".join(told.sentences(mixed))
    assert "the simplest of those whose time runs hold stands first: dp 64, tp 1, pp 2" in said
    alone = replace(found, plans=(a, far), simpler=None)
    assert [told.row(alone, each)[-1] for each in alone.shown] == ["", "≟"]
    said = " ".join(told.sentences(alone))
    assert "a tie" not in said
    whose = "the fastest plan has" if a.interval.high is None else "they have"
    assert f"Whether the plans marked ≟ are slower is unknown: {whose} no interval." in said
    sure = [replace(each, interval=replace(known, low=each.time.total, high=each.time.total)) for each in (a, far)]
    surely = replace(found, plans=tuple(sure), simpler=None)
    assert [told.row(surely, each)[-1] for each in surely.shown] == ["", ""]
    assert "≟" not in " ".join(told.sentences(surely))


@pytest.mark.parametrize("name", ["llama3-70b", "llama3-8b"])
def test_the_simplest_that_ties_is_found_among_all_plans(name):
    """Every plan within 2 % of the fastest, one by one: none that fits is simpler than the first that is shown."""
    machine, asked = eight(128), {"sequences": 512, "seq": 4096}
    found = planner.search(name, machine, **asked, keep=3)
    usable = machine.accelerator.memory_bytes / (1 + found.constants.margin)
    near = {
        planner.answer.effort(plan, plan.schedule): plan
        for each in planner.every_plan(name, machine, **asked, most_bytes=usable)
        for plan in map(each.plan, np.flatnonzero(each.seconds < 1.02 * found.best.time.total))
        if planner.fit(planner.plan_memory(name, plan), machine, plan=plan, model=name).has_room
    }
    first = found.shown[0]
    assert planner.answer.effort(first.plan, first.plan.schedule) == min(near)
    assert found.best.time.total <= first.time.total < 1.02 * found.best.time.total
    assert (found.simpler is None) or found.simpler == first


def test_intervals_are_those_of_the_frameworks_runs_scaled_by_other_constants():
    asked = {**ASKED, "degrees": {"pp": 1, "cp": 1}, "keep": 1}
    free = planner.search("llama3-8b", eight(), framework="nanotron", **asked).best
    off = planner.interval(free.plan, "llama3-8b", eight(), "nanotron")
    assert free.interval == off
    slower = replace(planner.profile("nanotron"), matmul_share=0.5, kept_passes=3)
    same = {"dp": free.plan.dp, "tp": free.plan.tp, "pp": 1, "cp": 1}
    other = planner.search(
        "llama3-8b", eight(), framework="nanotron", constants=slower, **asked | {"degrees": same}
    ).best
    assert other.interval.high / other.time.total == pytest.approx(off.high / free.time.total)
    unlike = planner.search("llama3-8b", eight(), **ASKED, degrees={"cp": 2}, keep=1).best
    assert unlike.interval.high is None
    assert "not held to anything like this: " in told.of_interval(unlike)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Space(zero=(4,)), r"zero must be some of 0, 1, 2, 3, not 4"),
        (lambda: Space(schedule=()), r"schedule must be some of 1F1B, interleaved, ZB-H1, not none of them"),
        (lambda: Space(recompute=("core",)), r"recompute must be some of none, selective, some, full, not core"),
        (lambda: Space(sequence_parallel=("yes",)), r"sequence_parallel must be some of none, again, keep, not yes"),
        (
            lambda: planner.search("llama3-8b", eight(), sequences=3, degrees={"dp": 1, "tp": 2, "cp": 1},
                                   space=Space(schedule=("interleaved",))),
            r"schedule=interleaved does not go together with gpus=16, the degrees and the batch",
        ),
    ],
)  # fmt: skip
def test_bad_choices_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_a_bound_of_nothing_times_nothing():
    timed = planner.every_plan("llama3-8b", eight(), **ASKED, most_bytes=0)
    assert all(math.isinf(second) for each in timed for second in each.seconds)
