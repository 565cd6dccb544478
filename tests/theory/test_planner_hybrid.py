"""States that are split among some of the ranks that share them: bytes, seconds and where the search finds them."""

from dataclasses import replace
from itertools import product
from unittest import mock

import numpy as np
import pytest

from dtlib.cli import told
from dtlib.theory import footprint, hardware, models, planner, zero
from dtlib.theory.hardware import Link
from dtlib.theory.memory import recipe
from dtlib.theory.planner import FITTED, Machine, Plan, Space, laws
from dtlib.theory.units import GB

LLAMA = models.model("llama3-8b")
BARE = replace(FITTED, data_hiding=0, contention_share=1e-12, inside_share=1, across_share=1)
"""Constants under which nothing hides a message and a link reaches its rate."""

SLOW = Link("a slow network", 5 * GB, "made up")


def machine(gpus=32, node=8, network=SLOW):
    return Machine(accelerator=hardware.accelerator("H100"), gpus=gpus, node=node, network=network)


def played(plan, of, k=BARE):
    """Seconds of all messages of a step, round by round: rings inside a group, then of each shard over the groups."""
    n, q = plan.size("dp", "cp"), plan.shard
    width, psi = recipe(plan.recipe).per_param, models.model_parameters(LLAMA).total
    inside, across = of.accelerator.link.link_bytes_per_s, of.network.link_bytes_per_s

    def ring(ranks, size, rate, alpha):
        return sum(alpha + size / ranks / rate for _ in range(ranks - 1))

    def collective(params, bytes_each, messages, *, copies):
        size, spent = params * bytes_each / messages, 0.0
        for _ in range(messages):
            spent += ring(q, size, inside, 5e-6)
            spent += sum(ring(n // q, size / q, across, k.across_alpha_seconds) for _ in range(2 * copies))
        return spent

    messages = LLAMA.num_layers if plan.zero == 3 else 1
    reduces = plan.micro_batches if plan.zero > 1 else 1
    spent = reduces * collective(psi, width.gradients, messages, copies=1)
    layer = models.layer_of_rank(LLAMA, 1).total
    if plan.zero == 3:  # of each micro-batch twice; the first layer of each pass waits for its own
        spent += 2 * plan.micro_batches * collective(psi, width.weights, messages, copies=0)
        return spent + 2 * collective(layer, width.weights, 1, copies=0)
    return spent + collective(psi, width.weights, 1, copies=0)


@pytest.mark.parametrize(("stage", "shard", "m"), [*product((1, 2, 3), (2, 8), (1, 3))])
def test_seconds_are_those_of_messages_played_one_by_one(stage, shard, m):
    plan = Plan(dp=32, zero=stage, shard=shard, micro_batches=m)
    of = machine(node=shard)
    assert planner.step_time(LLAMA, plan, of, BARE).data_parallel == pytest.approx(played(plan, of), rel=1e-9)


def no_copies(of, plan, shares):
    return of.shards(plan.changed(dp=1, cp=1, zero=0, shard=None), shares)


def whole_gradients(of, plan, shares):
    """The all-reduce of everything over the groups, as without shards: q times as many bytes."""
    group = of._cluster(plan.size("dp", "cp") // plan.shards, 1, shares)
    return replace(group, across_bytes_per_s=group.across_bytes_per_s / plan.shards)


@pytest.mark.parametrize("mutant", [no_copies, whole_gradients])
def test_a_law_without_the_copies_or_of_whole_gradients_is_off(mutant):
    plan, of = Plan(dp=32, zero=3, shard=8, micro_batches=2), machine()
    with mock.patch.object(Machine, "shard_copies", mutant):
        assert planner.step_time(LLAMA, plan, of, BARE).data_parallel != pytest.approx(played(plan, of), rel=0.05)


def test_bytes_of_the_planner_are_those_of_the_law():
    """What a slower link costs is the bytes on it: `zero.hybrid_traffic` counts those inside and across."""
    psi = models.model_parameters(LLAMA).total
    for stage, shard in product((2, 3), (2, 4, 8)):
        plan = Plan(dp=32, zero=stage, shard=shard, recipe="16-byte")
        seconds = [
            planner.step_time(LLAMA, plan, machine(network=replace(SLOW, link_bytes_per_s=rate)), BARE).data_parallel
            for rate in (2 * GB, 4 * GB)
        ]
        across = (seconds[0] - seconds[1]) / (1 / (2 * GB) - 1 / (4 * GB))
        law = zero.hybrid_traffic(2 * psi, 32, shard, stage)
        if shard == 8:
            assert across == pytest.approx(law.across_nodes)
            said = {each.name: each for each in _explained(plan)}["data parallel"]
            assert said.formula == "zero.hybrid_traffic"
            assert f"{law.within_node / psi:.3g} bytes a parameter of a rank in its group" in said.number
        else:  # groups of the same node exchange inside it first
            assert across < law.across_nodes


def _explained(plan):
    return laws.explained(planner.step_time(LLAMA, plan, machine()), LLAMA, plan, laws.OF_TIME)


def test_each_group_holds_a_copy_of_all_states():
    """18 bytes a parameter, once in each of four groups; a rank's modules are whole for a moment as without groups."""
    psi = models.model_parameters(LLAMA).total
    for stage in (1, 2, 3):
        hybrid, small, all_of = (
            Plan(dp=dp, zero=stage, shard=shard, recipe="18-byte") for dp, shard in ((32, 8), (8, None), (32, None))
        )
        kept, alone, wide = (footprint.rank_memory(LLAMA, plan) for plan in (hybrid, small, all_of))
        assert kept == alone
        assert kept.states > wide.states
        assert kept.transient == wide.transient
        if stage == 3:
            assert 32 * kept.states == pytest.approx(4 * 18 * psi)
    experts = models.model("mixtral-8x7b")
    cut = Plan(dp=32, ep=4, zero=3, shard=8, recipe="18-byte")
    assert 32 * footprint.rank_states(experts, cut, 0).total == pytest.approx(
        4 * 18 * models.model_parameters(experts).total
    )


@pytest.mark.parametrize(
    ("dp", "cp", "tp", "ep"), [(16, 1, 1, 1), (8, 2, 2, 1), (16, 1, 4, 2), (8, 2, 1, 4), (6, 1, 4, 1)]
)
def test_groups_lie_where_the_order_of_the_ranks_puts_them(dp, cp, tp, ep):
    """Rank = ((d · cp) + c) · tp + t in nodes of 8: group and copies of rank 0, the nodes that they touch."""
    of, ranks = machine(dp * cp * tp), dp * cp
    near = of.near(Plan(dp=dp, cp=cp, tp=tp, ep=ep))
    fits = [q for q in range(2, ranks) if ranks % q == 0 and q * tp <= 8 and q % (ep * cp if ep > 1 else 1) == 0]
    assert near == max(fits, default=0)
    for shard in fits:
        plan = Plan(dp=dp, cp=cp, tp=tp, ep=ep, zero=3, shard=shard)
        group, copies = of.shards(plan, (1, 1, 0)), of.shard_copies(plan, (1, 1, 0))
        assert (group.world_size, group.num_nodes) == (shard, len({each * tp // 8 for each in range(shard)}))
        nodes = [each * tp // 8 for each in range(0, ranks, shard)]
        assert (copies.world_size, copies.num_nodes) == (len(nodes), len(set(nodes)))
        if ep > 1:
            mine = [rank for rank in range(shard) if rank // cp % ep == 0]
            assert of.expert_copies(plan, (1, 1, 0)).world_size == len(mine) == plan.expert_copies


def test_the_search_finds_them_where_the_network_is_slow():
    """Every plan of dp alone, one by one; and where the ranks of dp are in one node there is no such plan."""
    asked = {"sequences": 64, "seq": 4096, "recipe": "16-byte", "degrees": {"tp": 1, "pp": 1, "cp": 1}}
    asked["space"] = Space(recompute=("none", "full"))
    of = machine()
    best = planner.search(LLAMA, of, **asked, keep=1).best
    assert (best.plan.zero, best.plan.shard) == (3, 8)
    seconds = []
    for stage, shard, b, again in product(range(4), (None, 8), (1, 2), ("none", "full")):
        if shard is None or stage > 1:
            plan = Plan(dp=32, zero=stage, shard=shard, micro_batch=b, micro_batches=2 // b, seq=4096, recompute=again,
                        recipe="16-byte")  # fmt: skip
            if planner.fit(planner.plan_memory(LLAMA, plan), of, plan=plan, model=LLAMA).has_room:
                seconds.append(planner.step_time(LLAMA, plan, of).total)
    assert best.time.total == pytest.approx(min(seconds))
    assert best.interval.unlike == (best.interval.regime,)
    assert "hybrid shards" in best.interval.regime
    assert "hybrid shards" in best.fit.outside
    assert "ZeRO 3 among 8 ranks each (hybrid)" in told.in_words(planner.search(LLAMA, of, **asked, keep=1))
    inside = planner.every_plan(LLAMA, machine(8, network=SLOW), sequences=64, seq=4096)
    assert all((each.choices["shard"] == 0).all() for each in inside)


@pytest.mark.parametrize(
    ("words", "found"),
    [(("node",), {8}), (("all",), {None}), ((4,), {4}), (("all", 32), {None}), ((32,), {None}), ((4, "node"), {4, 8})],
)
def test_what_is_asked_for_is_what_is_looked_at(words, found):
    asked = {"sequences": 64, "seq": 4096, "degrees": {"tp": 1, "pp": 1, "cp": 1}}
    timed = planner.every_plan(LLAMA, machine(), **asked, space=Space(shard=words))
    plans = [each.plan(row) for each in timed for row in range(len(each.seconds))]
    assert {plan.shard for plan in plans} == found
    assert 0 not in {plan.zero for plan in plans} or "all" in words
    for plan in np.random.default_rng(0).choice(plans, 3):
        at = next(each for each in timed if plan in [each.plan(row) for row in range(len(each.seconds))])
        row = [at.plan(each) for each in range(len(at.seconds))].index(plan)
        assert at.seconds[row] == pytest.approx(planner.step_time(LLAMA, plan, machine()).total)
        assert at.least_bytes[row] <= planner.plan_memory(LLAMA, plan).total


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Plan(dp=8, zero=3, shard=3), r"shard must divide dp·cp=8, whose ranks share the states; 3 does not"),
        (lambda: Plan(dp=8, zero=3, shard=0), r"shard must be at least 1, not 0"),
        (lambda: Plan(dp=8, zero=1, shard=1), r"shard must be at least 2, not 1: a rank alone shares no states"),
        (lambda: Plan(dp=8, shard=4), r"shard must be absent with zero=0, which splits no states, not 4"),
        (lambda: Plan(dp=8, ep=4, zero=3, shard=2), r"shard must be a multiple of ep·cp=4, .* not 2"),
        (lambda: Space(shard=("nodes",)), r"shard must be some of all, node, not nodes"),
        (lambda: Space(shard=(0,)), r"shard must be some of all, node, not 0"),
    ],
)
def test_bad_groups_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
