"""Local steps: statistics of norms, what is saved and loaded, and what is refused before anything is sent."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

from dtlib import lab
from dtlib.ranks import compression, zero
from dtlib.ranks.asynchrony import LocalSGD
from dtlib.ranks.asynchrony.local import in_parts

from .oracle import Small, flat
from .test_local import CASES, STEPS, adam, made, nesterov, sgd, train


class Normed(nn.Module):
    """A layer behind a norm that keeps statistics."""

    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(6), nn.Linear(6, 1)

    def forward(self, x):
        """Norm, layer."""
        return self.layer(self.norm(x))


def with_norm(average_buffers):
    """In a rank: after a meeting, statistics, weights, and what the model gives in evaluation."""
    rank, model = dist.get_rank(), Normed()
    local = LocalSGD(model, sgd(model.parameters()), local_steps=2, average_buffers=average_buffers)
    own = torch.Generator().manual_seed(rank)
    for _ in range(2):
        local.zero_grad()
        before = {name: each.clone() for name, each in model.named_buffers()}
        x = 3 * rank + torch.randn(16, 6, generator=own)
        model(x).square().mean().backward()
        local.step()
    moved = 0.9 * before["norm.running_mean"] + 0.1 * x.mean(0)
    return model.norm.running_mean.clone(), moved, flat(model), int(model.norm.num_batches_tracked)


def test_statistics_of_a_norm_are_averaged_or_refused():
    found = lab.run(with_norm, 3, args=(True,))
    mean = sum(moved for _, moved, _, _ in found) / 3
    for statistics, _, weights, seen in found:
        assert_close(statistics, mean)
        assert torch.equal(weights, found[0][2])
        assert seen == 2
    apart = lab.run(with_norm, 3, args=(False,))  # the mutant: one model's weights, statistics of three
    for statistics, moved, weights, _ in apart:
        assert_close(statistics, moved)
        assert torch.equal(weights, apart[0][2])
        with pytest.raises(AssertionError):
            assert_close(statistics, mean)
    with pytest.raises(
        lab.RankError, match=r"average_buffers must be True or False for a model with norm\.running_mean"
    ):
        lab.run(with_norm, 2, args=(None,))


def test_what_is_saved_goes_on_to_the_bit():
    names = ("adam, kept", "two parts, outer", "all, outer", "sparse", "late, outer", "late as can be")

    def saved(name):
        CASES["sparse"] = adam, {"exchange": compression.TopK(0.2), "outer": nesterov}, {}
        model, local = made(name)
        train(model, local, range(6))
        weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(local.state_dict())
        straight = train(model, local, range(6, STEPS))
        again, other = made(name)
        again.load_state_dict(weights)
        other.load_state_dict(state)
        found = train(again, other, range(6, STEPS))
        return all(torch.equal(a, b) for a, b in zip(straight, found, strict=True))

    assert lab.run(lambda: [name for name in names if not saved(name)], 3) == [[]] * 3


def test_ranks_that_count_differently_are_told():
    """Mutant: each rank counts its own warm-up, so that one waits in a meeting to which no other comes."""

    def own_warm_up():
        model = Small()
        LocalSGD(model, sgd(model.parameters()), local_steps=4, warm_up=dist.get_rank())

    def own_steps():
        model = Small()
        local = LocalSGD(model, sgd(model.parameters()), local_steps=4)
        local.load_state_dict({**local.state_dict(), "steps": dist.get_rank()})

    with pytest.raises(lab.RankError, match=r"LocalSGD must be alike on all ranks of group; rank 0 has .*warm_up=0"):
        lab.run(own_warm_up, 2)
    with pytest.raises(lab.RankError, match=r"must be alike .* rank 0 has steps=0, and rank 1 steps=1"):
        lab.run(own_steps, 2)


def test_a_difference_that_is_not_finite_is_told_and_nothing_of_it_kept():
    def poisoned():
        model = Small()
        local = LocalSGD(model, sgd(model.parameters()), local_steps=1, exchange=compression.TopK(0.5), outer=nesterov)
        train(model, local, range(2))
        before = copy.deepcopy(local.state_dict()["old"])
        if dist.get_rank() == 1:
            with torch.no_grad():
                model.second.weight[0, 0] = torch.inf
        with pytest.raises(FloatingPointError, match=r"not finite: 'second\.weight' on rank 1"):
            local._meet(0)
        assert all(torch.equal(a, b) for a, b in zip(before[0], local.state_dict()["old"][0], strict=True))

    lab.run(poisoned, 2)


REFUSED = [
    ({"local_steps": 0}, "local_steps must be at least 1"),
    ({"warm_up": -1}, "warm_up must be at least 0"),
    ({"fragments": 3}, "fragments must divide local_steps, 4"),
    ({"fragments": 4, "local_steps": 4}, "be at most the number of parameters, 3; 4"),
    ({"overlap": 5}, "overlap must be at most local_steps over fragments"),
    ({"overlap": 3, "fragments": 2}, "overlap must be at most local_steps over fragments"),
    ({"overlap": 1, "kept": 1.0}, "kept must be below 1, not 1.0"),
    ({"outer": 3}, "outer must be a function of parameters"),
    ({"inside": (2,)}, "inside must be steps and a group"),
    ({"states": "lost"}, "states must be one of kept, averaged, restarted"),
    ({"exchange": "ring"}, "exchange must be a function"),
    ({"weight": -1.0}, "weight must be finite and zero or more"),
    ({"weight": 0.0}, "weight must be above 0 on some rank"),
]


def test_options_out_of_range_are_refused():
    def asked():
        for options, told in REFUSED:
            model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False))
            with pytest.raises(ValueError, match=told):
                LocalSGD(model, sgd(model.parameters()), **{"local_steps": 4, **options})
        for stage in (1, 2, 3):
            sharded = zero.Zero(model := nn.Linear(3, 3), sgd, stage=stage)
            with pytest.raises(ValueError, match="optimizer must step parameters of model, and steps none of them"):
                LocalSGD(model, sharded.optimizer, local_steps=4)

    lab.run(asked, 1)


def test_the_state_of_other_options_is_refused_and_changes_nothing():
    def asked():
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False))
        made = {}
        for name, options in {"plain": {}, "late": {"overlap": 1}, "parts": {"overlap": 1, "fragments": 2}}.items():
            made[name] = LocalSGD(model, sgd(model.parameters()), local_steps=4, **options)
        state = made["late"].state_dict() | {"steps": 5}
        for name, other in (("plain", state), ("parts", state), ("late", {}), ("late", None)):
            with pytest.raises(ValueError, match="state must be"):
                made[name].load_state_dict(other)
            assert made[name].steps == 0
        made["late"].load_state_dict(state)
        assert made["late"].steps == 5

    lab.run(asked, 1)


def test_parts_are_neighbours_of_about_equal_size():
    assert in_parts({"a": 24, "b": 16, "c": 4}, 1) == [["a", "b", "c"]]
    assert in_parts({"a": 24, "b": 16, "c": 4}, 2) == [["a"], ["b", "c"]]
    assert in_parts({"a": 100, "b": 1, "c": 1}, 3) == [["a"], ["b"], ["c"]]
    assert in_parts({"a": 1, "b": 1, "c": 100}, 2) == [["a", "b"], ["c"]]
    assert in_parts(dict.fromkeys("abcdef", 0), 3) == [["a", "b", "c", "d"], ["e"], ["f"]]
