"""Second derivatives and autocast: as in one process, or refused by name."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.autograd import gradgradcheck
from torch.autograd.gradcheck import GradcheckError
from torch.testing import assert_close

from dtlib import lab
from dtlib.lab.recorder import Recorder
from dtlib.ranks import activations, cp, sp, tp
from dtlib.ranks import model as gpt
from dtlib.ranks.model import GPT, MLP, GPTConfig, RMSNorm, next_token_loss, rotate

# sums of a few terms of float64 in another order
CLOSE = {"rtol": 1e-10, "atol": 1e-12}
DOUBLE = {"dtype": torch.float64, "requires_grad": True}
SMALL = GPTConfig(num_layers=1, hidden=8, num_heads=2, seq=6, vocab=11, mlp_ratio=2, dtype=torch.float64)


def test_one_process_has_second_derivatives():
    norm, x = RMSNorm(6, dtype=torch.float64), torch.randn(2, 3, 6, **DOUBLE)
    assert gradgradcheck(norm, (x,))
    assert gradgradcheck(lambda x, weight: gpt._RMSNorm.apply(x, weight), (x, torch.randn(6, **DOUBLE)))
    assert gradgradcheck(partial(rotate, offset=3), (torch.randn(1, 3, 2, 4, **DOUBLE),))
    scale = gpt._RMSNorm.scale
    with (
        mock.patch.object(gpt._RMSNorm, "scale", staticmethod(lambda x: scale(x).detach())),
        pytest.raises(GradcheckError),
    ):
        gradgradcheck(norm, (x,))


def penalised(fn, x, parameters):
    """Gradients of a loss that has the first derivative in it."""
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(fn(x).square().sum(), x, create_graph=True)
    return torch.autograd.grad(slope.square().sum(), [x, *parameters])


@pytest.mark.parametrize("config", [SMALL, replace(SMALL, rms_norm=True, swiglu=True, rotary=True, written_out=True)])
def test_what_is_computed_again_has_them_too(config):
    layer, x = gpt.Block(replace(config, written_out=True)), torch.randn(1, 4, 8, **DOUBLE)
    plain = penalised(layer, x, layer.parameters())
    assert_close(penalised(partial(activations.checkpoint, layer), x, layer.parameters()), plain, **CLOSE)


def test_the_pairs_on_the_page_have_second_derivatives():
    torch.manual_seed(0)
    mlp, x = MLP(replace(SMALL, hidden=6)), torch.randn(2, 6, 6, dtype=torch.float64)
    wholes = penalised(mlp, x, mlp.parameters())
    (slope,) = torch.autograd.grad(mlp(x.requires_grad_()).square().sum(), x, create_graph=True)
    (of_x,) = torch.autograd.grad((slope.square() + slope).sum(), x)

    def on_a_rank():
        t, rank = dist.get_world_size(), dist.get_rank()
        whole = (mlp.up.weight, mlp.up.bias, mlp.down.weight.T)
        up, up_bias, down = (each.detach().tensor_split(t)[rank].clone().requires_grad_() for each in whole)
        down_bias = mlp.down.bias.detach().clone().requires_grad_()

        def split(x, enter=tp.copy_to_ranks, leave=tp.sum_over_ranks):
            linear, gelu = torch.nn.functional.linear, torch.nn.functional.gelu
            return leave(gelu(linear(enter(x), up, up_bias), approximate="tanh") @ down) + down_bias

        ours = penalised(split, x, (up, up_bias, down, down_bias))
        own = x.detach().tensor_split(t, 1)[rank].clone().requires_grad_()
        y = split(own, sp.gather_tokens, sp.scatter_sum)
        (slope,) = torch.autograd.grad(y.square().sum(), own, create_graph=True)
        return ours, torch.autograd.grad((slope.square() + slope).sum(), own)[0]

    by_rank = lab.run(on_a_rank, 3)
    names = [name for name, _ in mlp.named_parameters()]
    whole = dict(zip(["x", *names], wholes, strict=True))
    for rank, ((first, up, up_bias, down, down_bias), _) in enumerate(by_rank):
        assert_close(first, whole["x"], **CLOSE)
        assert_close(up, whole["up.weight"].tensor_split(3)[rank], **CLOSE)
        assert_close(up_bias, whole["up.bias"].tensor_split(3)[rank], **CLOSE)
        assert_close(down.T, whole["down.weight"].tensor_split(3, 1)[rank], **CLOSE)
        assert_close(down_bias, whole["down.bias"], **CLOSE)
    assert_close(torch.cat([own for _, own in by_rank], 1), of_x, **CLOSE)


def test_what_has_none_says_so():
    """Functions that send in a way of their own."""

    def calls():
        column, row = tp.ColumnParallelLinear(torch.nn.Linear(4, 4)), tp.RowParallelLinear(torch.nn.Linear(4, 4))
        layout, tokens = cp.Layout(8), torch.zeros(1, 2, dtype=torch.long)
        inputs = {
            lambda x: column(x): (1, 2, 4),
            lambda x: row(x): (1, 2, 2),
            lambda x: tp.next_token_loss(x, tokens, vocab=4): (1, 2, 2),
            lambda x: cp.ring_attention(x, x, x, layout): (1, 2, 4, 4),
            lambda x: cp.ulysses_attention(x, x, x, layout): (1, 2, 4, 4),
        }
        for fn, shape in inputs.items():
            x = torch.randn(shape, requires_grad=True)
            (slope,) = torch.autograd.grad(fn(x).square().sum(), x, create_graph=True)
            with pytest.raises(RuntimeError, match="once_differentiable"):
                slope.square().sum().backward()

    lab.run(calls, 2)


def strided(tensor):
    """The same entries, with gaps between them and the last dimension first in memory."""
    return torch.stack([tensor, tensor]).movedim(-1, 0).contiguous().movedim(0, -1)[1]


def test_what_is_not_contiguous_is_as_good():
    """Inputs, and gradients of outputs."""

    def on_a_rank():
        column, row = tp.ColumnParallelLinear(torch.nn.Linear(4, 4)), tp.RowParallelLinear(torch.nn.Linear(4, 4))
        layout, tokens = cp.Layout(8), torch.tensor([[1, 3]])
        inputs = {
            lambda x: column(x): (2, 6, 4), lambda x: row(x): (2, 6, 2), sp.gather_tokens: (2, 6, 4),
            sp.scatter_sum: (2, 6, 4), tp.copy_to_ranks: (2, 6, 4), tp.sum_over_ranks: (2, 6, 4),
            lambda x: tp.next_token_loss(x, tokens, vocab=4): (1, 2, 2),
            lambda x: cp.ring_attention(x, x.sin(), x.cos(), layout): (1, 2, 4, 4),
            lambda x: cp.ulysses_attention(x, x.sin(), x.cos(), layout): (1, 2, 4, 4),
        }  # fmt: skip
        for fn, shape in inputs.items():
            found = []
            for as_is in (torch.clone, strided):
                torch.manual_seed(dist.get_rank())
                x = as_is(torch.randn(shape, dtype=torch.float32)).requires_grad_()
                y = fn(x)
                gradient = as_is(torch.randn_like(y, memory_format=torch.contiguous_format)) if y.dim() else None
                found.append((y, *torch.autograd.grad(y, x, gradient)))
                assert x.is_contiguous() == (as_is is torch.clone)
            assert_close(*found)

    lab.run(on_a_rank, 2)


# --- autocast ---------------------------------------------------------------------------------------------------------


LLAMA = GPTConfig(
    num_layers=2, hidden=48, num_heads=6, num_kv_heads=3, seq=12, vocab=19, rms_norm=True, swiglu=True, rotary=True
)
CONFIGS = {"gpt": replace(LLAMA, num_kv_heads=None, rms_norm=False, swiglu=False, rotary=False), "llama": LLAMA}
WAYS = {"tp": tp.parallelize, "sp": sp.parallelize, "again": partial(sp.parallelize, gather_again=True),
        "cp": cp.parallelize, "ulysses": partial(cp.parallelize, way="ulysses")}  # fmt: skip


def a_step(config, way=None, autocast=True):
    tokens = torch.randint(config.vocab, (2, 12), generator=torch.Generator().manual_seed(1))
    model, group = GPT(config), {"vocab": config.vocab} if way in ("tp", "sp", "again") else {}
    loss_of = next_token_loss
    if way is not None:
        model, loss_of = WAYS[way](model), tp.next_token_loss if group else cp.next_token_loss
    with Recorder() as recorder, torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        logits = model(tokens)
        loss = loss_of(logits, tokens, **group)
    loss.backward()
    gradients = {name: each.grad for name, each in model.named_parameters()}
    sent = sum(call.full_bytes for call in recorder.log if call.full_bytes > 1000)
    return logits.dtype, loss.item(), tp.unsplit(model, gradients), sent


@pytest.mark.parametrize("name", CONFIGS)
def test_autocast_is_that_of_one_process(name):
    """Rounded to bf16, 2⁻⁸, in another order: a few per cent of a gradient's norm, as against one process without."""
    config = CONFIGS[name]

    def on_a_rank():
        return {way: (a_step(config, way), a_step(config, way, autocast=False)[3]) for way in WAYS}

    dtype, loss, gradients, _ = a_step(config)
    for found in lab.run(on_a_rank, 3):
        for way, ((ours, our_loss, our_gradients, sent), wide) in found.items():
            assert ours == dtype == torch.bfloat16
            assert our_loss == pytest.approx(loss, rel=1e-2), way
            for each, of in our_gradients.items():
                assert of.dtype == torch.float32
                assert (of - gradients[each]).norm() < 0.05 * gradients[each].norm(), (way, each)
            assert sent < 0.75 * wide, way  # most of it travels in two bytes


def test_autocast_does_not_round_the_scores_of_a_ring():
    def on_a_rank():
        layout, x = cp.Layout(12), torch.randn(2, 6, 4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
        plain = cp.ring_attention(x, x, x, layout)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.equal(cp.ring_attention(x, x, x, layout), plain)

    assert lab.run(on_a_rank, 3) == [True] * 3
