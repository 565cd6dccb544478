"""Bytes that the states of training have on a card after a step, by its allocator, beside `theory.memory`."""

import functools

import pytest
import torch

from dtlib import lab, theory
from dtlib.ranks.memory import MixedAdamW
from dtlib.ranks.model import GPT, GPTConfig, next_token_loss
from tests.gpu import allocator

SIZES = GPTConfig(num_layers=2, hidden=256, num_heads=4, seq=64)


def step_of(model, optimizer, autocast=False):
    tokens = torch.randint(256, (2, SIZES.seq), device="cuda")
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        loss = next_token_loss(model(tokens), tokens)
    loss.backward()
    optimizer.step()


def bytes_a_parameter(make, dtype, autocast=False):
    """What is there after a step, over the number of parameters. In a first round libraries take their workspace."""
    for _ in range(2):
        before = allocator.begin()
        model = GPT(GPTConfig(**{**vars(SIZES), "dtype": dtype})).cuda()
        optimizer = make(model.parameters())
        step_of(model, optimizer, autocast)
        found = (allocator.now() - before) / sum(parameter.numel() for parameter in model.parameters())
        del model, optimizer
    return found


@pytest.mark.parametrize("name", list(theory.memory.RECIPES))
def test_a_recipe_takes_its_bytes(name):
    recipe = theory.memory.RECIPES[name]
    dtype = torch.float32 if recipe.per_param.weights == 4 else torch.bfloat16
    found = bytes_a_parameter(functools.partial(MixedAdamW, recipe_name=name), dtype)
    # The short last blocks of 8-bit moments have a scale each, 8 bytes a parameter tensor.
    assert found == pytest.approx(recipe.bytes_per_param, rel=1e-3 if name == "adam-8bit" else 1e-12)


def test_autocast_leaves_sixteen_bytes_of_fp32():
    found = bytes_a_parameter(torch.optim.AdamW, torch.float32, autocast=True)
    assert found == pytest.approx(theory.memory.RECIPES["fp32"].bytes_per_param, rel=1e-12)


def test_torchs_adamw_on_bf16_weights_keeps_moments_in_bf16_and_is_no_recipe_of_twelve_bytes():
    found = bytes_a_parameter(torch.optim.AdamW, torch.bfloat16)
    assert found == pytest.approx(8, rel=1e-12)


def test_a_step_on_the_card_is_the_step_on_the_host():
    gradient = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    for name in theory.memory.RECIPES:
        dtype = torch.float32 if name == "fp32" else torch.bfloat16
        found = []
        for device in ("cpu", "cuda"):
            parameter = torch.nn.Parameter(torch.linspace(-1, 1, 1000).to(dtype).to(device))
            optimizer = MixedAdamW([parameter], name, lr=0.1)
            for _ in range(3):
                parameter.grad = gradient.to(parameter.grad_dtype or dtype).to(device)
                optimizer.step()
            found.append(parameter.detach().cpu())
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("written_out", [False, True])
def test_what_the_lab_counts_is_what_the_allocator_was_asked_for(written_out):
    config = GPTConfig(num_layers=2, hidden=512, num_heads=8, seq=512, dropout=0.1, written_out=written_out)
    tokens = torch.randint(256, (4, config.seq), device="cuda")
    empty = allocator.begin()
    model = GPT(config).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step():
        optimizer.zero_grad()
        next_token_loss(model(tokens), tokens).backward()
        optimizer.step()

    step()
    workspace = allocator.now()
    step()
    assert allocator.now() == workspace
    allocator.begin()
    with lab.memory(model, optimizer) as memory:
        held = allocator.now() - memory.now.total
        step()
        assert abs(allocator.now() - memory.now.total - held) <= tokens.nbytes  # counted once an operation touches them
    assert memory.now.optimizer == memory.now.parameters == memory.now.gradients
    assert held < empty + 2**27  # what nobody counts: the workspaces of libraries
    # What an operation needs inside itself is not counted: a tenth at the peak, at most.
    peak = allocator.peak() - held
    assert memory.peak <= peak + tokens.nbytes
    assert peak <= 1.1 * memory.peak
