"""The meter of the noise in any wrapping: odd parameters, other exchanges, to the byte, saved, and what it refuses."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from dtlib import lab
from dtlib.ranks import batch, compression, dp
from dtlib.ranks.batch import noise as noise_module
from dtlib.ranks.mesh import Mesh

from .oracle import B, Given, gradients, measure, told

STEPS = 4


class Odd(nn.Module):
    """Two layers that share a matrix, a frozen one, and one that may rest; registered against the order of use."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 4, bias=False, dtype=torch.float64)
        self.rests = nn.Linear(4, 4, dtype=torch.float64)
        self.tied, self.frozen = (nn.Linear(4, 4, bias=False, dtype=torch.float64) for _ in range(2))
        self.first = nn.Linear(4, 4, dtype=torch.float64)
        self.tied.weight = self.last.weight
        self.frozen.weight.requires_grad_(False)

    def forward(self, x, uses):
        x = self.frozen(self.tied(self.first(x)).tanh())
        return self.last(self.rests(x) if uses else x)


def test_tied_frozen_and_resting_parameters_in_buckets_that_are_filled_anew():
    def train(unused):
        torch.manual_seed(dist.get_rank())
        noise = batch.NoiseScale(decay=0, per_layer=True)
        options = {"bucket_bytes": 200, "first_bucket_bytes": None, "find_unused_parameters": unused}
        wrapped = dp.BucketedDataParallel(Odd(), exchange=noise, **options)
        before, twin, results = wrapped.buckets, copy.deepcopy(wrapped.module), []
        for step in range(3):
            uses = not unused or (dist.get_rank() == 0 and step > 0)  # one rank, or none
            x = torch.randn(B, 4, dtype=torch.float64)
            for model in (wrapped, twin):
                model.zero_grad()
                model(x, uses).square().mean().backward()
            own = {k: np.zeros(p.shape) if p.grad is None else p.grad.numpy() for k, p in twin.named_parameters()
                   if p.requires_grad}  # fmt: skip
            results.append((noise.measured(B), own))
        return results, before != wrapped.buckets

    for unused in (False, True):
        by_rank = lab.run(train, 2, args=(unused,))
        assert by_rank[0][1] == (not unused)  # filled anew, unless the order is not looked at
        for (noise, first), (same, second) in zip(by_rank[0][0], by_rank[1][0], strict=True):
            assert noise == same
            assert (noise.square, noise.variance) == pytest.approx(told([first, second], B))
            assert set(noise.per_layer) == {"last.weight", "rests.weight", "rests.bias", "first.weight", "first.bias"}


@pytest.mark.parametrize("per_layer", [False, True])
def test_it_adds_24_bytes_and_8_for_each_layer(per_layer):
    """To the byte an all-reduce of 3 doubles, or of 6; nothing of the gradients is changed."""

    def train():
        given, sent, found = gradients(3, 2), [], []
        noise = batch.NoiseScale(per_layer=per_layer)
        for exchange in (dp.all_reduce, noise):
            wrapped = dp.BucketedDataParallel(Given(), exchange=exchange)
            for by_rank in given:
                wrapped.zero_grad()
                loss = wrapped(by_rank[dist.get_rank()])
                with lab.wire() as wire:
                    loss.backward()
                    if exchange is noise and by_rank is given[-1]:
                        noise.measured(B)
            sent.append(wire.total_bytes)
            found.append([p.grad.clone() for p in wrapped.module.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
        alone = []
        for words in (3, 6):
            with lab.wire() as wire:
                dist.all_reduce(torch.zeros(words, dtype=torch.float64))
            alone.append(wire.total_bytes)
        return sent, alone

    (without, with_noise), (three, six) = lab.run(train, 3)[0]
    assert with_noise - without == (six if per_layer else three)
    assert three < six


@pytest.mark.parametrize("make", [compression.Cast, lambda: compression.TopK(0.5), lambda: compression.PowerSGD(1),
                                  lambda: compression.Hierarchy(1, compression.Sign())],
                         ids=["cast", "top-k", "power", "two levels"])  # fmt: skip
def test_around_another_exchange_the_large_square_is_what_that_left(make):
    def train():
        given, me = gradients(2, 3), dist.get_rank()
        noise, results = batch.NoiseScale(make(), decay=0), []
        options = {"bucket_bytes": 60, "first_bucket_bytes": None}
        pair = [dp.BucketedDataParallel(Given(), exchange=each, **options) for each in (noise, make())]
        for by_rank in given:
            for wrapped in pair:
                wrapped.zero_grad()
                wrapped(by_rank[me]).backward()
            grads = [[p.grad.clone() for p in wrapped.module.parameters()] for wrapped in pair]
            assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
            results.append((noise.measured(B), sum(float(g.square().sum()) for g in grads[0])))
        return results

    for by_rank, (noise, large) in zip(gradients(2, 3), lab.run(train, 2)[0], strict=True):
        small = np.mean([sum((g**2).sum() for g in each.values()) for each in by_rank])
        assert noise.square == pytest.approx(2 * large - small)
        assert noise.variance == pytest.approx(2 * B * (small - large))


@pytest.mark.parametrize("make", [lambda: dp.all_reduce, lambda: compression.TopK(0.5)], ids=["exact", "top-k"])
def test_what_is_not_finite_is_told_on_all_ranks_and_left_out(make):
    def train():
        given = gradients(2, 3)
        if dist.get_rank() == 1:
            given[1][1]["b"][3] = np.nan
        noise = batch.NoiseScale(make())
        wrapped = dp.BucketedDataParallel(Given(), exchange=noise)

        def step(by_rank):
            wrapped.zero_grad()
            wrapped(by_rank[dist.get_rank()]).backward()
            return noise.measured(B)

        step(given[0])
        before = noise.state_dict()
        with pytest.raises(FloatingPointError, match="not finite"):
            step(given[1])
        assert noise.state_dict() == before
        assert step(given[2]).steps == 2

    lab.run(train, 2)


def test_a_saved_meter_goes_on_to_the_bit():
    def train():
        given = gradients(2, STEPS)
        noise, other = batch.NoiseScale(per_layer=True), batch.NoiseScale(per_layer=True)
        measure(given[:2], noise, {})
        state = noise.state_dict()
        wanted = measure(given[2:], noise, {})[0]
        other.load_state_dict(state)
        assert measure(given[2:], other, {})[0] == wanted
        assert measure(given[2:], batch.NoiseScale(per_layer=True), {})[0] != wanted

    lab.run(train, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_squares_are_as_good_as_float64(dtype):
    """3 million squares added up in float32 alone are wrong by 1e-4. Pieces of 4,096 are summed in 8 lanes at least: of
    512 roundings by up to 6e-8 each the typical sum is 1.4e-6, and the pieces' are independent."""
    entries = torch.randn(3_000_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = float(entries.double().square().sum())
    assert float(noise_module._square(entries)) == pytest.approx(exact, rel=2e-6)
    assert float(noise_module._square(entries[:0])) == 0


def test_what_cannot_be_measured_is_refused():
    for make, words in (
        (lambda: batch.NoiseScale("ring"), "exchange must be a function of a bucket and a group, not 'ring'"),
        (lambda: batch.NoiseScale(decay=1.1), "decay must be from 0 to 1, not 1.1"),
        (lambda: batch.NoiseScale(per_layer=1), "per_layer must be True or False"),
        (lambda: batch.NoiseScale().measured(0), "batch must be at least 1, not 0"),
        (lambda: batch.MicroBatches(Given()).measured(1, 1), "micro_batches must be at least 2, not 1"),
    ):
        with pytest.raises(ValueError, match=words):
            make()
    for meter in (batch.NoiseScale(), batch.MicroBatches(Given())):
        with pytest.raises(RuntimeError, match="nothing is measured yet"):
            _ = meter.noise
    with pytest.raises(RuntimeError, match="no backward pass has ended"):
        batch.MicroBatches(Given()).measured(1, 2)

    def train():
        mesh, model = Mesh({"dp": 2, "ep": 2}), Given()
        dp.belongs_to(model.a, mesh.group("dp"))
        wrapped = dp.BucketedDataParallel(model, exchange=batch.NoiseScale())
        with pytest.raises(ValueError, match="must belong to all ranks alike"):
            wrapped(gradients(4, 1)[0][dist.get_rank()]).backward()

    lab.run(train, 4)
