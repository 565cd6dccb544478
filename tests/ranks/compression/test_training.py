"""What exchanges remember through what happens in training: re-filled buckets, rests, accumulation, a new start."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

from dtlib import lab
from dtlib.ranks import compression, dp
from dtlib.ranks.mesh import Mesh

from .oracle import SHAPES, Given, gradients, means

N = 3
WITH_FEEDBACK = {
    "sign": compression.Sign(),
    "top-k": compression.TopK(0.1),
    "random-k": compression.RandomK(0.1),
    "power": compression.PowerSGD(1),
}
ALL = {
    **WITH_FEEDBACK,
    "cast": compression.Cast(),
    "int8": compression.Int8(16),
    "qsgd": compression.QSGD(3),
    "power, cold": compression.PowerSGD(1, warm_start=False),
    "random-k, scaled": compression.RandomK(0.1, feedback=False),
    "two levels": compression.Hierarchy(1, compression.TopK(0.1)),
}


class ByBucket(compression.TopK):
    """Mutant: remembers by a bucket's number, and begins anew where it has another length."""

    def __init__(self, share):
        super().__init__(share)
        self.by_number, self.calls = {}, 0

    def _meant(self, bucket):
        number, self.calls = self.calls % 3, self.calls + 1
        left = self.by_number.get(number)
        meant = dp.Bucket(bucket.flat.clone(), {})
        if left is not None and left.shape == meant.flat.shape:
            meant.flat += left
        parts = zip(bucket.views.items(), meant.flat.split([v.numel() for v in bucket.views.values()]), strict=True)
        meant.views = {name: part.view(view.shape) for (name, view), part in parts}
        self.by_number[number] = meant.flat
        return meant


class Turning(nn.Module):
    """Layers that are not registered in the order in which they are used, of which one rests when it is told to."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(12, 12) for _ in range(4))

    def forward(self, x, d_rests=False):
        y = self.b(self.c(self.a(x)).tanh()).tanh()
        return y if d_rests else self.d(y)


def sums(exchange, *, rests=False, accumulates=False):
    """In a rank: of four steps all that was sent and is left out, all that was meant, and whether buckets changed."""
    torch.manual_seed(0)
    model = Turning().double()
    exact = copy.deepcopy(model)
    options = {"find_unused_parameters": rests}
    wrapped = dp.BucketedDataParallel(model, exchange=exchange, bucket_bytes=1500, first_bucket_bytes=None, **options)
    reference, before = dp.FlatDataParallel(exact, **options), wrapped.buckets
    names = [name for name, _ in model.named_parameters()]
    got = dict.fromkeys(names, 0.0)
    meant = dict.fromkeys(names, 0.0)
    torch.manual_seed(1 + dist.get_rank())
    for step in range(4):
        inputs = torch.randn(2, 5, 12, dtype=torch.float64)
        for each, total in ((wrapped, got), (reference, meant)):
            each.zero_grad()
            if accumulates:
                with each.no_sync():
                    each(inputs[0]).square().mean().backward()
            each(inputs[1], rests and step % 2 == 1).square().mean().backward()
            for name, parameter in each.module.named_parameters():
                total[name] = total[name] + (0.0 if parameter.grad is None else parameter.grad)
    for name in names:
        left_out = exchange.remembered["left_out"][name].clone()
        dist.all_reduce(left_out)
        got[name] = got[name] + left_out
    return got, meant, before != wrapped.buckets


@pytest.mark.parametrize("how", [{}, {"accumulates": True}, {"rests": True}], ids=["alone", "accumulated", "resting"])
def test_all_that_was_sent_and_is_left_out_is_all_that_was_meant(how):
    """Buckets are filled anew after the first step, gradients are added up, a layer rests in every second step."""

    def train():
        return {name: sums(exchange, **how) for name, exchange in WITH_FEEDBACK.items()}

    for by_name in lab.run(train, N):
        for got, meant, changed in by_name.values():
            assert changed or "rests" in how
            assert_close(got, meant, rtol=1e-11, atol=1e-11)


def test_what_is_remembered_by_bucket_is_lost_with_it():
    for got, meant, changed in lab.run(lambda: sums(ByBucket(0.1)), N):
        assert changed
        with pytest.raises(AssertionError):
            assert_close(got, meant, rtol=1e-11, atol=1e-11)


def test_a_saved_run_goes_on_to_the_bit():
    options = {"bucket_bytes": 900, "first_bucket_bytes": None, "find_unused_parameters": True}  # buckets stay

    def weights(exchange, model, optimizer, start, stop, given):
        wrapped = dp.BucketedDataParallel(model, exchange=exchange, **options)
        for by_rank in given[start:stop]:
            wrapped.zero_grad()
            wrapped(by_rank[dist.get_rank()]).backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    def train():
        given = gradients(dist.get_world_size())
        for name, exchange in ALL.items():
            fresh, forgetful = copy.deepcopy(exchange), copy.deepcopy(exchange)
            model = Given(dtype=torch.float32)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            weights(exchange, model, optimizer, 0, 2, given)
            saved = copy.deepcopy((exchange.state_dict(), model))
            wanted = weights(exchange, model, optimizer, 2, 4, given)
            found = []
            for other in (fresh, forgetful):
                if other is fresh:
                    other.load_state_dict(saved[0])
                again = copy.deepcopy(saved[1])
                found.append(weights(other, again, torch.optim.SGD(again.parameters(), lr=0.1), 2, 4, given))
            assert all(torch.equal(a, b) for a, b in zip(found[0], wanted, strict=True)), name
            remembers = name not in ("cast", "int8")
            assert remembers != all(torch.equal(a, b) for a, b in zip(found[1], wanted, strict=True)), name

    lab.run(train, N)


def test_a_parameter_that_belongs_to_some_ranks_is_compressed_among_them():
    """Two groups of two: `a` is theirs, and divided by all four; what they leave is what their own ranks say."""

    def train():
        mesh = Mesh({"dp": 2, "ep": 2})
        model = Given({"a": (8, 6), "b": (30,)})
        dp.belongs_to(model.a, mesh.group("dp"))
        given = gradients(4, shapes={"a": (8, 6), "b": (30,)})
        exchange = compression.TopK(1.0)
        return means(dp.BucketedDataParallel(model, exchange=exchange), given), given, mesh.ranks("dp")

    for found, given, ranks in lab.run(train, 4):
        for step, by_rank in zip(found, given, strict=True):
            np.testing.assert_allclose(step["a"], sum(by_rank[r]["a"] for r in ranks) / 4, atol=1e-12)
            np.testing.assert_allclose(step["b"], sum(each["b"] for each in by_rank) / 4, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_gradients_keep_their_dtype_and_zeros_stay_zero(dtype):
    def train():
        zeros = [[{name: np.zeros(shape) for name, shape in SHAPES.items()}] * N]
        given = gradients(N)[:1]
        for name, exchange in ALL.items():
            model = Given(dtype=dtype)
            wrapped = dp.BucketedDataParallel(model, exchange=exchange, bucket_bytes=900, first_bucket_bytes=None)
            assert all((value == 0).all() for value in means(wrapped, zeros)[0].values()), name
            after = means(wrapped, given)[0]
            assert all(np.isfinite(value).all() for value in after.values())
            assert np.abs(after["a"]).max() > 0, name  # and it is not stuck there
            assert all(p.grad.dtype == dtype for p in model.parameters())

    lab.run(train, N)


def test_a_rank_alone_keeps_its_gradient():
    def train():
        given = gradients(1)
        for exchange in ALL.values():
            bucket = dp.Bucket(torch.arange(6.0), {"a": torch.arange(6.0)})
            assert exchange(bucket, None) is None
            assert torch.equal(bucket.flat, torch.arange(6.0))
            found = means(dp.BucketedDataParallel(Given(), exchange=exchange), given)
            np.testing.assert_allclose(found[0]["a"], given[0][0]["a"])

    lab.run(train, 1)


def test_buckets_take_turns():
    """The second all-reduce of a bucket is started before that of the next has to be waited for."""

    def train():
        order: list[int] = []
        model = Given({"a": (20, 20), "b": (30, 30), "c": (40, 40)}, torch.float32)
        options = {"bucket_bytes": 1, "first_bucket_bytes": None, "find_unused_parameters": True}
        wrapped = dp.BucketedDataParallel(model, exchange=compression.PowerSGD(1), **options)
        real = dist.all_reduce
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_reduce", lambda t, *a, **k: (order.append(t.numel()), real(t, *a, **k))[1])
            wrapped({name: np.ones(p.shape) for name, p in wrapped.module.named_parameters()}).backward()
        return order

    assert lab.run(train, 2)[0][:6] == [40, 30, 20, 40, 30, 20]


def test_a_change_of_rate_is_made_up_for():
    """What was left out at one rate is sent at another: the weights end where exact steps end, but for what is left."""

    def end(exchange, rescales):
        model = Given({"a": (40,)})
        wrapped = dp.BucketedDataParallel(model, exchange=exchange)
        given = gradients(N, 6, {"a": (40,)})
        exact, rates = torch.zeros(40, dtype=torch.float64), [1.0, 1.0, 1.0, 0.1, 0.1, 0.1]
        for step, (by_rank, rate) in enumerate(zip(given, rates, strict=True)):
            if rescales and step and rate != rates[step - 1]:
                exchange.rescale(old_lr=rates[step - 1], new_lr=rate)
            wrapped.zero_grad()
            wrapped(by_rank[dist.get_rank()]).backward()
            with torch.no_grad():
                model.a -= rate * model.a.grad
            exact -= rate * torch.as_tensor(sum(each["a"] for each in by_rank) / N)
        left_out = exchange.remembered["left_out"]["a"].clone()
        dist.all_reduce(left_out)
        return model.a.detach() - rates[-1] * left_out, exact

    for exchange in (compression.TopK(0.1), compression.Sign()):
        for found, exact in lab.run(lambda exchange=exchange: end(exchange, True), N):
            assert_close(found, exact, rtol=1e-11, atol=1e-11)
        for found, exact in lab.run(lambda exchange=exchange: end(exchange, False), N):
            assert (found - exact).abs().max() > 0.1


@pytest.mark.parametrize("bucket_bytes", [1, 10_000])
def test_parameters_without_entries_are_carried_along(bucket_bytes):
    shapes = {"none": (0, 3), "a": (6, 5), "nothing": (0,), "scalar": ()}  # in buckets of their own, or with others
    given = [[{name: np.ones(shape) for name, shape in shapes.items()}] * 2] * 2

    def train():
        for name, exchange in (ALL | {"two nodes": compression.Hierarchy(1, compression.Sign())}).items():
            options = {"bucket_bytes": bucket_bytes, "first_bucket_bytes": None}
            for each in (shapes, {"none": (0, 3)}):
                wrapped = dp.BucketedDataParallel(Given(each), exchange=copy.deepcopy(exchange), **options)
                for by_rank in given:
                    wrapped.zero_grad()
                    wrapped({key: by_rank[dist.get_rank()][key] for key in each}).backward()
            assert wrapped.module.none.grad.shape == (0, 3), name

    lab.run(train, 2)


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("feedback", [False, True])
def test_low_rank_goes_on_after_a_gradient_of_zero(rank, feedback):
    """Zeros made orthonormal are the first unit vectors, which see nothing of what lies elsewhere."""
    some = np.random.default_rng(0).normal(size=(8, 1)) * np.random.default_rng(1).normal(size=(1, 8))
    some[:2], some[:, :2] = 0, 0

    def train():
        exchange = compression.PowerSGD(rank, feedback=feedback)
        wrapped = dp.BucketedDataParallel(Given({"a": (8, 8)}), exchange=exchange)
        for gradient in (0 * some, some):
            wrapped.zero_grad()
            wrapped({"a": gradient}).backward()
        assert_close(wrapped.module.a.grad, torch.tensor(some))  # it is of rank 1: one step is exact

    lab.run(train, 2)


def test_rooms_of_buckets_that_are_no_more_are_given_back():
    def train():
        for exchange in (compression.TopK(0.1), compression.Cast()):
            model = Turning()
            wrapped = dp.BucketedDataParallel(model, exchange=exchange, bucket_bytes=700, first_bucket_bytes=None)
            before = wrapped.buckets
            for _ in range(3):
                wrapped.zero_grad()
                wrapped(torch.ones(2, 12)).sum().backward()
            firsts = {names[0] for names in wrapped.buckets}
            assert firsts != {names[0] for names in before}
            assert {name for _, name in exchange._rooms} == firsts

    lab.run(train, 2)
