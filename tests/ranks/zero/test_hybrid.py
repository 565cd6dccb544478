"""Two nodes of two ranks: split inside a node, replicated across."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from dtlib import lab, theory
from dtlib.ranks import zero
from dtlib.ranks.model import GPT, GPTConfig
from dtlib.theory import hardware, models
from dtlib.theory.planner import FITTED, Machine, Plan

from .judge import (
    BATCH,
    CLOSE,
    ITEM,
    MAX_NORM,
    STEPS,
    Awkward,
    expected_bytes,
    flats,
    groups,
    held,
    loss_of,
    make_adamw,
    single_process,
    storages,
    tensors,
    whole_batch,
)
from .small import STAGES

NODES, PER_NODE = 2, 2


def two_levels():
    """This rank's node, and its peers of the same place in the other nodes."""
    n = NODES * PER_NODE
    inside = [dist.new_group(list(range(at, at + PER_NODE))) for at in range(0, n, PER_NODE)]
    across = [dist.new_group(list(range(at, n, PER_NODE))) for at in range(PER_NODE)]
    return {"group": inside[dist.get_rank() // PER_NODE], "replicas": across[dist.get_rank() % PER_NODE]}


def node_of(rank):
    return rank // PER_NODE


def train(make, folder=None, accumulate=False):
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = Awkward()
    before = {id(s): s for s in storages(tensors())}
    wrapped = make(model, make_adamw, param_groups=groups(model), **two_levels())
    rows = slice(rank * BATCH // n, (rank + 1) * BATCH // n)
    for step in range(STEPS):
        wrapped.optimizer.zero_grad()
        tokens, targets = whole_batch(step)
        with lab.messages() as seen, lab.wire() as wire:
            for i in range(2 if accumulate else 1):
                loss = loss_of(wrapped, tokens[i, rows], targets[i, rows]) / (2 if accumulate else 1)
                loss.backward()
            norm = wrapped.clip_grad_norm_(MAX_NORM).item()
            wrapped.optimizer.step()
        del loss, tokens, targets
    if folder:
        zero.save(wrapped, folder)
    now = held(wrapped, before)
    crossed = sum(m.num_bytes for m in seen.log if m.kind == "sent" and node_of(m.peer) != node_of(rank))
    return {
        "weights": wrapped.state_dict(),
        "norm": norm,
        "held": now,
        "flats": flats(wrapped),
        "sent": wire.sent_bytes,
        "crossed": crossed,
    }


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("accumulate", [False, True])
def test_equals_one_process(stage, accumulate):
    oracle = single_process(accumulate)
    results = lab.run(train, NODES * PER_NODE, args=(STAGES[stage], None, accumulate))
    trained = ITEM * sum(p.numel() for p in Awkward().parameters() if p.requires_grad)
    frozen = ITEM * sum(p.numel() for p in Awkward().parameters() if not p.requires_grad)
    for rank, result in enumerate(results):
        for name, weight in oracle["weights"].items():
            if name not in ("seen", "calls"):
                assert_close(result["weights"][name], weight, **CLOSE, msg=lambda m, k=name: f"weight {k}: {m}")
        assert result["norm"] == pytest.approx(oracle["norms"][-1], rel=1e-9)
        expected = expected_bytes(stage, PER_NODE, rank % PER_NODE, result["flats"])  # of a node, not of all
        assert {kind: result["held"][kind] for kind in expected} == expected
        assert result["held"]["others"] < 4096
        passes = 2 if accumulate else 1
        inside = theory.zero.traffic(trained, PER_NODE, stage)
        gathers = inside.gather_updated + 2 * passes * (stage == 3) * (trained + frozen) / PER_NODE
        across = 2 * (NODES - 1) / NODES * trained / PER_NODE
        assert result["sent"] == pytest.approx(gathers + passes * (inside.reduce_scatter + across), rel=0.01)
        assert result["crossed"] == pytest.approx(passes * across, rel=1e-3)  # chunks of odd lengths


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
    sent = [(node_of(m.peer) == node_of(rank), m.num_bytes) for m in seen.log if m.kind == "sent"]
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
    for inside, across in lab.run(sent_by_gpt, NODES * PER_NODE, args=(stage, m)):
        assert inside == pytest.approx(counted(inside=True) - first, rel=1e-9)
        assert across == pytest.approx(counted(inside=False), rel=1e-9)
        assert inside + across == pytest.approx(law.dp, rel=1e-12)
        assert inside + across != pytest.approx(theory.threed.sent_bytes(model, plan.changed(shard=None)).dp, rel=0.1)


def test_less_crosses_from_node_to_node_than_without_replicas():
    def everywhere(*args, group, replicas, **kwargs):
        return zero.Zero(*args, **kwargs, stage=3)

    n = NODES * PER_NODE
    hybrid = lab.run(train, n, args=(STAGES[3],))
    plain = lab.run(train, n, args=(everywhere,))
    full = ITEM * sum(p.numel() for p in Awkward().parameters())
    trained = ITEM * sum(p.numel() for p in Awkward().parameters() if p.requires_grad)
    for one, other in zip(hybrid, plain, strict=True):
        # each rank exchanges with both ranks of the other node, a quarter of everything with each
        assert other["crossed"] == pytest.approx((trained + 2 * full) / 4 * 2, rel=1e-3)
        assert one["crossed"] == pytest.approx(trained / 2, rel=1e-3)


def test_a_checkpoint_holds_each_chunk_once(tmp_path):
    expected = lab.run(train, NODES * PER_NODE, args=(STAGES[3], str(tmp_path)))[3]["weights"]
    assert len({each.name.split("_")[2] for each in tmp_path.glob("0*/*.distcp")}) == PER_NODE
    merged = zero.merge(tmp_path)["module"]
    for name in ("embedding.weight", "layers.0.bias", "layers.2.weight", "head.weight"):
        assert torch.equal(merged[name], expected[name])


def averages_inside_the_node_only(*args, replicas, **kwargs):
    return zero.Zero(*args, stage=3, **kwargs)


def starts_apart(*args, **kwargs):
    from dtlib.ranks.shared import replicas

    replicas.broadcast = lambda tensors, group: None
    return zero.Zero(*args, stage=2, **kwargs)


def divides_by_the_node_only(*args, **kwargs):
    wrapped = zero.Zero(*args, stage=2, **kwargs)
    for shard in wrapped.shards:
        shard.factor = 1 / PER_NODE
    return wrapped


@pytest.mark.parametrize("mutant", [averages_inside_the_node_only, starts_apart, divides_by_the_node_only])
def test_wrong_ones_differ(mutant):
    oracle = single_process(False)
    ours = lab.run(train, NODES * PER_NODE, args=(mutant,))
    wrong = [
        not torch.allclose(result["weights"]["layers.0.weight"], oracle["weights"]["layers.0.weight"], **CLOSE)
        for result in ours
    ]
    off = [result["norm"] != pytest.approx(oracle["norms"][-1], rel=1e-9) for result in ours]
    assert any(wrong) or all(off)


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
