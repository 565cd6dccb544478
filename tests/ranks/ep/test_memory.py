"""What a rank keeps of a model with experts under each stage of ZeRO, by tensors that a tracker found."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from dtlib import lab
from dtlib.ranks import ep, zero
from dtlib.ranks.model import GPT, GPTConfig
from dtlib.theory.ep import layer_parameters, state_bytes

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
