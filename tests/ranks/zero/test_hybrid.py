"""Two nodes of two ranks: split inside a node, replicated across."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from dtlib import lab, theory
from dtlib.ranks import zero
from dtlib.ranks.model import GPT, GPTConfig
from dtlib.theory import hardware, models
from dtlib.theory.planner import FITTED, Machine, Plan

from .judge import ITEM, Awkward, assert_correct, make_adamw, on_a_rank
from .small import every_stage
from .test_checkpoint import go_on, wrap

NODES, PER_NODE = 2, 2
N = NODES * PER_NODE
TRAINED, FROZEN = (ITEM * sum(p.numel() for p in Awkward().parameters() if p.requires_grad == kind) for kind in (1, 0))
ACROSS = 2 * (NODES - 1) / NODES * TRAINED / PER_NODE


def two_levels():
    """This rank's node, and its peers of the same place in the other nodes."""
    inside = [dist.new_group(list(range(at, at + PER_NODE))) for at in range(0, N, PER_NODE)]
    across = [dist.new_group(list(range(at, N, PER_NODE))) for at in range(PER_NODE)]
    return {"group": inside[dist.get_rank() // PER_NODE], "replicas": across[dist.get_rank() % PER_NODE]}


def assert_right(make, stage, accumulate="no"):
    """As the judge, with what a rank of a node keeps and sends."""
    passes = 1 if accumulate == "no" else 2
    inside = theory.zero.traffic(TRAINED, PER_NODE, stage)
    gathers = inside.gather_updated + 2 * passes * (stage == 3) * (TRAINED + FROZEN) / PER_NODE
    sent = gathers + passes * (inside.reduce_scatter + ACROSS)
    for result in assert_correct(make, stage, N, accumulate=accumulate, split_over=PER_NODE, sent=sent):
        assert result["crossed"] == pytest.approx(passes * ACROSS, rel=1e-3)  # chunks of odd lengths


def hybrid(*args, stage, **options):
    return zero.Zero(*args, stage=stage, **options, **two_levels())


@every_stage
@pytest.mark.parametrize("accumulate", ["no", "sync"])
def test_equals_one_process(stage, accumulate):
    assert_right(functools.partial(hybrid, stage=stage), stage, accumulate)


SIZES = {"num_layers": 2, "hidden": 16, "num_heads": 4, "vocab": 24, "seq": 16, "tied": False}


def sent_by_gpt(stage, micro_batches):
    """Bytes of a step of float64: to the rank's own node, and to the other."""
    config = GPTConfig(**SIZES, mlp_ratio=4, dtype=torch.float64)
    model = zero.Zero(GPT(config), torch.optim.SGD, stage=stage, **two_levels())
    tokens, rank = torch.zeros(1, config.seq, dtype=torch.long), dist.get_rank()
    with lab.messages() as seen:
        for _ in range(micro_batches):
            model(tokens).square().mean().backward()
        model.optimizer.step()
    sent = [(m.peer // PER_NODE == rank // PER_NODE, m.num_bytes) for m in seen.log if m.kind == "sent"]
    return tuple(sum(size for near, size in sent if near is inside) for inside in (True, False))


@pytest.mark.parametrize("stage", [2, 3])
def test_bytes_are_those_that_the_planner_counts(stage):
    """What theirs costs by a link's rate, where nothing hides; of stage 3 inside the first layer waits twice more."""
    m, model = 3, models.gpt("two", **SIZES)
    plan = Plan(dp=4, zero=stage, shard=2, micro_batches=m, recipe="fp32")
    bare = replace(FITTED, data_hiding=0, contention_share=1e-12, inside_share=1, across_share=1)

    def counted(inside):
        card, other = hardware.accelerator("H100"), hardware.link("InfiniBand NDR")
        links = ({"link_bytes_per_s": rate} for rate in (1e6, 2e6))
        found = [
            Machine(accelerator=replace(card, link=replace(card.link, **link)), gpus=4, node=2)
            if inside else Machine(accelerator=card, gpus=4, node=2, network=replace(other, **link))
            for link in links
        ]  # fmt: skip
        slow, fast = (theory.timing.step_time(model, plan, each, bare).data_parallel for each in found)
        return 2 * (slow - fast) / (1 / 1e6 - 1 / 2e6)  # 4 bytes there, 8 here

    first = 2 * 8 * models.layer_of_rank(model, 1).total / 2 if stage == 3 else 0
    law = theory.threed.sent_bytes(model, plan, element_bytes=8)
    for inside, across in lab.run(sent_by_gpt, N, args=(stage, m)):
        assert inside == pytest.approx(counted(inside=True) - first, rel=1e-9)
        assert across == pytest.approx(counted(inside=False), rel=1e-9)
        assert inside + across == pytest.approx(law.dp, rel=1e-12)
        assert inside + across != pytest.approx(theory.threed.sent_bytes(model, plan.changed(shard=None)).dp, rel=0.1)


def test_more_crosses_from_node_to_node_without_replicas():
    full = TRAINED + FROZEN
    for result in lab.run(on_a_rank, N, args=(functools.partial(zero.Zero, stage=3), "no", PER_NODE)):
        # each rank exchanges with both ranks of the other node, a quarter of everything with each
        assert result["crossed"] == pytest.approx((TRAINED + 2 * full) / 4 * 2, rel=1e-3)
        assert result["crossed"] > 2 * ACROSS


def test_a_checkpoint_holds_each_chunk_once(tmp_path):
    def save():
        wrapped = wrap(3, **two_levels())
        go_on(wrapped, 0, 2)
        zero.save(wrapped, tmp_path)
        return wrapped.state_dict()

    expected = lab.run(save, N)[3]
    assert len({each.name.split("_")[2] for each in tmp_path.glob("0*/*.distcp")}) == PER_NODE
    merged = zero.merge(tmp_path)["module"]
    for name in ("embedding.weight", "layers.0.bias", "layers.2.weight", "head.weight"):
        assert torch.equal(merged[name], expected[name])


def averages_inside_the_node_only(*args, **options):
    return zero.Zero(*args, stage=2, **options, group=two_levels()["group"])


def starts_apart(*args, **options):
    from dtlib.ranks.shared import replicas

    replicas.broadcast = lambda tensors, group: None
    return hybrid(*args, stage=2, **options)


def divides_by_the_node_only(*args, **options):
    wrapped = hybrid(*args, stage=2, **options)
    for shard in wrapped.shards:
        shard.factor = 1 / PER_NODE
    return wrapped


@pytest.mark.parametrize("mutant", [averages_inside_the_node_only, starts_apart, divides_by_the_node_only])
def test_wrong_ones_differ(mutant):
    with pytest.raises(AssertionError, match=r"weight|norm"):
        assert_right(mutant, 2)


def test_replicas_that_cannot_be():
    def job():
        both = dist.new_group([0, 1])
        other = dist.new_group([1])
        make = functools.partial(zero.Zero, torch.nn.Linear(2, 2), make_adamw, stage=1)
        with pytest.raises(
            ValueError, match=r"replicas must share this rank alone with group, and shares \[[01]\] too"
        ):
            make(replicas=both)
        if dist.get_rank() == 0:
            with pytest.raises(ValueError, match=r"replicas must contain this rank \(0\), and does not"):
                make(replicas=other)

    lab.run(job, 2)
