"""Options and errors of the data-parallel wrappers, and torch's DDP on the tiny GPT beside them."""

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
from dtlib.ranks import dp, pp, zero
from dtlib.ranks.collectives import ring_all_reduce
from dtlib.ranks.model import GPT, IGNORED, GPTConfig, batches, load_text, next_token_loss
from dtlib.ranks.shared.clipping import clip_grad_norm

ALL = [dp.NaiveDataParallel, dp.FlatDataParallel, dp.BucketedDataParallel]


def network(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))


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


# --- bad input ----------------------------------------------------------------------------------------------


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
@pytest.mark.parametrize("change", ["freeze", "replace", "cast"])
def test_a_change_after_wrapping_is_refused(wrap, change):
    def changed():
        model = network()
        wrapped = wrap(model)
        if change == "freeze":
            model[2].weight.requires_grad_(False)
        elif change == "replace":
            model[2].weight = nn.Parameter(torch.zeros(8, 8))
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
