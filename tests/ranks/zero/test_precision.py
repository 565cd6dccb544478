"""bfloat16 weights with a float32 copy for the optimizer, and dtypes side by side."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

from dtlib import lab
from dtlib.ranks import zero
from dtlib.ranks.model import GPT, GPTConfig, batches, load_text, next_token_loss

from .small import STAGES, in_each_stage

CONFIG = GPTConfig(num_layers=2, hidden=48, dtype=torch.bfloat16)
make_adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
BATCH, STEPS = 12, 3


def one_process():
    """The 16-byte recipe by hand: bf16 weights and gradients, float32 master copy and moments."""
    model = GPT(CONFIG, seed=3)
    params = list(model.parameters())
    masters = [nn.Parameter(p.detach().float()) for p in params]
    optimizer = make_adamw(masters)
    data = batches(load_text(), batch=BATCH, seq=8)
    for _ in range(STEPS):
        tokens, targets = next(data)
        grads = torch.autograd.grad(next_token_loss(model(tokens), targets), params)
        for master, grad in zip(masters, grads, strict=True):
            master.grad = grad.float()
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(params, masters, strict=True):
                p.copy_(master)
    return dict(zip((name for name, _ in model.named_parameters()), masters, strict=True))


def train(stage, steps=STEPS):
    rank, n = dist.get_rank(), dist.get_world_size()
    data = batches(load_text(), batch=BATCH, seq=8, rank=rank, world_size=n)
    wrapped = STAGES[stage](GPT(CONFIG, seed=3 + rank), make_adamw, master_dtype=torch.float32)
    for _ in range(steps):
        wrapped.optimizer.zero_grad()
        tokens, targets = next(data)
        with lab.wire() as wire:
            next_token_loss(wrapped(tokens), targets).backward()
            wrapped.optimizer.step()
    return wrapped, wire.sent_bytes


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("n", [1, 3])
def test_equals_one_process_with_a_master_copy(tmp_path, stage, n):
    def job():
        wrapped, sent = train(stage)
        zero.save(wrapped, str(tmp_path))
        return wrapped.state_dict(), sent

    results = lab.run(job, n)
    masters = zero.merge(tmp_path)["module"]  # a checkpoint holds the master copy
    expected = one_process()
    # The gradient of a rank is rounded to bf16 twice, at the end of backward and after 1/N: a relative 2⁻⁸ of the
    # largest terms. AdamW's first steps have the size of the learning rate whatever the gradient's, and its sign may
    # turn where terms cancel (they do in the biases of the keys, which have no effect). So most weights agree within a
    # tenth of the steps, and none is off by more than twice what these can move.
    distance = torch.cat([(masters[name] - weight).abs().flatten() for name, weight in expected.items()])
    assert distance.max() <= 2 * STEPS * 1e-3
    assert (distance <= STEPS * 1e-4).double().mean() >= 0.95
    for _, sent in results:  # of the last step, in 16 bits
        assert sent == pytest.approx((3 if stage == 3 else 2) * (n - 1) / n * 2 * CONFIG.num_params, rel=0.01)
    for name in expected:
        for weights, _ in results:
            assert_close(weights[name], masters[name].bfloat16(), rtol=0, atol=0)  # rounded, and alike on all ranks


@pytest.mark.parametrize("stage", STAGES)
def test_a_master_copy_keeps_what_bf16_would_lose(stage):
    """A hundred steps of 2⁻¹⁰ from 1: bf16 alone, whose neighbour of 1 is 1 + 2⁻⁷, never moves."""

    def job(master_dtype):
        model = nn.Linear(3, 2, bias=False, dtype=torch.bfloat16)
        nn.init.ones_(model.weight)
        wrapped = STAGES[stage](model, functools.partial(torch.optim.SGD, lr=2**-10), master_dtype=master_dtype)
        for _ in range(100):
            wrapped.optimizer.zero_grad()
            wrapped(-torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
            wrapped.optimizer.step()
        return wrapped.state_dict()["weight"].float().unique().tolist()

    assert lab.run(job, 2, args=(None,)) == [[1.0]] * 2
    assert lab.run(job, 2, args=(torch.float32,)) == [[torch.tensor(1 + 100 / 1024).bfloat16().item()]] * 2


@pytest.mark.parametrize("stage", STAGES)
def test_dtypes_do_not_mix(stage):
    def mixed():
        torch.manual_seed(dist.get_rank())
        layers = [nn.Linear(3, 3, dtype=d) for d in (torch.float32, torch.bfloat16, torch.float64)]

        class Mixed(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.ParameterList([p for layer in layers for p in layer.parameters()])

            def forward(self, factor):
                return sum(p.float().sum() for p in self.layers) * factor

        model = Mixed()
        wrapped = STAGES[stage](model, functools.partial(torch.optim.SGD, lr=1.0))
        before = {name: p.clone() for name, p in wrapped.state_dict().items()}
        wrapped(dist.get_rank() + 1).backward()
        wrapped.optimizer.step()
        moved = {name: (before[name].double() - p.double()) for name, p in wrapped.state_dict().items()}
        return {name: (p.min().item(), p.max().item()) for name, p in moved.items()}

    for moved in lab.run(mixed, 3):
        for low, high in moved.values():
            # bfloat16 keeps 8 bits, of numbers up to 3
            assert low == pytest.approx(2.0, abs=2**-6)
            assert high == pytest.approx(2.0, abs=2**-6)


def test_a_master_copy_survives_loading_a_state_dict():
    def job(stage):
        wrapped, _ = train(stage, steps=1)
        wrapped.load_state_dict({k: torch.full_like(v, 2.0) for k, v in wrapped.state_dict().items()})
        for weights in (group["params"] for group in wrapped.optimizer.param_groups):
            assert all((w == 2).all() for w in weights)

    in_each_stage(job, 2)
