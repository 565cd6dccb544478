"""torch's own clipping, where a rank has a part of the gradients: refused by name on every rank, or one process's."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.testing import assert_close

from dtlib import lab
from dtlib.ranks import cp, dp, pp, sp, threed, tp, zero
from dtlib.ranks.mesh import Mesh
from dtlib.ranks.model import GPT, GPTConfig, next_token_loss
from dtlib.theory.pp import one_f_one_b, zb_h1

CONFIG = GPTConfig(num_layers=2, hidden=16, num_heads=4, seq=8, vocab=23, dtype=torch.float64)
TOKENS, TARGETS = torch.randint(23, (2, 4, 8), generator=torch.Generator().manual_seed(0))
CLOSE = {"rtol": 1e-9, "atol": 1e-11}
sgd = partial(torch.optim.SGD, lr=0.1)


def one_process():
    model = GPT(CONFIG)
    next_token_loss(model(TOKENS), TARGETS).backward()
    return get_total_norm([each.grad for each in model.parameters()])


def split_model(package):
    model = package.parallelize(GPT(CONFIG))
    tp.next_token_loss(model(TOKENS), TARGETS, vocab=23).backward()
    return model, partial(tp.clip_grad_norm, model)


def mesh_of(zero_stage, **axes):
    training = threed.Training(
        GPT(CONFIG), Mesh(axes), sgd, schedule=one_f_one_b(axes.get("pp", 1), 2), zero=zero_stage
    )
    training.backward(TOKENS, TARGETS)
    return training.parts[0], training.clip_grad_norm_


def pipeline(schedule):
    model, rank = GPT(CONFIG), dist.get_rank()
    stage, tied = pp.cut(model, 2)[rank], model.token_embedding.weight
    pipe = pp.Pipeline({rank: stage}, schedule, width=16, dtype=torch.float64, tied=tied)
    pipe.step(TOKENS, TARGETS)
    return stage, pipe.clip_grad_norm_


def wrapped_tp():
    """torch's own DDP around slices: its gradients are views of its buckets."""
    mesh = Mesh({"dp": 1, "tp": 2})
    model = torch.nn.parallel.DistributedDataParallel(
        tp.parallelize(GPT(CONFIG), mesh.group("tp")), process_group=mesh.group("dp")
    )
    tp.next_token_loss(model(TOKENS), TARGETS, vocab=23, group=mesh.group("tp")).backward()
    return model, None


REFUSED = {
    "tp": partial(split_model, tp),
    "sp": partial(split_model, sp),
    "DDP around tp": wrapped_tp,
    "threed, tp": partial(mesh_of, 0, tp=2),
    "threed, tp and a ZeRO of one rank": partial(mesh_of, 1, tp=2),
    "threed, pp": partial(mesh_of, 0, pp=2),
    "threed, pp and a ZeRO of one rank": partial(mesh_of, 1, pp=2),
    "pp": partial(pipeline, one_f_one_b(2, 2)),
    "pp, split": partial(pipeline, zb_h1(2, 2)),
}


def calls(model):
    """The gradients of a model, as training loops take their norm."""
    yield lambda: clip_grad_norm_(model.parameters(), 0.1)
    yield lambda: clip_grad_norm_(model.parameters(), 0.1, norm_type=torch.inf, foreach=False)
    yield lambda: get_total_norm([each.grad for each in model.parameters() if each.grad is not None])


def refused():
    said, norms = {}, {}
    for name, make in REFUSED.items():
        model, clip = make()
        before = [each.grad.clone() for each in model.parameters() if each.grad is not None]
        said[name] = []
        for call in calls(model):
            try:
                said[name].append(f"no error, but {call()}")
            except RuntimeError as error:
                said[name].append(str(error))
        after = [each.grad for each in model.parameters() if each.grad is not None]
        assert_close(after, before, rtol=0, atol=0)
        if clip is not None:
            norms[name] = clip(1e-3).item(), clip(math.inf).item()
    stage, _ = pipeline(one_f_one_b(2, 2))
    own = stage.blocks[0].mlp.up.weight.grad  # whole: its own norm is what it is
    assert own.norm().item() ** 2 == pytest.approx(own.square().sum().item())
    scaler = torch.amp.GradScaler("cpu")
    model, _ = split_model(tp)
    optimizer = sgd(model.parameters())
    scaler.scale(torch.ones(()))
    with pytest.raises(RuntimeError, match="a GradScaler looks for overflow in this rank's part"):
        scaler.unscale_(optimizer)
    optimizer.zero_grad(set_to_none=False)
    assert not any(each.grad.any() for each in model.parameters())
    return said, norms


def test_a_norm_of_parts_is_refused_and_the_right_one_is_one_process_s():
    for said, norms in lab.run(refused, 2):
        for name, words in said.items():
            assert all("clip, or measure with max_norm=math.inf, by clip_grad_norm_ of" in each for each in words), name
        for name, (norm, clipped) in norms.items():
            assert norm == pytest.approx(one_process().item(), rel=1e-9), name
            assert clipped == pytest.approx(1e-3, rel=1e-2), name  # 1e-6 beside the norm, as torch has it


def allowed():
    both = cp.parallelize(GPT(CONFIG))
    cp.next_token_loss(both(TOKENS), TARGETS).backward()
    wide = dp.BucketedDataParallel(GPT(CONFIG))
    mine = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    next_token_loss(wide(TOKENS[mine]), TARGETS[mine]).backward()
    group = Mesh({"dp": 2, "tp": 1}).group("tp")
    single = tp.parallelize(GPT(CONFIG), group)
    tp.next_token_loss(single(TOKENS), TARGETS, vocab=23, group=group).backward()
    return [clip_grad_norm_(each.parameters(), 1e-3) for each in (both, wide, single)]


def test_where_a_rank_has_whole_gradients_torchs_clipping_is_right():
    for norms in lab.run(allowed, 2):
        for norm in norms:
            assert_close(norm, one_process(), **CLOSE)


def zero_of_slices(stage, dp, tp_ranks):
    """ZeRO around a tensor-parallel model: its group has a part of each matrix."""
    mesh = Mesh({"dp": dp, "tp": tp_ranks})
    model = zero.Zero(tp.parallelize(GPT(CONFIG), mesh.group("tp")), sgd, stage=stage, group=mesh.group("dp"))
    mine = dist.get_rank(mesh.group("dp"))
    tokens, targets = (each.chunk(dp)[mine] for each in (TOKENS, TARGETS))
    tp.next_token_loss(model(tokens), targets, vocab=23, group=mesh.group("tp")).backward()
    return model.clip_grad_norm_(1e9)


def zero_of_a_stage(stage):
    config = replace(CONFIG, tied=stage < 2)
    training = threed.Training(GPT(config), Mesh({"pp": 2}), sgd, schedule=one_f_one_b(2, 2), zero=stage)
    training.backward(TOKENS, TARGETS)
    return training.parts[0].clip_grad_norm_(1e9)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_takes_no_norm_of_what_lies_outside_of_its_group(stage):
    for run, world_size, args in ((zero_of_slices, 2, (stage, 1, 2)), (zero_of_slices, 4, (stage, 2, 2)),
                                  (zero_of_a_stage, 2, (stage,))):  # fmt: skip
        with pytest.raises(lab.RankError, match=r"lies on ranks outside of this group as well.*threed\.Training"):
            lab.run(run, world_size, args=args)
    for norm in lab.run(zero_of_slices, 2, args=(stage, 2, 1)):
        assert_close(norm, one_process(), **CLOSE)
