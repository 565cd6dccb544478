"""Mistakes of the casebook that people make with this library, each refused by name before a number can be wrong."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dtlib import lab
from dtlib.ranks import asynchrony, dp, ep, mtp, pp, sp, tp, zero
from dtlib.ranks.model import GPT, GPTConfig, next_token_loss
from dtlib.theory.pp import SCHEDULES

N = 2
CONFIG = GPTConfig(vocab=16, hidden=12, num_layers=2, num_heads=4, seq=8, dtype=torch.float64)
EXPERTS = GPTConfig(vocab=16, hidden=12, num_layers=2, num_heads=4, seq=8, dtype=torch.float64, num_experts=4)
TOKENS = torch.randint(16, (2, 8, 8), generator=torch.Generator().manual_seed(3))
SGD = functools.partial(torch.optim.SGD, lr=0.1)


def local(model):
    return asynchrony.LocalSGD(model, SGD(model.parameters()), local_steps=1)


def served(model):
    if dist.get_rank():
        asynchrony.work(model, lambda step: next(model.parameters()).sum(), steps=1)
    else:
        asynchrony.serve(model, SGD, updates=1)


def zero_2(model):
    return zero.Zero(model, SGD, stage=2)


MEETS = {"dp": dp.BucketedDataParallel, "flat": dp.FlatDataParallel, "zero": zero_2, "local": local,
         "gossip": asynchrony.Gossip, "served": served}  # fmt: skip


def sliced(meets, cut=tp):
    """Ranks with other slices of one weight (overwritten, and averaged with what is not the same)."""
    meets(cut.parallelize(GPT(CONFIG)))


def experts(meets):
    meets(ep.parallelize(GPT(EXPERTS)))


def changed(meets, replaced):
    """Trained after it was wrapped, or another one than was wrapped: nobody averages it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(replaced)
    met = meets(model)
    model[0].requires_grad_(True)
    if replaced:
        model[0].weight = nn.Parameter(torch.ones(4, 4))
    model(torch.ones(1, 4)).sum().backward()
    met.mix() if isinstance(met, asynchrony.Gossip) else met.step()


def tied_apart():
    """Two copies of an embedding that were drawn apart."""
    model = GPT(CONFIG, seed=dist.get_rank())
    stage = {dist.get_rank(): pp.cut(model, N)[dist.get_rank()]}
    tied = model.token_embedding.weight
    pipe = pp.Pipeline(stage, SCHEDULES["1F1B"](N, 2), width=12, dtype=torch.float64, tied=tied)
    pipe.step(*TOKENS)


def stages_averaged():
    """Stages of one shape, wrapped over the ranks of the pipeline."""
    stage = {dist.get_rank(): dp.FlatDataParallel(nn.Linear(12, 12))}
    pp.Pipeline(stage, SCHEDULES["1F1B"](N, 2), width=12)


def whole_logits():
    tp.next_token_loss(torch.zeros(8, 8, 16), TOKENS[1], vocab=16)


def norm_of(model, loss):
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def norm_of_slices(cut):
    model = cut.parallelize(GPT(CONFIG))
    norm_of(model, cut.next_token_loss(model(TOKENS[0]), TOKENS[1], vocab=16))


def norm_of_experts():
    model = ep.parallelize(GPT(EXPERTS))
    norm_of(model, next_token_loss(model(TOKENS[0]), TOKENS[1]))


def norm_of_heads():
    heads = mtp.parallelize(mtp.SequentialModules(GPT(CONFIG), 2))
    norm_of(heads, heads(*TOKENS))


def norm_of_chunks():
    model = zero_2(GPT(CONFIG))
    norm_of(model, next_token_loss(model(TOKENS[0]), TOKENS[1]))


SLICES, OWN, LATE = "group must be of ranks that have the same slice", "belongs to some of its ranks", "changed after"
NORM = "this is a rank's part of a gradient, and its norm is not the gradient's"
REFUSED = {
    **{f"overwritten: {name}": (functools.partial(sliced, each), SLICES) for name, each in MEETS.items()},
    "overwritten: sp": (functools.partial(sliced, dp.NaiveDataParallel, sp), SLICES),
    **{f"ep-times: {name}": (functools.partial(experts, MEETS[name]), OWN) for name in ("local", "gossip", "served")},
    **{f"unfrozen: {name}, {replaced}": (functools.partial(changed, MEETS[name], replaced), LATE)
       for name in ("local", "gossip") for replaced in (False, True)},
    "replicas: tied": (tied_apart, "tied must be alike on all ranks"),
    "replicas: stages": (stages_averaged, "stages must be wrapped over ranks that have the same one"),
    "log-t": (whole_logits, "logits_bsv must be of shape (b, s, 8)"),
    "copies: tp": (functools.partial(norm_of_slices, tp), NORM),
    "copies: sp": (functools.partial(norm_of_slices, sp), NORM),
    "copies: mtp": (norm_of_heads, NORM),
    "experts-out": (norm_of_experts, NORM),
    "shard": (norm_of_chunks, NORM),
}  # fmt: skip


def attempts():
    said = {}
    for name, (attempt, _) in REFUSED.items():
        try:
            attempt()
        except (ValueError, RuntimeError) as error:
            said[name] = str(error)
    return said


@functools.cache
def found():
    return lab.run(attempts, N)


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_by_name_on_every_rank(name):
    for said in found():
        assert REFUSED[name][1] in said.get(name, "not refused")
