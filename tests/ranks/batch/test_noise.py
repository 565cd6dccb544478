"""The meter of the noise: equal to one process that has all gradients, and unbiased, on ranks and micro-batches."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch.distributed as dist

from dtlib import lab
from dtlib.ranks import batch, dp
from dtlib.ranks.batch import noise as noise_module

from .oracle import SHAPES, B, Given, Samples, gradients, measure, told

STEPS = 4
WAYS = {
    "plain": {},
    "many buckets": {"bucket_bytes": 60, "first_bucket_bytes": None},
    "blocking": {"overlap": False},
    "gradients of their own": {"gradient_as_bucket_view": False, "bucket_bytes": 60},
    "blocking, of their own": {"gradient_as_bucket_view": False, "overlap": False},
    "unused allowed": {"find_unused_parameters": True},
}


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
