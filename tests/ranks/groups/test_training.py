"""Every wrapper trains experts like one process, wrong ones are refused, and so is what cannot be: two starts."""

from __future__ import annotations

from functools import cache
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

from dtlib import lab
from dtlib.ranks import dp, zero
from dtlib.ranks.shared import clipping, replicas, split
from dtlib.ranks.zero import shard

from .judge import CLOSE, DP, LAYOUTS, ZERO, alone, is_refused, make_adamw, mesh_of, train

# --- what may go wrong ----------------------------------------------------------------------------------------------


def everybody(tensor, others):
    return others


def divided_by_its_own(self, index):
    self._params[index].grad.mul_(self.world_size / dist.get_world_size(self._groups[index]))
    pack(self, index)


def sharded_and_divided_by_its_own(self, params, **options):
    made(self, params, **options)
    self.factor = 1 / self.peers.n


def of_those_that_hold_it(*args, group):
    return norm(*args, group=mesh_of("pairs").group("dp"))


def all_alike(model):
    return {}


pack, made, norm = dp.BucketedDataParallel._pack, zero.Shard.__init__, clipping.clip_grad_norm
MUTANTS = {
    "divided by its own group": ("bucketed", dp.BucketedDataParallel, "_pack", divided_by_its_own),
    "ZeRO: divided by its own group": ("stage 2", zero.Shard, "__init__", sharded_and_divided_by_its_own),
    "all begin with rank 0's": ("flat", replicas, "group_of", everybody),
    "ZeRO: all begin with rank 0's": ("stage 1", replicas, "group_of", everybody),
    "naive: summed over all": ("naive", dp.base, "group_of", everybody),
    "bucketed: summed over all": ("bucketed", dp.base, "group_of", everybody),
    "ZeRO: sharded over all": ("stage 2", shard, "group_of", everybody),
    "a norm of one rank's experts": ("bucketed", split, "splits_of", all_alike),
    "ZeRO: a norm of those that hold it": ("stage 3", zero.zero, "clip_grad_norm", of_those_that_hold_it),
}


def names_of(layout):
    return [*DP, *ZERO] if "pairs" in layout else ["bucketed", "uneven", "stage 3"]


def on_a_rank():
    right = {(name, layout): train(name, layout) for layout in LAYOUTS for name in names_of(layout)}
    wrong = {}
    for mutant, (name, *where) in MUTANTS.items():
        with mock.patch.object(*where):
            wrong[mutant] = train(name)
    return right, wrong


@cache
def trained():
    return lab.run(on_a_rank, 4, timeout_s=120)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_wrappers_train_like_one_process(layout):
    for right, _ in trained():
        for name in names_of(layout):
            assert_close(right[name, layout], alone(LAYOUTS[layout][0]), **CLOSE, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("mutant", MUTANTS)
def test_each_mutant_is_refused(mutant):
    assert all(is_refused(wrong[mutant], LAYOUTS["pairs"][0]) for _, wrong in trained())


# --- bad arguments --------------------------------------------------------------------------------------------------


def of_a_stranger():
    dp.belongs_to(nn.Parameter(torch.zeros(1)), groups()[1 - dist.get_rank() % 2])


def wrapped_over_fewer():
    model = nn.Linear(1, 1)
    dp.belongs_to(model.weight, groups()[dist.get_rank() % 2])
    dp.BucketedDataParallel(model, group=mesh_of("pairs").group("ep"))


def with_replicas():
    model = nn.Linear(1, 1)
    dp.belongs_to(model.bias, dist.new_group([dist.get_rank()], use_local_synchronization=True))
    zero.Zero(model, make_adamw, stage=1, group=mesh_of("pairs").group("ep"), replicas=mesh_of("pairs").group("dp"))


def of_another_shape():
    model = nn.Linear(1, 1 + dist.get_rank() // 2)
    for parameter in model.parameters():
        dp.belongs_to(parameter, groups()[dist.get_rank() % 2])
    dp.NaiveDataParallel(model)


def on_some_ranks():
    model = nn.Linear(1, 1)
    if dist.get_rank() % 2:
        dp.belongs_to(model.weight, groups()[1])
    dp.NaiveDataParallel(model)


@cache
def groups():
    return [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]


BAD = {
    of_a_stranger: r"group must contain this rank \(\d\), and does not",
    wrapped_over_fewer: r"group must contain all ranks that hold 'weight', \[\d, \d\], and does not",
    with_replicas: "replicas must be None where some ranks hold a parameter alone, as they do 'bias'",
    of_another_shape: r"module must be alike on all ranks; rank \d and rank \d differ in 'bias', 'weight'",
    on_some_ranks: "module must be alike on all ranks; rank 1 and rank 0 differ in 'weight'",
}


def test_what_cannot_be_is_named():
    def refused():
        groups(), mesh_of("pairs").group("ep"), mesh_of("pairs").group("dp")
        for make, said in BAD.items():
            with pytest.raises(ValueError, match=said):
                make()

    lab.run(refused, 4)
