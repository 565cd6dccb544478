"""PipeDream against one process that is told which weights each stage uses; versions kept; what no stashing gives."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.func import functional_call
from torch.testing import assert_close

from dtlib import lab
from dtlib.ranks import model as gpt
from dtlib.ranks import pp
from dtlib.theory.pp import weight_versions

CONFIG = gpt.GPTConfig(num_layers=4, hidden=8, num_heads=2, seq=6, vocab=17, tied=False, dtype=torch.float64)
STEPS, RATE = 9, 0.5


def data():
    tokens = torch.randint(17, (2 * STEPS, 7), generator=torch.Generator().manual_seed(3))
    return tokens[:, :-1], tokens[:, 1:]


def on_a_rank(way):
    torch.manual_seed(dist.get_rank())
    stage = pp.cut(gpt.GPT(CONFIG), dist.get_world_size())[dist.get_rank()]
    sgd = partial(torch.optim.SGD, lr=RATE)
    losses, versions = pp.train_pipedream(stage, sgd, *data(), STEPS, width=8, dtype=torch.float64, way=way)
    return losses, versions, {name: each.detach() for name, each in stage.named_parameters()}


def told(p, behind):
    """One process: stage r computes micro-batch i with its weights after i − behind[r] steps."""
    stages = pp.cut(gpt.GPT(CONFIG), p)
    history = [[{name: each.detach() for name, each in stage.named_parameters()}] for stage in stages]
    losses = []
    for i, (x, y) in enumerate(zip(*(each.chunk(STEPS) for each in data()), strict=True)):
        used = [
            {name: each.clone().requires_grad_() for name, each in history[r][max(0, i - behind[r])].items()}
            for r in range(p)
        ]
        for stage, weights in zip(stages, used, strict=True):
            x = functional_call(stage, weights, (x,))
        loss = gpt.next_token_loss(x, y)
        loss.backward()
        losses.append(loss.item())
        for r in range(p):
            now = history[r][-1]
            history[r].append({name: now[name] - RATE * used[r][name].grad for name in now})
    return losses, [each[-1] for each in history]


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_each_micro_batch_is_trained_at_the_weights_that_its_way_says(p):
    for way in ("stashed", "vertical sync"):
        found = lab.run(on_a_rank, p, args=(way,))
        behind = [p - 1 if way == "vertical sync" else p - 1 - r for r in range(p)]
        losses, weights = told(p, behind)
        assert_close(found[-1][0], losses, rtol=1e-10, atol=0)  # sums in another order
        for r in range(p):
            assert found[r][1] == weight_versions(p, r, vertical_sync=way == "vertical sync")
            assert_close(found[r][2], weights[r], rtol=1e-10, atol=1e-12)


def test_without_stashing_the_result_is_no_gradient_at_any_weights():
    found = lab.run(on_a_rank, 3, args=("newest",))
    assert [each[1] for each in found] == [1, 1, 1]
    losses, weights = told(3, [2, 1, 0])
    assert found[-1][0][:2] == pytest.approx(losses[:2])  # until the first step is felt
    name = "blocks.0.mlp.up.weight"
    difference = (found[0][2][name] - weights[0][name]).abs().max()
    moved = (weights[0][name] - dict(pp.cut(gpt.GPT(CONFIG), 3)[0].named_parameters())[name]).abs().max()
    assert difference > 1e-4 * moved


def test_another_way_is_refused():
    with pytest.raises(ValueError, match="way must be one of stashed, vertical sync, newest, not 'none'"):
        pp.Versioned(torch.nn.Linear(2, 2), partial(torch.optim.SGD, lr=1), 0, 1, "none")
