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


def three_steps(model, optimizer, share):
    for step in range(3):
        optimizer.zero_grad()
        model(share(rows(step))).square().mean().backward()
        optimizer.step()


def train(wrapped):
    three_steps(wrapped, wrapped.optimizer, mine)
    return wrapped.state_dict()


def alone(loop=three_steps, make=network, optimizer=make_sgd):
    """One process: the weights after ``loop(model, optimizer, share)``, where `share` gives all rows."""
    model = fresh(make)
    loop(model, optimizer(model.parameters()), lambda x: x)
    return {name: p.detach() for name, p in model.named_parameters()}


def fresh(make=network):
    torch.manual_seed(3)
    return make()


def assert_same(results, expected, close=CLOSE):
    for weights in results:
        for name, weight in expected.items():
            assert_close(weights[name], weight, **close)


def of_shards(kind, stage):
    """`Zero` of a stage with shards of another kind."""
    return functools.partial(type("Changed", (zero.Zero,), {"shard_type": kind}), stage=stage)


def assert_as_alone(
    loop=three_steps, n=3, make=network, optimizer=make_sgd, of_stage=lambda stage: {}, close=CLOSE, **options
):
    """Raise AssertionError unless n ranks end with the weights of one process, in each stage with the options
    `of_stage`."""

    def job(stage):
        wrapped = STAGES[stage](fresh(make), optimizer, **of_stage(stage))
        loop(wrapped, wrapped.optimizer, mine)
        return wrapped.state_dict()

    assert_same(in_each_stage(job, n, **options), alone(loop, make, optimizer), close)


def a_step(loss):
    """A loop of one step on ``loss(model, share)``."""

    def loop(model, optimizer, share):
        loss(model, share).backward()
        optimizer.step()

    return loop


def fsdp2(model):
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def full(model):
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}
