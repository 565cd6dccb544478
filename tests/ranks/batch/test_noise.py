"""The meter of the noise: equal to one process that has all gradients, unbiased, to the byte, and in any wrapping."""

from __future__ import annotations

import copy
import functools
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from dtlib import lab
from dtlib.ranks import batch, compression, dp
from dtlib.ranks.batch import noise as noise_module
from dtlib.ranks.mesh import Mesh

from .oracle import SHAPES, Given, Samples, gradients, told

B, STEPS = 3, 4
WAYS = {
    "plain": {},
    "many buckets": {"bucket_bytes": 60, "first_bucket_bytes": None},
    "blocking": {"overlap": False},
    "gradients of their own": {"gradient_as_bucket_view": False, "bucket_bytes": 60},
    "blocking, of their own": {"gradient_as_bucket_view": False, "overlap": False},
    "unused allowed": {"find_unused_parameters": True},
}


def measure(given, noise, options, samples=B):
    """In a rank: what the meter says after each step."""
    wrapped = dp.BucketedDataParallel(Given(), exchange=noise, **options)
    found = []
    for by_rank in given:
        wrapped.zero_grad()
        wrapped(by_rank[dist.get_rank()]).backward()
        found.append(noise.measured(samples))
    return found, wrapped.buckets


class Divided(batch.NoiseScale):
    """Mutant: forgets that buckets carry the gradient over N."""

    def __call__(self, bucket, group):
        started = super().__call__(bucket, group)
        self._own = {name: each / dist.get_world_size() ** 2 for name, each in self._own.items()}
        return started


class Global(batch.NoiseScale):
    """Mutant: takes all ranks' samples for one rank's."""

    def measured(self, batch):
        return super().measured(batch * dist.get_world_size())


class Late(batch.NoiseScale):
    """Mutant: takes the mean's square before the mean has come."""

    def __call__(self, bucket, group):
        squares = noise_module._squares(bucket)
        started = super().__call__(bucket, group)
        started.wait()
        self._mean |= squares
        return noise_module._UnderWay(self, dp.Bucket(bucket.flat, {}), None)


class Alone(batch.NoiseScale):
    """Mutant: each rank believes its own square."""

    def measured(self, batch):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_reduce", lambda told, group=None: told.mul_(dist.get_world_size()))
            return super().measured(batch)


class Biased(batch.NoiseScale):
    """Mutant: the ranks' scatter over N instead of N − 1."""

    def _add(self, found):
        n = dist.get_world_size()
        return super()._add({name: (square, variance * (n - 1) / n) for name, (square, variance) in found.items()})


MUTANTS = {"divided": Divided, "global": Global, "late": Late, "alone": Alone, "biased": Biased}


@functools.cache
def everything(n):
    def train():
        given = gradients(n, STEPS)
        found = {name: measure(given, batch.NoiseScale(decay=0, per_layer=True), way) for name, way in WAYS.items()}
        for name, mutant in MUTANTS.items():
            found[name] = measure(given, mutant(decay=0, per_layer=True), {})
        return found

    return lab.run(train, n)


def is_right(n, name):
    given = gradients(n, STEPS)
    for each in everything(n):
        assert each[name][0] == everything(n)[0][name][0]  # the same numbers on all ranks
        for by_rank, noise in zip(given, each[name][0], strict=True):
            assert (noise.square, noise.variance) == pytest.approx(told(by_rank, B), rel=1e-10)
            assert noise.noise_scale == pytest.approx(noise.variance / noise.square)
            for layer, part in noise.per_layer.items():
                assert (part.square, part.variance) == pytest.approx(told(by_rank, B, [layer]), rel=1e-9, abs=1e-9)
            assert set(noise.per_layer) == set(SHAPES)
            for what in ("square", "variance"):
                whole = sum(getattr(part, what) for part in noise.per_layer.values())
                assert whole == pytest.approx(getattr(noise, what), rel=1e-10)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("name", WAYS)
def test_it_says_what_pairs_of_ranks_say(n, name):
    is_right(n, name)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_rejected(n, name):
    with pytest.raises(AssertionError):
        is_right(n, name)


def test_means_are_running_and_their_ratio_is_taken_last():
    def train():
        return {decay: measure(gradients(2, STEPS), batch.NoiseScale(decay=decay), {})[0] for decay in (0.5, 0.9, 1)}

    single = [told(by_rank, B) for by_rank in gradients(2, STEPS)]
    for decay, found in lab.run(train, 2)[0].items():
        weights = np.array([decay ** (STEPS - 1 - i) for i in range(STEPS)])
        square, variance = weights @ np.array(single) / weights.sum()
        assert found[-1].steps == STEPS
        assert (found[-1].square, found[-1].variance) == pytest.approx((square, variance))
        assert found[-1].noise_scale == pytest.approx(variance / square)
        ratios = weights @ np.array([v / s for s, v in single]) / weights.sum()  # mutant: the mean of ratios
        assert found[-1].noise_scale != pytest.approx(ratios, rel=0.01)
    assert batch.Noise(-1.0, 2.0, 1).noise_scale == math.inf


@pytest.mark.parametrize(("counts", "weighted"), [((2, 2), False), ((1, 5), False), ((1, 5), True), ((4, 0, 2), True)])
def test_over_many_draws_it_finds_the_two_numbers_of_a_fixed_set(counts, weighted):
    """Within four standard errors of the mean; steps are independent of each other."""

    def train():
        rank, samples = dist.get_rank(), Samples()
        draw = np.random.default_rng(rank)
        noise = batch.NoiseScale(decay=0, weighted=weighted)
        wrapped = dp.BucketedDataParallel(samples.model(), exchange=noise)
        found = []
        for _ in range(1500):
            wrapped.zero_grad()
            losses = samples.losses(wrapped, draw.integers(64, size=counts[rank]))
            scale = len(counts) / sum(counts) if weighted else 1 / counts[rank]
            (losses.sum() * scale).backward()
            each = noise.measured(counts[rank])
            found.append((each.square, each.variance))
        return np.array(found)

    found, samples = lab.run(train, len(counts))[0], Samples()
    errors = found.std(0, ddof=1) / math.sqrt(len(found))
    wanted = np.array([samples.square, samples.variance])
    assert (errors < 0.12 * wanted).all()
    assert (np.abs(found.mean(0) - wanted) < 4 * errors).all()


def test_ranks_that_see_the_same_samples_have_no_noise():
    def train():
        given = gradients(1, 1)[0] * 3
        return measure([given], batch.NoiseScale(), {})[0][0]

    (noise, *_) = lab.run(train, 3)
    assert noise.variance == pytest.approx(0, abs=1e-9)
    assert noise.square > 1


def test_accumulated_steps_are_larger_batches():
    """Two micro-batches a step, the first inside no_sync: the rank's gradient is the mean of both."""

    def train():
        given, found = gradients(2, 4), []
        noise = batch.NoiseScale(decay=0)
        wrapped = dp.BucketedDataParallel(Given(), exchange=noise)
        for first, second in (given[:2], given[2:]):
            wrapped.zero_grad()
            with wrapped.no_sync():
                (wrapped(first[dist.get_rank()]) / 2).backward()
            with pytest.raises(RuntimeError, match="no backward pass with an exchange has ended"):
                noise.measured(B)
            (wrapped(second[dist.get_rank()]) / 2).backward()
            found.append(noise.measured(2 * B))
        return found

    given = gradients(2, 4)
    for (first, second), noise in zip((given[:2], given[2:]), lab.run(train, 2)[0], strict=True):
        halves = [{k: (a[k] + b[k]) / 2 for k in a} for a, b in zip(first, second, strict=True)]
        assert (noise.square, noise.variance) == pytest.approx(told(halves, 2 * B))


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


def test_one_rank_accumulates_instead():
    """On one rank, and without any process group: micro-batches are what ranks are elsewhere."""

    def train():
        noise = batch.NoiseScale()
        with pytest.raises(RuntimeError, match="use MicroBatches"):
            measure(gradients(1, 1), noise, {})

    lab.run(train, 1)
    for count in (2, 3):
        given, model = gradients(count, STEPS), Given()
        meter = batch.MicroBatches(model, decay=0, per_layer=True)
        for micro_batches in given:
            model.zero_grad()
            for each in micro_batches:
                (model(each) / count).backward()
            noise = meter.measured(batch=B, micro_batches=count)
            assert (noise.square, noise.variance) == pytest.approx(told(micro_batches, B))
            part = noise.per_layer["a"]
            assert (part.square, part.variance) == pytest.approx(told(micro_batches, B, ["a"]))


def test_micro_batches_find_the_two_numbers_of_a_fixed_set():
    samples, draw, found = Samples(), np.random.default_rng(0), []
    model = samples.model()
    meter = batch.MicroBatches(model, decay=0)
    for _ in range(1500):
        model.zero_grad()
        for _ in range(3):
            (samples.losses(model, draw.integers(64, size=2)).mean() / 3).backward()
        noise = meter.measured(batch=2, micro_batches=3)
        found.append((noise.square, noise.variance))
    errors = np.std(found, 0, ddof=1) / math.sqrt(len(found))
    wanted = np.array([samples.square, samples.variance])
    assert (errors < 0.12 * wanted).all()
    assert (np.abs(np.mean(found, 0) - wanted) < 4 * errors).all()


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
