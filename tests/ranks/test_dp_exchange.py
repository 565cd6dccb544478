"""What a bucket goes through may be another thing than an all-reduce of the backend's."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

from dtlib import lab, theory
from dtlib.ranks import dp
from dtlib.ranks.collectives import ring_all_reduce, two_level_all_reduce

N, WIDTH, STEPS = 4, 128, 3


def steps(exchange):
    """Of each of three steps the gradients, and the bytes that all ranks sent; one step's weights follow another's."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH).double() for _ in range(3)])
    wrapped = dp.BucketedDataParallel(model, exchange=exchange, bucket_bytes=8 * WIDTH, first_bucket_bytes=None)
    torch.manual_seed(1 + dist.get_rank())
    found = []
    for _ in range(STEPS):
        wrapped.zero_grad()
        with lab.wire() as wire:
            wrapped(torch.randn(2, WIDTH, dtype=torch.float64)).square().mean().backward()
        found.append(([p.grad.clone() for p in model.parameters()], wire.total_bytes))
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    return found


def at_once(algorithm, bucket, group):
    """Finished when it returns: there is nothing to wait for."""
    algorithm(bucket.flat, group=group)


class EverySecondStep:
    """Nothing is sent in the first step, the third and so on: each rank goes on with its own gradients."""

    def __init__(self):
        self.times = {}

    def __call__(self, bucket, group):
        name = next(iter(bucket.views))
        self.times[name] = self.times.get(name, 0) + 1
        if self.times[name] % 2 == 0:
            return dp.all_reduce(bucket, group)
        bucket.flat.mul_(dist.get_world_size(group))
        return None


class SignsWithFeedback:
    """One number for the size of a tensor and the signs of its entries; what they leave out is sent the next time.

    In full width, as only what it remembers, and under which names, is in question.
    """

    def __init__(self):
        self.left_out = {}

    def __call__(self, bucket, group):
        for name, view in bucket.views.items():
            meant = view + self.left_out.get(name, 0.0)
            view.copy_(meant.abs().mean() * meant.sign())
            self.left_out[name] = meant - view
        return dp.all_reduce(bucket, group)


class Crossed(nn.Module):
    """Layers that are not registered in the order in which they are used."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        return self.b(self.c(self.a(x)))


@pytest.mark.parametrize("algorithm", [ring_all_reduce, partial(two_level_all_reduce, ranks_per_node=2)])
def test_another_algorithm_gives_the_same_mean(algorithm):
    wanted = lab.run(steps, N, args=[dp.all_reduce])
    for mine, theirs in zip(lab.run(steps, N, args=[partial(at_once, algorithm)]), wanted, strict=True):
        for (gradients, sent), (others, _) in zip(mine, theirs, strict=True):
            assert_close(gradients, others, rtol=1e-12, atol=1e-12)
            elements = sum(each.numel() for each in gradients)
            assert sent == pytest.approx(N * theory.dp.sent_bytes_per_step(8 * elements, N), rel=0.02)


def test_nothing_is_sent_where_the_exchange_sends_nothing():
    by_rank = lab.run(steps, N, args=[EverySecondStep()])
    (first, _), (second, sent), (third, _) = by_rank[0]
    assert [each[0][1] for each in by_rank] == [by_rank[0][0][1]] * N
    assert by_rank[0][0][1] < sent / 5  # the order of the buckets, once
    assert by_rank[0][2][1] < sent / 50
    for other in by_rank[1:]:
        assert all(not torch.equal(a, b) for a, b in zip(first, other[0][0], strict=True))
        assert_close(other[1][0], second, rtol=0, atol=0)
        assert all(not torch.equal(a, b) for a, b in zip(third, other[2][0], strict=True))


def test_a_rank_that_sends_nothing_has_its_own_gradients():
    def alone():
        torch.manual_seed(0)
        model = nn.Linear(WIDTH, WIDTH).double()
        inputs = torch.randn(2, WIDTH, dtype=torch.float64) * (1 + dist.get_rank())
        model(inputs).square().mean().backward()
        wanted = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        dp.BucketedDataParallel(model, exchange=EverySecondStep())(inputs).square().mean().backward()
        return wanted, [p.grad for p in model.parameters()]

    for wanted, found in lab.run(alone, 3):
        assert_close(found, wanted, rtol=1e-14, atol=0)


def test_what_an_exchange_remembers_by_name_outlives_the_buckets():
    """Error feedback: all that was sent and what is left out are all that was meant, however buckets are filled."""

    def train():
        torch.manual_seed(0)
        model = Crossed().double()
        exact = copy.deepcopy(model)
        exchange = SignsWithFeedback()
        wrapped = dp.BucketedDataParallel(model, exchange=exchange, bucket_bytes=8 * WIDTH, first_bucket_bytes=None)
        before, sent, meant = wrapped.buckets, 0.0, 0.0
        torch.manual_seed(1 + dist.get_rank())
        for _ in range(STEPS):
            x = torch.randn(2, WIDTH, dtype=torch.float64)
            for each in (wrapped, dp.FlatDataParallel(exact)):
                each.zero_grad()
                each(x).square().mean().backward()
            sent, meant = sent + model.c.weight.grad, meant + exact.c.weight.grad
        left_out = exchange.left_out["c.weight"].clone()
        dist.all_reduce(left_out)
        assert before != wrapped.buckets
        assert exchange.left_out.keys() == {name for name, _ in model.named_parameters()}
        return sent + left_out, meant

    for told, meant in lab.run(train, 3):
        assert_close(told, meant, rtol=1e-12, atol=1e-12)


def test_what_is_no_exchange_is_refused():
    def wrap():
        with pytest.raises(ValueError, match="exchange must be a function of a bucket and a group, not 'ring'"):
            dp.BucketedDataParallel(nn.Linear(1, 1), exchange="ring")

    lab.run(wrap, 2)
