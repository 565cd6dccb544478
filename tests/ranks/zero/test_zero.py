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
from dtlib.ranks.dp import base
from dtlib.ranks.zero import _flat, _unit
from dtlib.theory.collectives import chunk_bounds

from .judge import Make, assert_correct

WRAPPERS: dict[str, tuple[Make, int]] = {
    "stage 1": (zero.ZeroStage1, 1),
    "stage 1, a few buckets": (functools.partial(zero.ZeroStage1, bucket_bytes=150_000, first_bucket_bytes=1000), 1),
    "stage 2": (zero.ZeroStage2, 2),
    "stage 2, a few buckets": (functools.partial(zero.ZeroStage2, bucket_bytes=150_000, first_bucket_bytes=1000), 2),
    "stage 2, after backward": (functools.partial(zero.ZeroStage2, bucket_bytes=150_000, overlap=False), 2),
    "stage 2, unused allowed": (functools.partial(zero.ZeroStage2, find_unused_parameters=True), 2),
    "stage 3": (zero.ZeroStage3, 3),
    "stage 3, nothing ahead": (functools.partial(zero.ZeroStage3, prefetch=0), 3),
    "stage 3, far ahead": (functools.partial(zero.ZeroStage3, prefetch=9), 3),
    "stage 3, after backward": (functools.partial(zero.ZeroStage3, overlap=False), 3),
    "stage 3, unused allowed": (functools.partial(zero.ZeroStage3, find_unused_parameters=True), 3),
    "stage 3, one unit": (functools.partial(zero.ZeroStage3, units=[]), 3),
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


class ReplicatedStates(zero.ZeroStage1):
    """Plain AdamW on every rank, under the name of a sharded optimizer."""

    def _lay_out(self):
        flats = super()._lay_out()
        for flat in flats:
            flat.own = slice(0, flat.num_elements)
            flat.pieces, flat.shard = flat._pieces(), flat.full
        return flats

    def _start(self, flat):
        flat.started = True
        flat.clear_missing()
        dist.all_reduce(flat.buffer, group=self.group)
        flat.resting = set()
        self._keep(flat, flat.buffer)
        flat.filled.clear()

    def clip_grad_norm_(self, max_norm, *args, **kwargs):
        norm = super().clip_grad_norm_(math.inf)
        for flat in self._flats:
            flat.grad.mul_(min(1.0, max_norm / (norm.item() / self.world_size**0.5 + 1e-6)))
        return norm / self.world_size**0.5

    def _publish(self):
        pass


class GradientsNeverFreed(zero.ZeroStage2):
    def _keep(self, flat, own):
        buffer = flat.buffer
        super()._keep(flat, own)
        flat.kept = buffer


class GradientsOfTheModuleNeverFreed(zero.ZeroStage2):
    def _ready(self, index):
        grad = self._params[index].grad
        super()._ready(index)
        self._params[index].grad = grad

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        for parameter in self._params:
            parameter.grad = None


class AllReduces(zero.ZeroStage2):
    def _start(self, flat):
        flat.clear_missing()
        rest = flat.buffer.clone()
        super()._start(flat)
        dist.all_reduce(rest, group=self.group)


class LocalNorm(zero.ZeroStage2):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.alone = [dist.new_group([rank]) for rank in range(self.world_size)][dist.get_rank()]

    def clip_grad_norm_(self, *args, **kwargs):
        self.group, group = self.alone, self.group
        try:
            return super().clip_grad_norm_(*args, **kwargs)
        finally:
            self.group = group


class NothingPublished(zero.ZeroStage1):
    def _publish(self):
        pass


class SyncInsideNoSync(zero.ZeroStage2):
    def no_sync(self):
        return nullcontext()


class LocalPartForgotten(zero.ZeroStage1):
    """The second micro-batch takes the place of the first."""

    def _ready(self, index):
        self._where[index].filled.discard(index)
        super()._ready(index)


class FullWeightsKept(zero.ZeroStage3):
    """Nothing is freed, though everything is gathered as often as it must."""

    def __init__(self, *args, **kwargs):
        _unit.Unit._put_away = self._only_point_away
        super().__init__(*args, **kwargs)

    @staticmethod
    def _only_point_away(unit, flat):
        for index in flat.indices:
            unit.params[index].data = flat.shard[:0]


class KeptFromForwardToBackward(zero.ZeroStage3):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, reshard_after_forward=False, **kwargs)


def sum_for_mean(make):
    def wrap(model, *args, **kwargs):
        wrapped = make(model, *args, **kwargs)
        wrapped.world_size = 1  # the factor 1/N becomes 1
        return wrapped

    return wrap


def no_broadcast(make):
    def wrap(model, *args, **kwargs):
        base._broadcast = lambda tensors, group: None
        return make(model, *args, **kwargs)

    return wrap


def cut(change):
    """A wrapper of a wrapper that changes where a rank's chunk begins and ends."""

    def wrong(make):
        def wrap(model, *args, **kwargs):
            right = _flat.Flat._pieces

            def pieces(self):
                self.own = change(self)
                return right(self)

            _flat.Flat._pieces = pieces
            return make(model, *args, **kwargs)

        return wrap

    return wrong


def all_bounds_shifted(make):
    def wrap(model, *args, **kwargs):
        def shifted(num_elements, n):
            first, *inner, last = chunk_bounds(num_elements, n)
            return [first, *(min(last, bound + 1) for bound in inner), last]

        _flat.chunk_bounds = shifted
        return make(model, *args, **kwargs)

    return wrap


last_one_lost = cut(lambda flat: slice(flat.own.start, max(flat.own.start, flat.own.stop - 1)))
first_one_lost = cut(lambda flat: slice(min(flat.own.stop, flat.own.start + 1), flat.own.stop))

MUTANTS: dict[str, tuple[Make, int, str, str]] = {
    "1: replicated states": (ReplicatedStates, 1, "no", "bytes of states"),
    "2: gradients never freed": (GradientsNeverFreed, 2, "no", "bytes of other tensors are left"),
    "2: the module's gradients never freed": (GradientsOfTheModuleNeverFreed, 2, "no", "bytes of gradients"),
    "2: stage 1 under its name": (zero.ZeroStage1, 2, "no", "bytes of gradients"),
    "2: all-reduces": (AllReduces, 2, "no", "bytes sent|other tensors are left"),
    "2: norm of this rank's part": (LocalNorm, 2, "no", "norm|weight"),
    "1: updated weights not sent": (NothingPublished, 1, "no", "weight"),
    "2: sync inside no_sync": (SyncInsideNoSync, 2, "quiet", "bytes sent"),
    "1: a micro-batch forgotten": (LocalPartForgotten, 1, "quiet", "weight|norm"),
    "3: full weights kept": (FullWeightsKept, 3, "no", "bytes of other tensors are left"),
    "3: kept from forward to backward": (KeptFromForwardToBackward, 3, "no", "bytes sent"),
    "3: stage 2 under its name": (zero.ZeroStage2, 3, "no", "bytes of weights"),
    "1: sum for mean": (sum_for_mean(zero.ZeroStage1), 1, "no", "norm|weight"),
    "2: sum for mean": (sum_for_mean(zero.ZeroStage2), 2, "no", "norm|weight"),
    "3: sum for mean": (sum_for_mean(zero.ZeroStage3), 3, "no", "norm|weight"),
    "2: no broadcast": (no_broadcast(zero.ZeroStage2), 2, "no", "weight"),
    "3: no broadcast": (no_broadcast(zero.ZeroStage3), 3, "no", "weight"),
    "2: boundaries off by one": (all_bounds_shifted(zero.ZeroStage2), 2, "no", "bytes of"),
    "1: last element lost": (last_one_lost(zero.ZeroStage1), 1, "no", "weight"),
    "2: first element lost": (first_one_lost(zero.ZeroStage2), 2, "no", "weight"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_judge_refuses(name):
    mutant, stage, accumulate, words = MUTANTS[name]
    with pytest.raises(AssertionError, match=words):
        assert_correct(mutant, stage, 3, accumulate=accumulate)
