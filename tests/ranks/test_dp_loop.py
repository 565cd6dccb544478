"""The training loop around a data-parallel wrapper is that of one process, and that around torch's DDP."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from dtlib import lab, theory
from dtlib.ranks import dp
from dtlib.ranks.model import GPT, IGNORED, GPTConfig, batches, load_text, next_token_loss
from tests.ranks.wrapped import ALL, network

# --- the tiny GPT, beside torch's DDP -----------------------------------------------------------------------


def train_gpt(wrap, seed, config=None):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = wrap(GPT(config or GPTConfig(num_layers=3, hidden=128), seed=seed + rank))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data, sent = batches(load_text(), batch=12, seq=8, rank=rank, world_size=world_size), []
    for _ in range(3):
        tokens, targets = next(data)
        optimizer.zero_grad()
        with lab.wire() as wire:
            next_token_loss(model(tokens), targets).backward()
        sent.append(wire.total_bytes)
        optimizer.step()
    parameters = list(getattr(model, "module", model).parameters())
    return [p.detach() for p in parameters], [p.grad for p in parameters], sent


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_gpt_trains_as_with_torchs_ddp_for_the_same_bytes(world_size):
    ours = lab.run(train_gpt, world_size, args=(dp.BucketedDataParallel, 5))
    torchs = lab.run(train_gpt, world_size, args=(DistributedDataParallel, 5))
    for (weights, grads, sent), (their_weights, their_grads, their_sent) in zip(ours, torchs, strict=True):
        # float32. Both scale by 1/N and add N numbers; gloo's ring adds them in an order that depends on where in the
        # bucket a number lies: N−1 roundings of 2⁻²⁴ relative to the largest addend, here below 1.
        assert_close(grads, their_grads, rtol=1e-5, atol=1e-7)
        assert_close(weights, their_weights, rtol=1e-4, atol=1e-5)  # AdamW divides by the size of small gradients
        assert_close([float(b) for b in sent], [float(b) for b in their_sent], rtol=0.01, atol=0)
        assert_close(weights, ours[0][0], rtol=0, atol=0)
    full_bytes = 4 * GPTConfig(num_layers=3, hidden=128).num_params
    expected = world_size * theory.dp.sent_bytes_per_step(full_bytes, world_size)
    for sent in ours[0][2]:
        assert sent == pytest.approx(expected, rel=0.01)


# --- the training loop is that of one process ---------------------------------------------------------------


@pytest.mark.parametrize("wrap", ALL)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_both_ways_of_clearing_gradients(wrap, set_to_none):
    def clear():
        torch.manual_seed(0)
        model, grads = wrap(network()), []
        for step in range(3):
            model.zero_grad(set_to_none=set_to_none)
            model(torch.full((2, 8), float(dist.get_rank() + step))).sum().backward()
            grads.append(model.module[0].weight.grad.clone())
        return grads

    torch.manual_seed(0)
    alone = network()
    for result in lab.run(clear, 2):
        for step, grad in enumerate(result):
            alone.zero_grad()
            (sum(alone(torch.full((2, 8), float(r + step))).sum() for r in range(2)) / 2).backward()
            assert_close(grad, alone[0].weight.grad)


@pytest.mark.parametrize("wrap", ALL)
def test_a_second_backward_pass_adds_its_mean_to_the_first(wrap):
    def twice():
        model = wrap(nn.Linear(1, 1, bias=False))
        for value in (1.0, 10.0):
            model(torch.tensor([[value * (dist.get_rank() + 1)]])).sum().backward()
        return model.weight.grad.item()

    assert lab.run(twice, 3) == [pytest.approx(22.0)] * 3  # mean of 1, 2, 3 and mean of 10, 20, 30


def two_forwards_then_backward(wrap):
    torch.manual_seed(dist.get_rank())
    model = wrap(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    x_bh = torch.randn(8, 4)
    (model(x_bh) - model(2 * x_bh)).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def torchs_with_own_statistics(module):
    """torch's wrapper, whose ranks keep their statistics: no gradient of a training pass depends on them, and up to
    torch 2.11 the second pass would write into buffers of the first, which autograd refuses (pytorch issue 175024)."""
    wrapped = DistributedDataParallel(module)
    wrapped.broadcast_buffers = False
    return wrapped


@pytest.mark.parametrize("wrap", ALL)
def test_two_forward_passes_before_one_backward_pass(wrap):
    # Between the passes rank 0's statistics arrive in buffers that the first pass has saved for its backward.
    ours = lab.run(two_forwards_then_backward, 2, args=(wrap,))
    torchs = lab.run(two_forwards_then_backward, 2, args=(torchs_with_own_statistics,))
    # float32: the same numbers, added in another order (see the test of the tiny GPT).
    assert_close(ours, torchs, rtol=1e-5, atol=1e-6)


def gradients_of_a_copy(wrap):
    copied = copy.deepcopy(wrap(nn.Linear(2, 1)))
    copied(torch.full((1, 2), float(dist.get_rank()))).sum().backward()
    return [parameter.grad for parameter in copied.parameters()]


@pytest.mark.parametrize("wrap", ALL)
def test_a_copied_wrapper_still_averages(wrap):
    for weight, bias in lab.run(gradients_of_a_copy, 2, args=(wrap,)):
        assert_close(weight, torch.full((1, 2), 0.5), rtol=0, atol=0)  # the mean of 0 and 1: exact
        assert_close(bias, torch.ones(1), rtol=0, atol=0)


@pytest.mark.parametrize("wrap", ALL)
def test_state_and_attributes_are_the_modules_own(wrap):
    def state():
        model = network()
        model.note = "here"
        wrapped = wrap(model)
        same = list(wrapped.state_dict()) == list(model.state_dict())
        wrapped.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})
        with pytest.raises(AttributeError):
            _ = wrapped.nowhere
        return same, wrapped.note, model[0].weight.unique().tolist(), wrapped(torch.zeros(1, 8)).shape == (1, 1)

    assert lab.run(state, 2) == [(True, "here", [1.0], True)] * 2


@pytest.mark.parametrize("wrap", ALL)
def test_a_module_that_is_wrapped_anew_is_averaged_once(wrap):
    def again():
        model = nn.Linear(1, 1, bias=False)
        wrapped = wrap(model)
        wrapped = wrap(model)
        with lab.wire() as wire:
            wrapped(torch.tensor([[dist.get_rank() + 1.0]])).sum().backward()
        return model.weight.grad.item(), wire.total_bytes

    for grad, total in lab.run(again, 2):
        assert grad == pytest.approx(1.5)
        assert total < 1000


def test_a_wrapper_that_is_dropped_is_freed_and_its_module_trains_alone():
    """On two ranks: a hook of autograd that held the wrapper would hide it from the garbage collector."""

    class Held(dp.FlatDataParallel):
        def _listen(self):
            for index, parameter in enumerate(self._params):
                parameter.register_post_accumulate_grad_hook(functools.partial(self._on_gradient, index))

    def step_and_drop(wrap, model):
        wrapped = wrap(model)
        wrapped(torch.ones(1, 8)).sum().backward()
        return weakref.ref(wrapped)

    def averaged_though_dropped(wrap):
        torch.manual_seed(0)
        model = network()
        loss = wrap(model)(torch.full((1, 8), 1.0 + dist.get_rank())).sum()
        gc.collect()
        loss.backward()
        both = [torch.empty(1) for _ in range(2)]
        dist.all_gather(both, model[2].weight.grad.sum()[None])
        assert both[0] == both[1], "a forward pass keeps the wrapper until its backward pass"

    def dropped():
        freed = []
        for wrap in ALL:
            averaged_though_dropped(wrap)
        for wrap in (*ALL, Held):
            model = network()
            wrapper, module = step_and_drop(wrap, model), weakref.ref(model)
            gc.collect()
            if wrap is not Held and dist.get_rank() == 0:
                model(torch.ones(1, 8)).sum().backward()  # alone: what was sent would wait for ever
            del model
            gc.collect()
            freed.append((wrapper() is None, module() is None))
        return freed

    assert lab.run(dropped, 2, timeout_s=30) == [[(True, True)] * 3 + [(False, False)]] * 2


@pytest.mark.parametrize("wrap", ALL)
def test_one_rank_sends_nothing(wrap):
    def alone():
        model = wrap(network(), find_unused_parameters=True)
        with lab.wire() as wire:
            model(torch.ones(1, 8)).sum().backward()
        return wire.total_bytes, model.module[0].weight.grad is not None

    assert lab.run(alone, 1) == [(0, True)]


# --- unequal numbers of tokens ------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [[8, 8, 8], [8, 3, 1], [8, 0, 5]])
def test_global_mean_loss_is_the_mean_over_all_tokens(kept):
    config = GPTConfig(num_layers=1, hidden=16, dtype=torch.float64)

    def padded(rank):
        tokens, targets = next(batches(load_text(), batch=3, seq=8, rank=rank, world_size=3))
        targets[:, kept[rank] :] = IGNORED
        return tokens, targets

    def share():
        model = dp.FlatDataParallel(GPT(config))
        tokens, targets = padded(dist.get_rank())
        loss = next_token_loss(model(tokens), targets, reduction="sum")
        dp.global_mean_loss(loss, int((targets != IGNORED).sum())).backward()
        return [p.grad for p in model.parameters()]

    whole = GPT(config)
    tokens, targets = (torch.cat(rows) for rows in zip(*(padded(r) for r in range(3)), strict=True))
    next_token_loss(whole(tokens), targets).backward()
    for grads in lab.run(share, 3):
        # the loss itself is taken in float32: a relative 2⁻²⁴ a token, of gradients below 1
        assert_close(grads, [p.grad for p in whole.parameters()], rtol=1e-4, atol=1e-7)


def test_global_mean_loss_over_micro_batches_of_different_lengths():
    x = torch.arange(6.0, dtype=torch.float64)
    pieces = [[x[:1], x[1:3]], [x[3:4], x[4:]]]  # by rank, by micro-batch

    def accumulate():
        model = dp.BucketedDataParallel(nn.Linear(1, 1, bias=False, dtype=torch.float64))
        mine = pieces[dist.get_rank()]
        for last, piece in enumerate(mine):
            with nullcontext() if last else model.no_sync():
                dp.global_mean_loss(model(piece[:, None]).sum(), sum(map(len, mine))).backward()
        return model.weight.grad.item()

    assert lab.run(accumulate, 2) == [pytest.approx(x.mean().item())] * 2
