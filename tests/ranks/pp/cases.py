"""Cases of a pipeline: a schedule and a model on ranks, and what one process makes of the same batches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.distributed as dist
from torch import nn

from dtlib.ranks import model as gpt
from dtlib.ranks import pp
from dtlib.theory import pp as theory

CLOSE = {"rtol": 1e-9, "atol": 1e-11}
GPT = gpt.GPTConfig(num_layers=9, hidden=8, num_heads=2, seq=5, vocab=23, dtype=torch.float64)
MODELS = {
    "tied": GPT,
    "untied": replace(GPT, tied=False),
    "llama": replace(GPT, tied=False, rotary=True, rms_norm=True, swiglu=True, biases=False, num_kv_heads=1),
}


@dataclass(frozen=True)
class Case:
    """A schedule of so many micro-batches and chunks, a model, and what is special."""

    schedule: str
    m: int
    v: int = 1
    model: str = "tied"
    recompute: bool = False
    frozen: bool = False

    def made(self, p):
        if self.schedule == "interleaved":
            return theory.interleaved(p, self.m, self.v)
        if self.schedule == "automatic":
            return theory.zb_auto(p, self.m, p + 1)
        return theory.SCHEDULES[self.schedule](p, self.m)


def fits(case, p):
    return not (case.schedule == "interleaved" and case.m % p) and not (case.schedule == "DualPipeV" and case.m < 2 * p)


def data(m):
    """Three batches; some targets do not count, most of them in the first micro-batch."""
    tokens = torch.randint(23, (3, 2 * m, 6), generator=torch.Generator().manual_seed(m))
    targets = tokens[:, :, 1:].clone()
    targets[:, 0, :4] = gpt.IGNORED
    return tokens[:, :, :-1], targets


class Again(nn.Module):
    """A layer that is gone through twice, between which one number a column is used three times."""

    def __init__(self, block):
        super().__init__()
        self.block, self.shift = block, nn.Parameter(torch.full((8,), 0.1, dtype=torch.float64))

    def forward(self, x, **where):
        x = (self.block(x, **where) + self.shift) * 2 - self.shift
        return self.block(torch.tanh(x * self.shift), **where)


def built(case):
    """The model, in which every other layer's weights are used twice: for a frozen case neither the third layer nor the
    embedding is trained."""
    model = gpt.GPT(MODELS[case.model])
    for number in range(0, len(model.blocks), 2):
        model.blocks[number] = Again(model.blocks[number])
    if case.frozen:
        model.blocks[2].requires_grad_(False)
        model.token_embedding.requires_grad_(False)
    return model


@cache
def alone(case):
    """Losses, the gradients of every step, weights: of one process, the whole batch at once."""
    model, losses, gradients = built(case), [], []
    adam = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    for x, y in zip(*data(case.m), strict=True):
        loss = gpt.next_token_loss(model(x), y)
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: each.grad.clone() for name, each in model.named_parameters() if each.requires_grad})
        adam.step()
        adam.zero_grad()
    return losses, gradients, {name: each.detach() for name, each in model.named_parameters()}


def pipeline(case, schedule, **options):
    """The model, this rank's parameters of it by their names, and its pipeline."""
    model, rank = built(case), dist.get_rank()
    stages = pp.cut(model, schedule.num_stages)
    own = {stage: stages[stage] for stage, where in enumerate(schedule.placed) if where == rank}
    mine = {id(each) for stage in own.values() for each in stage.parameters()}
    names = {name: each for name, each in model.named_parameters() if id(each) in mine}
    at_an_end = model.config.tied and rank in (schedule.placed[0], schedule.placed[-1])
    options = {"tied": model.token_embedding.weight if at_an_end else None, "recompute": case.recompute} | options
    return names, pp.Pipeline(own, schedule, width=8, dtype=torch.float64, **options)
