"""The stages as one rank of many: the bytes at rest are theory's, without a second process."""

from __future__ import annotations

import functools

import pytest
import torch

from dtlib import lab, theory
from dtlib.ranks.model import GPT, GPTConfig, next_token_loss

from .small import STAGES

CONFIG = GPTConfig(num_layers=2, hidden=48)


def train(stage):
    wrapped = STAGES[stage](GPT(CONFIG), functools.partial(torch.optim.AdamW, lr=1e-3))
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    for _ in range(2):
        wrapped.optimizer.zero_grad()
        next_token_loss(wrapped(tokens), tokens).backward()
        wrapped.clip_grad_norm_(1.0)
        wrapped.optimizer.step()
    with lab.memory(wrapped, wrapped.optimizer) as memory:
        pass
    pieces = sum(len(group["params"]) for group in wrapped.optimizer.param_groups)
    return memory.now.as_dict(), [shard.num_elements for shard in wrapped.shards], pieces


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("n", "rank"), [(8, 0), (64, 63)])
def test_bytes_at_rest(stage, n, rank):
    now, flats, pieces = lab.at_scale(train, n, rank, args=(stage,)).result
    expected = theory.zero.states_of_rank([(size,) for size in flats], n, stage, rank, "fp32")
    assert now["parameters"] == expected.weights
    assert now["gradients"] == expected.gradients
    assert now["optimizer"] == expected.optimizer + 4 * pieces  # Adam counts the steps of each piece in a float32
