"""ZeRO against one process on the whole batch: weights, norms, bytes sent and bytes kept, for 1 to 4 ranks.

The last tests hand the judge wrong implementations and demand that it refuses each of them.
"""

from __future__ import annotations

import functools
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch.distributed as dist

from dtlib.ranks import zero
from dtlib.ranks.shared import replicas
from dtlib.ranks.zero import shard as implementation
from dtlib.theory.collectives import chunk_bounds

from .judge import Make, assert_correct
from .small import STAGES, of_shards

FEW_BUCKETS = {"bucket_bytes": 150_000, "first_bucket_bytes": 1000}
OPTIONS: dict[str, dict[str, Any]] = {
    "stage 1": {},
    "stage 1, a few buckets": FEW_BUCKETS,
    "stage 2": {},
    "stage 2, a few buckets": FEW_BUCKETS,
    "stage 2, unused allowed": {"find_unused_parameters": True},
    "stage 3": {},
    "stage 3, nothing ahead": {"prefetch": 0},
    "stage 3, far ahead": {"prefetch": 9},
    "stage 3, unused allowed": {"find_unused_parameters": True},
    "stage 3, one unit": {"units": []},
}
WRAPPERS: dict[str, tuple[Make, int]] = {
    name: (functools.partial(STAGES[int(name[6])], **options), int(name[6])) for name, options in OPTIONS.items()
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


class KeepsGradients(zero.Shard):
    def reduce(self):
        self.hoard = {index: parameter.grad for index, parameter in self.params.items()}
        super().reduce()

    def gradient_of(self, index):
        return self.hoard.get(index)


class ReducesAll(zero.Shard):
    def reduce(self):
        rest = self.full.new_zeros(self.num_elements)
        super().reduce()
        dist.all_reduce(rest)


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


def cut(change, stage):
    """Another beginning or end of a rank's chunk."""

    class Cut(zero.Shard):
        def _pieces(self):
            right, self.own = self.own, change(self.own)
            pieces = list(super()._pieces())
            self.own = right
            return pieces

    return of_shards(Cut, stage)


def all_bounds_shifted(make):
    def wrap(model, *args, **kwargs):
        def shifted(num_elements, n):
            first, *inner, last = chunk_bounds(num_elements, n)
            return [first, *(min(last, bound + 1) for bound in inner), last]

        implementation.chunk_bounds = shifted
        return make(model, *args, **kwargs)

    return wrap


stays = functools.partial(zero.Zero, stage=3, reshard_after_forward=False)
LEFT = "bytes of other tensors are left"
MUTANTS: dict[str, tuple[Make, int, str, str]] = {
    "1: replicated states": (functools.partial(ReplicatedStates, stage=1), 1, "no", "bytes of states"),
    "2: gradients never freed": (of_shards(Hoards, 2), 2, "no", LEFT),
    "2: the module's gradients never freed": (of_shards(KeepsGradients, 2), 2, "no", "bytes of gradients"),
    "2: stage 1 under its name": (STAGES[1], 2, "no", "bytes of gradients"),
    "2: all-reduces": (of_shards(ReducesAll, 2), 2, "no", "bytes sent|other tensors are left"),
    "2: norm of this rank's part": (functools.partial(LocalNorm, stage=2), 2, "no", "norm|weight"),
    "1: updated weights not sent": (functools.partial(NothingPublished, stage=1), 1, "no", "weight"),
    "2: sync inside no_sync": (functools.partial(SyncInsideNoSync, stage=2), 2, "quiet", "bytes sent"),
    "1: a micro-batch forgotten": (functools.partial(LocalPartForgotten, stage=1), 1, "quiet", "weight|norm"),
    "3: full weights kept": (of_shards(Hides, 3), 3, "no", LEFT),
    "3: kept from forward to backward": (stays, 3, "no", "bytes sent"),
    "3: stage 2 under its name": (STAGES[2], 3, "no", "bytes of weights"),
    **{f"{stage}: sum for mean": (sum_for_mean(STAGES[stage]), stage, "no", "norm|weight") for stage in STAGES},
    **{f"{stage}: no broadcast": (no_broadcast(STAGES[stage]), stage, "no", "weight") for stage in (2, 3)},
    "2: boundaries off by one": (all_bounds_shifted(STAGES[2]), 2, "no", "bytes of"),
    "1: last element lost": (cut(lambda own: slice(own.start, max(own.start, own.stop - 1)), 1), 1, "no", "weight"),
    "2: first element lost": (cut(lambda own: slice(min(own.stop, own.start + 1), own.stop), 2), 2, "no", "weight"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_judge_refuses(name):
    mutant, stage, accumulate, words = MUTANTS[name]
    with pytest.raises(AssertionError, match=words):
        assert_correct(mutant, stage, 3, accumulate=accumulate)
