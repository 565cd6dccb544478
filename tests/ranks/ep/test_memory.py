"""What a rank keeps of a model with experts under each stage of ZeRO, by tensors that a tracker found."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dtlib import lab
from dtlib.ranks import ep, zero
from dtlib.ranks.experts import MoE, Router
from dtlib.ranks.model import GPT, GPTConfig
from dtlib.theory.ep import kept_bytes, layer_parameters, state_bytes
from tests.ranks.threed.test_experts_bytes import in_turn

N = 4
SPARSE = GPTConfig(num_layers=1, num_experts=8, num_shared=1, expert_ratio=1, normalised=False)


def kept(stage, share):
    """Bytes of parameters, gradients and optimizer states of a rank after a step; `share` ranks share the experts."""
    rank = dist.get_rank()
    sharing = [dist.new_group(range(first, first + share)) for first in range(0, N, share)]
    holding = [dist.new_group(range(place, N, share)) for place in range(share)]
    model = ep.parallelize(GPT(SPARSE), sharing[rank // share], holders=holding[rank % share])
    model = zero.Zero(model, torch.optim.AdamW, stage=stage)
    token = torch.full((2, 3), rank)
    with lab.memory(model, model.optimizer, token) as memory:
        model(token).sum().backward()
        model.optimizer.step()
    now = memory.now
    counters = 4 * len(model.optimizer.state)  # the number of its step
    return now.parameters + now.gradients + now.optimizer - counters


@pytest.mark.parametrize("share", [1, 2, 4])
def test_states_are_shared_by_the_ranks_that_hold_them(share):
    """The experts of a rank over the N/ep that hold them, all else over N: on the fullest rank, and in the mean."""
    experts = layer_parameters(64, 64, 8, num_shared=1, gated=False).routed
    for stage in (1, 2, 3):
        found = lab.run(kept, N, args=(stage, share))
        law = state_bytes(experts, SPARSE.num_params - experts, dp=N, ep=share, stage=stage, recipe="fp32").total
        assert max(found) == pytest.approx(law, rel=2e-3), (stage, found)
        assert sum(found) / N == pytest.approx(law, rel=2e-3)
        unsplit = state_bytes(experts, SPARSE.num_params - experts, dp=N, ep=1, stage=stage, recipe="fp32").total
        assert (share == 1 or stage == 3) == (abs(law / unsplit - 1) < 1e-9)


SMALL = GPTConfig(hidden=16, num_heads=4, num_experts=6, top_k=3, expert_ratio=1.25)
OF_ALL = {  # of layers, and what else than the sizes the law has to be told
    "plain": (SMALL, {"gated": False}),
    "gated": (replace(SMALL, swiglu=True, scoring="sigmoid", normalised=False), {"normalised": False}),
    "shared": (replace(SMALL, num_shared=2, expert_scale=2.5), {"gated": False, "shared_hidden": 40}),
    "one of all": (replace(SMALL, top_k=1), {"gated": False}),
    "in groups": (replace(SMALL, swiglu=True, expert_groups=3, top_groups=2), {}),
}


def saved(config, dtype):
    """Bytes that autograd keeps of a layer with its experts on these ranks, the input apart, under uniform routing."""
    torch.manual_seed(0)
    moe, n = MoE(replace(config, dtype=dtype)), dist.get_world_size()
    if n > 1:
        moe.experts, moe.way = ep.OwnExperts(moe.experts, None), ep.Exchange(config.num_experts, None)
    x_th = torch.randn(60, config.hidden, dtype=dtype, requires_grad=True)
    with mock.patch.object(Router, "choose", in_turn):
        return lab.saved_bytes(moe, x_th, inputs=False).total


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_a_layer_keeps_what_the_law_says_to_the_byte(n):
    """The mean of the ranks, and where they share out the experts evenly each of them."""
    dtypes = (torch.bfloat16, torch.float32, torch.float64)
    by_rank = lab.run(lambda: [saved(each, d) for each, _ in OF_ALL.values() for d in dtypes], n)
    places = [(name, dtype) for name in OF_ALL for dtype in dtypes]
    for (name, dtype), *found in zip(places, *by_rank, strict=True):
        config, options = OF_ALL[name]
        sizes = 60, 16, config.expert_hidden, 6, config.top_k, n
        law = kept_bytes(*sizes, **options, element_bytes=dtype.itemsize)
        assert sum(found) / n == pytest.approx(law.total, rel=1e-12), (name, dtype)
        assert 6 % n or len(set(found)) == 1
        off = kept_bytes(*sizes, **options, element_bytes=dtype.itemsize, imbalance=1.05).total
        assert abs(off / law.total - 1) > 0.005  # a law that is off is seen
