"""Options of the data-parallel wrappers: which ranks and tensors, buckets, and backward passes of every kind."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from dtlib import lab, theory
from dtlib.ranks import dp, pp
from tests.ranks.wrapped import ALL, network

# --- which ranks, which tensors -----------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", ALL)
def test_a_group_of_some_ranks(wrap):
    def pairs():
        groups = [dist.new_group([0, 2]), dist.new_group([3, 1])]
        rank = dist.get_rank()
        group = groups[rank % 2]
        torch.manual_seed(rank)
        model = wrap(nn.Linear(1, 1, bias=False), group=group)
        start = model.weight.item()
        model(torch.tensor([[float(rank)]])).sum().backward()
        return start, model.weight.grad.item()

    results = lab.run(pairs, 4)
    assert [grad for _, grad in results] == [1, 2, 1, 2]  # means of {0, 2} and of {1, 3}
    starts = [start for start, _ in results]
    assert starts[0] == starts[2] != starts[1] == starts[3]


@pytest.mark.parametrize("wrap", ALL)
def test_dtypes_do_not_mix(wrap):
    def mixed():
        torch.manual_seed(dist.get_rank())
        model = nn.ModuleList([nn.Linear(3, 3, dtype=d) for d in (torch.float32, torch.bfloat16, torch.float64)])
        wrapped = wrap(model)
        sum(p.float().sum() * (dist.get_rank() + 1) for p in model.parameters()).backward()
        return {str(p.dtype): p.grad.double().unique().tolist() for p in wrapped.parameters()}

    for grads in lab.run(mixed, 3):
        for values in grads.values():
            assert values == pytest.approx([2.0] * len(values), rel=2**-7)  # bfloat16 keeps 8 bits


@pytest.mark.parametrize("wrap", ALL)
def test_buffers_follow_rank_0_unless_told_not_to(wrap):
    def buffers(follow):
        torch.manual_seed(dist.get_rank())
        model = wrap(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), broadcast_buffers=follow)
        for _ in range(2):
            model(torch.randn(8, 2)).sum().backward()
        with model.no_sync(), lab.wire() as wire:
            model(torch.randn(8, 2))
        quiet = wire.total_bytes
        before = model.module[1].running_mean.clone()
        model.eval()
        model(torch.randn(8, 2))
        return before, model.module[1].running_mean.clone(), model.module[1].num_batches_tracked.item(), quiet

    followed = lab.run(buffers, 3, args=(True,))
    for before, after, count, quiet in followed:
        assert_close(after, followed[0][0], rtol=0, atol=0)
        assert count == 3
        assert quiet == 0
        assert before is not after
    apart = lab.run(buffers, 3, args=(False,))
    assert (apart[0][1] != apart[1][1]).any()


class Branches(nn.Module):
    """Rank r goes through branch r mod 2; nobody uses the third."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(3, 3, dtype=torch.float64)
        self.branches = nn.ModuleList(nn.Linear(3, 1, dtype=torch.float64) for _ in range(3))

    def forward(self, x, branch):
        return self.branches[branch](torch.tanh(self.trunk(x))).square().mean()


def row(step, rank):
    return torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


def train_branches(wrap, accumulate):
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = wrap(Branches())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    for step in range(3):
        optimizer.zero_grad()
        if accumulate:  # the other branch in the first micro-batch: its gradient waits for the sync
            with model.no_sync():
                model(row(step + 5, rank), (rank + 1) % 2).backward()
        model(row(step, rank), rank % 2).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.module.named_parameters()}, model.module.branches[2].weight.grad


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("wrap", [*ALL, DistributedDataParallel])
def test_ranks_that_use_different_parameters(wrap, world_size, accumulate):
    def allowed(model):
        return wrap(model, find_unused_parameters=True)

    results = lab.run(train_branches, world_size, args=(allowed, accumulate))
    torch.manual_seed(0)
    oracle = Branches()
    optimizer = torch.optim.AdamW(oracle.parameters(), lr=0.1, weight_decay=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss = sum(oracle(row(step, r), r % 2) for r in range(world_size))
        if accumulate:
            loss = loss + sum(oracle(row(step + 5, r), (r + 1) % 2) for r in range(world_size))
        (loss / world_size).backward()
        optimizer.step()
    for weights, unused_grad in results:
        assert unused_grad is None  # so that neither momentum nor weight decay touches it, as in one process
        # float64 and three steps of AdamW on gradients of order one
        assert_close(weights, {n: p.detach() for n, p in oracle.named_parameters()}, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("wrap", ALL)
def test_a_parameter_without_a_gradient_is_named(wrap):
    def forgotten():
        wrap(Branches())(row(0, 0), 0).backward()

    with pytest.raises(lab.RankError, match=r"no gradient for 'branches\.1\.weight'.*find_unused_parameters=True"):
        lab.run(forgotten, 2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_train_unless_they_are_a_backward_pass_of_their_own(reentrant):
    def main():
        model = dp.BucketedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
        x = torch.full((2, 3), 1.0 + dist.get_rank(), requires_grad=True)
        run = torch.utils.checkpoint.checkpoint
        run(model.module[1], run(model.module[0], x, use_reentrant=reentrant), use_reentrant=reentrant).sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    if reentrant:
        with pytest.raises(lab.RankError, match=r"checkpoint with use_reentrant=False"):
            lab.run(main, 2)
    else:
        first, second = lab.run(main, 2)
        assert_close(first, second, rtol=0, atol=0)


def test_backward_passes_in_parts_are_averaged_at_their_end():
    """A zero-bubble schedule, on a pipeline of one rank in each of two replicas: a sync each, and one for all."""

    def stages(seed):
        torch.manual_seed(seed)
        return [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double() for _ in range(2)]

    def loss_of(y, targets):
        return (y.sum(-1) - targets).square().sum()

    def data(rank):
        x = torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        return x, x.sum(-1).tanh()

    def pipelined():
        alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
        grads = []
        for wrap in ALL:
            wrapped = [wrap(each) for each in stages(dist.get_rank())]
            pipeline = pp.Pipeline(
                dict(enumerate(wrapped)), theory.pp.zb_v(1, 4), width=4, dtype=torch.float64, loss=loss_of,
                count=lambda targets: targets.numel(), group=alone,
            )  # fmt: skip
            pipeline.step(*data(dist.get_rank()))  # which says what is one pass
            grads.append([p.grad.clone() for each in wrapped for p in each.parameters()])
            for each in wrapped:
                each.zero_grad()
            with wrapped[0].no_sync(), wrapped[1].no_sync():
                pipeline.step(*data(dist.get_rank()))
            for each in wrapped:
                each.sync()
            grads.append([p.grad.clone() for each in wrapped for p in each.parameters()])
        return grads

    whole = nn.Sequential(*stages(0))
    for rank in range(2):
        x, targets = data(rank)
        (loss_of(whole(x), targets) / targets.numel() / 2).backward()
    for found in lab.run(pipelined, 2):
        for grads in found:
            assert_close(grads, [p.grad for p in whole.parameters()], rtol=1e-9, atol=1e-12)  # float64


def test_gradients_that_are_not_contiguous_are_averaged():
    """A gradient has the strides of its parameter, here of a transpose; gloo refuses such tensors."""

    def transposed(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Conv2d(1, 2, 2)).double()
        model[0].weight = nn.Parameter(model[0].weight.detach().t().contiguous().t())
        return model.to(memory_format=torch.channels_last)

    def loss_of(model, x):
        return model[1](model[0](x).tanh()[None, None]).square().mean()

    def averaged():
        found = []
        for wrap in ALL:
            model = wrap(transposed(dist.get_rank()))
            for _ in range(2):  # the second adds to the mean of the first
                loss_of(model.module, torch.full((4, 3), 1.0 + dist.get_rank()).double()).backward()
            found.append([p.grad.clone() for p in model.parameters()])
        return found

    whole = transposed(0)
    assert not whole[0].weight.is_contiguous()
    for rank in (0, 0, 1, 1):
        (loss_of(whole, torch.full((4, 3), 1.0 + rank).double()) / 2).backward()
    for found in lab.run(averaged, 2):
        for grads in found:
            assert_close(grads, [p.grad for p in whole.parameters()], rtol=1e-9, atol=1e-12)  # float64


def test_every_wrapper_recovers_after_a_backward_pass_that_raised():
    def interrupted():
        results = []
        for wrap in ALL:
            torch.manual_seed(0)
            model = wrap(network())
            x = torch.full((2, 8), float(dist.get_rank()))
            handle = model.module[0].weight.register_hook(lambda grad: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(x).sum().backward()
            handle.remove()
            model.zero_grad()
            model(x).sum().backward()
            results.append([p.grad.clone() for p in model.parameters()])
        return results

    for naive, flat, bucketed in lab.run(interrupted, 2):
        assert_close(flat, naive)
        assert_close(bucketed, naive)


# --- buckets ------------------------------------------------------------------------------------------------


def test_buckets_follow_the_order_in_which_gradients_really_come():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.first = nn.Linear(4, 1, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, x):
            return self.last(self.first(x))

    def order():
        model = dp.BucketedDataParallel(Backwards(), bucket_bytes=1, first_bucket_bytes=1)
        before = model.buckets
        grads = []
        for _ in range(2):
            model.zero_grad()
            model(torch.full((1, 4), dist.get_rank() + 1.0)).sum().backward()
            grads.append(model.first.weight.grad.clone())
        return before, model.buckets, grads

    for before, after, (one, two) in lab.run(order, 2):
        assert before == [["first.weight"], ["last.weight"]]
        assert after == [["last.weight"], ["first.weight"]]
        assert_close(one, two)


def test_overlap_starts_buckets_before_the_backward_pass_ends_and_blocking_does_not():
    def started(overlap):
        sent, seen = [], []

        def exchange(bucket, group):
            sent.append(bucket)
            return dp.all_reduce(bucket, group)

        model = dp.BucketedDataParallel(
            network(), exchange=exchange, bucket_bytes=1, first_bucket_bytes=1, overlap=overlap
        )
        model(torch.ones(1, 8)).sum().backward()  # settles the order
        sent.clear()
        model.module[0].weight.register_hook(lambda grad: seen.append(len(sent)))
        model(torch.ones(1, 8)).sum().backward()
        return seen, len(model.buckets)

    for (early,), num_buckets in lab.run(started, 2, args=(True,)):
        assert num_buckets == 6
        assert early >= 4  # all but the first layer's own weight and bias
    assert lab.run(started, 2, args=(False,)) == [([0], 6)] * 2


def test_gradients_are_views_of_the_buckets_or_not():
    def aliases(as_view):
        model = dp.BucketedDataParallel(network(), gradient_as_bucket_view=as_view, first_bucket_bytes=None)
        model(torch.ones(1, 8)).sum().backward()
        storages = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
        return len(storages), len(model.buckets)

    assert lab.run(aliases, 2, args=(True,)) == [(1, 1)] * 2
    assert lab.run(aliases, 2, args=(False,)) == [(6, 1)] * 2
