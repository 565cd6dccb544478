"""ZeRO against one process on the whole batch: weights, norms, bytes sent and bytes kept, for 1 to 4 ranks.

The last tests hand the judge wrong implementations and demand that it refuses each of them.
"""

from __future__ import annotations

import functools
import math
from contextlib import nullcontext

import pytest
import torch.distributed as dist

from dtlib.ranks import zero
from dtlib.ranks.shared import replicas
from dtlib.ranks.zero import shard as implementation
from dtlib.theory.collectives import chunk_bounds

from .judge import Make, assert_correct
from .small import STAGES

WRAPPERS: dict[str, tuple[Make, int]] = {
    "stage 1": (STAGES[1], 1),
    "stage 1, a few buckets": (functools.partial(zero.Zero, stage=1, bucket_bytes=150_000, first_bucket_bytes=1000), 1),
    "stage 2": (STAGES[2], 2),
    "stage 2, a few buckets": (functools.partial(zero.Zero, stage=2, bucket_bytes=150_000, first_bucket_bytes=1000), 2),
    "stage 2, after backward": (functools.partial(zero.Zero, stage=2, bucket_bytes=150_000, overlap=False), 2),
    "stage 2, unused allowed": (functools.partial(zero.Zero, stage=2, find_unused_parameters=True), 2),
    "stage 3": (STAGES[3], 3),
    "stage 3, nothing ahead": (functools.partial(zero.Zero, stage=3, prefetch=0), 3),
    "stage 3, far ahead": (functools.partial(zero.Zero, stage=3, prefetch=9), 3),
    "stage 3, after backward": (functools.partial(zero.Zero, stage=3, overlap=False), 3),
    "stage 3, unused allowed": (functools.partial(zero.Zero, stage=3, find_unused_parameters=True), 3),
    "stage 3, one unit": (functools.partial(zero.Zero, stage=3, units=[]), 3),
}


MAIN = ["stage 1, a few buckets", "stage 2, a few buckets", "stage 3"]


@pytest.mark.parametrize("name", MAIN)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_equals_one_process(name, n):
    make, stage = WRAPPERS[name]
    assert_correct(make, stage, n)


@pytest.mark.parametrize("name", sorted(WRAPPERS.keys() - set(MAIN)))
def test_options_change_nothing(name):
    make, stage = WRAPPERS[name]
    assert_correct(make, stage, 3)


@pytest.mark.parametrize("accumulate", ["quiet", "sync"])
@pytest.mark.parametrize("name", MAIN)
@pytest.mark.parametrize("n", [1, 3])
def test_equals_one_process_with_accumulation(name, n, accumulate):
    make, stage = WRAPPERS[name]
    assert_correct(make, stage, n, accumulate=accumulate)


# --- wrong implementations, each of which the judge must refuse ------------------------------------------------


class Whole(zero.Shard):
    """Every rank owns everything, and all-reduces."""

    def _pieces(self):
        self.own = slice(0, self.num_elements)
        return super()._pieces()

    def reduce(self):
        super().reduce()
        self._scattering = iter(())
        dist.all_reduce(self.sent)

    def advance(self):
        pass


class ReplicatedStates(zero.Zero):
    """Plain AdamW on every rank, under the name of a sharded optimizer."""

    shard_type = Whole

    def clip_grad_norm_(self, max_norm, *args, **kwargs):
        norm = super().clip_grad_norm_(math.inf)
        for shard in self.shards:
            shard.grad.mul_(min(1.0, max_norm / (norm.item() / self.world_size**0.5 + 1e-6)))
        return norm / self.world_size**0.5

    def publish(self):
        pass


class Hoards(zero.Shard):
    def keep(self):
        self.kept = self.sent
        super().keep()


class GradientsNeverFreed(zero.Zero):
    shard_type = Hoards


class KeepsGradients(zero.Shard):
    def reduce(self):
        self.hoard = {index: parameter.grad for index, parameter in self.params.items()}
        super().reduce()

    def gradient_of(self, index):
        return self.hoard.get(index)


class GradientsOfTheModuleNeverFreed(zero.Zero):
    shard_type = KeepsGradients


class ReducesAll(zero.Shard):
    def reduce(self):
        rest = self.full.new_zeros(self.num_elements)
        super().reduce()
        dist.all_reduce(rest)


class AllReduces(zero.Zero):
    shard_type = ReducesAll


class LocalNorm(zero.Zero):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.alone = [dist.new_group([rank]) for rank in range(self.world_size)][dist.get_rank()]

    def clip_grad_norm_(self, *args, **kwargs):
        self.group, group = self.alone, self.group
        try:
            return super().clip_grad_norm_(*args, **kwargs)
        finally:
            self.group = group


class NothingPublished(zero.Zero):
    def publish(self):
        pass


class SyncInsideNoSync(zero.Zero):
    def no_sync(self):
        return nullcontext()


class LocalPartForgotten(zero.Zero):
    """The second micro-batch takes the place of the first."""

    def forward(self, *args):
        self.module.zero_grad()
        return super().forward(*args)


class Hides(zero.Shard):
    """Nothing is freed, though everything is gathered as often as it must."""

    def free(self):
        self.state = "away"
        for parameter in self.params.values():
            parameter.data = self.chunk[:0]


class FullWeightsKept(zero.Zero):
    shard_type = Hides


def kept_from_forward_to_backward(*args, **kwargs):
    return zero.Zero(*args, stage=3, reshard_after_forward=False, **kwargs)


def sum_for_mean(make):
    def wrap(model, *args, **kwargs):
        wrapped = make(model, *args, **kwargs)
        for shard in wrapped.shards:
            shard.factor = 1.0
        return wrapped

    return wrap


def no_broadcast(make):
    def wrap(model, *args, **kwargs):
        replicas.broadcast = lambda tensors, group: None
        return make(model, *args, **kwargs)

    return wrap


def cut(change):
    """A wrapper of a wrapper that changes where a rank's chunk begins and ends."""

    class Cut(zero.Shard):
        def _pieces(self):
            right, self.own = self.own, change(self)
            pieces = list(super()._pieces())
            self.own = right
            return pieces

    class Wrong(zero.Zero):
        shard_type = Cut

    return Wrong


def all_bounds_shifted(make):
    def wrap(model, *args, **kwargs):
        def shifted(num_elements, n):
            first, *inner, last = chunk_bounds(num_elements, n)
            return [first, *(min(last, bound + 1) for bound in inner), last]

        implementation.chunk_bounds = shifted
        return make(model, *args, **kwargs)

    return wrap


last_one_lost = cut(lambda shard: slice(shard.own.start, max(shard.own.start, shard.own.stop - 1)))
first_one_lost = cut(lambda shard: slice(min(shard.own.stop, shard.own.start + 1), shard.own.stop))

MUTANTS: dict[str, tuple[Make, int, str, str]] = {
    "1: replicated states": (functools.partial(ReplicatedStates, stage=1), 1, "no", "bytes of states"),
    "2: gradients never freed": (
        functools.partial(GradientsNeverFreed, stage=2),
        2,
        "no",
        "bytes of other tensors are left",
    ),
    "2: the module's gradients never freed": (
        functools.partial(GradientsOfTheModuleNeverFreed, stage=2),
        2,
        "no",
        "bytes of gradients",
    ),
    "2: stage 1 under its name": (STAGES[1], 2, "no", "bytes of gradients"),
    "2: all-reduces": (functools.partial(AllReduces, stage=2), 2, "no", "bytes sent|other tensors are left"),
    "2: norm of this rank's part": (functools.partial(LocalNorm, stage=2), 2, "no", "norm|weight"),
    "1: updated weights not sent": (functools.partial(NothingPublished, stage=1), 1, "no", "weight"),
    "2: sync inside no_sync": (functools.partial(SyncInsideNoSync, stage=2), 2, "quiet", "bytes sent"),
    "1: a micro-batch forgotten": (functools.partial(LocalPartForgotten, stage=1), 1, "quiet", "weight|norm"),
    "3: full weights kept": (functools.partial(FullWeightsKept, stage=3), 3, "no", "bytes of other tensors are left"),
    "3: kept from forward to backward": (kept_from_forward_to_backward, 3, "no", "bytes sent"),
    "3: stage 2 under its name": (STAGES[2], 3, "no", "bytes of weights"),
    "1: sum for mean": (sum_for_mean(STAGES[1]), 1, "no", "norm|weight"),
    "2: sum for mean": (sum_for_mean(STAGES[2]), 2, "no", "norm|weight"),
    "3: sum for mean": (sum_for_mean(STAGES[3]), 3, "no", "norm|weight"),
    "2: no broadcast": (no_broadcast(STAGES[2]), 2, "no", "weight"),
    "3: no broadcast": (no_broadcast(STAGES[3]), 3, "no", "weight"),
    "2: boundaries off by one": (all_bounds_shifted(STAGES[2]), 2, "no", "bytes of"),
    "1: last element lost": (functools.partial(last_one_lost, stage=1), 1, "no", "weight"),
    "2: first element lost": (functools.partial(first_one_lost, stage=2), 2, "no", "weight"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_judge_refuses(name):
    mutant, stage, accumulate, words = MUTANTS[name]
    with pytest.raises(AssertionError, match=words):
        assert_correct(mutant, stage, 3, accumulate=accumulate)
