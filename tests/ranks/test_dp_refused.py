"""What the data-parallel wrappers refuse, by name, and what they do not have to."""

from __future__ import annotations

import functools
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.testing import assert_close

from dtlib import lab
from dtlib.ranks import dp, zero
from dtlib.ranks.collectives import ring_all_reduce
from dtlib.ranks.shared.clipping import clip_grad_norm
from tests.ranks.wrapped import ALL, network


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match=r"no process group: call this in a rank of lab.run"):
        dp.FlatDataParallel(network())


def refused(make, world_size=2):
    with pytest.raises(lab.RankError) as error:
        lab.run(make, world_size)
    return str(error.value)


def test_bad_sizes_are_named_before_anything_is_sent():
    words = refused(lambda: dp.BucketedDataParallel(network(), bucket_bytes=0))
    assert "ValueError: bucket_bytes must be at least 1, not 0" in words
    words = refused(lambda: dp.BucketedDataParallel(network(), first_bucket_bytes=0))
    assert "ValueError: first_bucket_bytes must be at least 1, not 0" in words


@pytest.mark.parametrize("wrap", ALL)
def test_a_module_without_trainable_parameters(wrap):
    words = refused(lambda: wrap(network().requires_grad_(False)))
    assert "ValueError: module must have a parameter that requires a gradient" in words


def test_a_group_without_this_rank():
    """torch's own collectives return at once there, and its group has -1 ranks: the loss would change its sign."""

    def outside():
        group = dist.new_group([0])
        if dist.get_rank() == 1:
            loss = torch.ones((), requires_grad=True)
            for call in (
                lambda: dp.FlatDataParallel(network(), group=group),
                lambda: dp.global_mean_loss(loss, 3, group=group),
                lambda: clip_grad_norm([torch.ones(3)], 1.0, group=group),
                lambda: zero.Zero(network(), functools.partial(torch.optim.SGD, lr=0.1), stage=1, group=group),
                lambda: ring_all_reduce(torch.ones(3), group=group),
            ):
                with pytest.raises(ValueError, match="group must contain th"):
                    call()

    lab.run(outside, 2)


@pytest.mark.parametrize("wrap", ALL)
def test_modules_that_differ_between_ranks(wrap):
    words = refused(lambda: wrap(network(8 + dist.get_rank())))
    assert "ValueError: module must be alike on all ranks" in words
    assert "'0.weight'" in words

    def frozen_on_one():
        model = network()
        model[2].bias.requires_grad_(dist.get_rank() == 0)
        wrap(model)

    assert "rank 1 and rank 0 differ in '2.bias'" in refused(frozen_on_one)


@pytest.mark.parametrize("wrap", ALL)
@pytest.mark.parametrize("change", ["freeze", "replace", "cast", "resize"])
def test_a_change_after_wrapping_is_refused(wrap, change):
    def changed():
        model = network()
        wrapped = wrap(model)
        if change == "freeze":
            model[2].weight.requires_grad_(False)
        elif change == "replace":
            model[2].weight = nn.Parameter(torch.zeros(8, 8))
        elif change == "resize":
            model[2].weight.data = torch.zeros(4, 8)
        else:
            model[2].double()
        with torch.no_grad() if change == "freeze" else nullcontext():
            wrapped(torch.ones(1, 8)) if change == "freeze" else None  # evaluating is still allowed
        wrapped(torch.ones(1, 8))

    words = refused(changed)
    assert "'2.weight'" in words
    assert "changed after the module was wrapped" in words


def test_sparse_gradients_are_refused_by_name():
    def sparse():
        for wrap in ALL:
            model = wrap(nn.Embedding(5, 3, sparse=True))
            with pytest.raises(RuntimeError, match="the gradient of 'weight' is sparse"):
                model(torch.tensor([1])).sum().backward()

    lab.run(sparse, 2)


def test_second_derivatives_are_those_of_one_process_or_refused():
    """A penalty on the input's gradient is one backward pass; a gradient with a graph would end on its rank."""

    def data(rank):
        return torch.randn(3, 8, generator=torch.Generator().manual_seed(rank))

    def penalty(model, x):
        x = x.requires_grad_()
        y = model(x).sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        return (gradient.square().sum() - 1).square() + y

    def penalised():
        found = []
        for wrap in ALL:
            torch.manual_seed(dist.get_rank())
            model = wrap(network())
            penalty(model, data(dist.get_rank())).backward()
            found.append([p.grad.clone() for p in model.parameters()])
            model.zero_grad()
            with pytest.raises(RuntimeError, match=r"to be differentiated again \(create_graph=True\)"):
                model(data(0)).square().sum().backward(create_graph=True)
        for stage in (1, 3):
            model = zero.Zero(network(), functools.partial(torch.optim.SGD, lr=0.1), stage=stage)
            refused = pytest.raises(RuntimeError, match=r"second derivatives inside gathered\(\)")
            with refused if stage == 3 else nullcontext():
                penalty(model, data(0))
        return found

    torch.manual_seed(0)
    whole = network()
    for rank in range(2):
        (penalty(whole, data(rank)) / 2).backward()
    for found in lab.run(penalised, 2):
        for grads in found:
            # float32, two ranks: sums in another order
            assert_close(grads, [p.grad for p in whole.parameters()], rtol=1e-5, atol=1e-7)


def test_gradients_wider_than_weights_travel_as_they_are():
    """As the 18-byte recipe asks for (grad_dtype): bf16 buckets would round what fp32 has added up."""

    def wide(wrap, before):
        model = network().bfloat16()
        for when in (before, not before):
            if when:
                for p in model.parameters():
                    p.grad_dtype = torch.float32
            else:
                wrapped = wrap(model)
        for passes in (0, 1):
            with wrapped.no_sync() if not passes else nullcontext():
                wrapped(torch.full((1, 8), 0.3 + passes + dist.get_rank()).bfloat16()).sum().backward()
        return model[2].weight.grad

    def job():
        with pytest.raises(RuntimeError, match=r"is torch.float32, and was to be torch.bfloat16 when the module was"):
            wide(dp.BucketedDataParallel, before=False)
        found = []
        for wrap in ALL:
            torch.manual_seed(0)
            found.append(wide(wrap, before=True).clone())
        return found

    naive, flat, bucketed = lab.run(job, 2)[0]
    assert naive.dtype == torch.float32
    assert not torch.equal(naive, naive.bfloat16().float()), "more digits than bf16 has"
    assert_close(flat, naive)
    assert_close(bucketed, naive)


def test_no_tokens_anywhere():
    words = refused(lambda: dp.global_mean_loss(torch.zeros((), requires_grad=True), 0))
    assert "num_tokens must be above 0 on some rank" in words
