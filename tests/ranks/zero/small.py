"""Small networks in float64, trained on ranks and alone."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close

from dtlib import lab
from dtlib.ranks import zero

STAGES = {stage: functools.partial(zero.Zero, stage=stage) for stage in (1, 2, 3)}
make_sgd = functools.partial(torch.optim.SGD, lr=0.1)
CLOSE = {"rtol": 1e-9, "atol": 1e-9}  # float64, as in the judge
every_stage = pytest.mark.parametrize("stage", STAGES)


def in_each_stage(job, n, **options):
    """``job(stage)`` in one start of n ranks: what each rank returned in stage 1, then in 2 and in 3."""

    def jobs():
        found = []
        for stage in STAGES:
            try:
                found.append(job(stage))
            except BaseException as error:
                error.add_note(f"in stage {stage}")
                raise
        return found

    return [each for found in zip(*lab.run(jobs, n, **options), strict=True) for each in found]


def network(width=8):
    layers = [nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)]
    return nn.Sequential(*layers).double()


def rows(step, width=8):
    return torch.randn(12, width, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def mine(batch):
    rank, n = dist.get_rank(), dist.get_world_size()
    return batch[rank * len(batch) // n : (rank + 1) * len(batch) // n]


def train_alone(model, optimizer, steps=3):
    for step in range(steps):
        optimizer.zero_grad()
        model(rows(step)).square().mean().backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def train(wrapped, steps=3):
    for step in range(steps):
        wrapped.optimizer.zero_grad()
        wrapped(mine(rows(step))).square().mean().backward()
        wrapped.optimizer.step()
    return wrapped.state_dict()


def fresh(make=network):
    torch.manual_seed(3)
    return make()


def assert_same(results, expected):
    for weights in results:
        for name, weight in expected.items():
            assert_close(weights[name], weight, **CLOSE)


def stepped(model, loss, optimizer=make_sgd):
    """One process: the weights after a step on `loss`."""
    optimizer = optimizer(model.parameters())
    loss(model).backward()
    optimizer.step()
    return dict(model.named_parameters())


def fsdp2(model):
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def full(model):
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}
