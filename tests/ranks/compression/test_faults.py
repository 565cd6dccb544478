"""What is not finite is told on every rank and kept by none; what is no option is refused."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dtlib import lab
from dtlib.ranks import compression, dp

from .oracle import Given, gradients
from .test_training import ALL

N = 4
EVERY = ALL | {
    "two nodes": compression.Hierarchy(2, compression.PowerSGD(1)),
    "one node": compression.Hierarchy(4, compression.PowerSGD(1)),
}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_told_everywhere_and_forgotten(bad):
    def train():
        given, me = gradients(N), dist.get_rank()
        options = {"bucket_bytes": 500, "first_bucket_bytes": None, "find_unused_parameters": True}
        for name, exchange in EVERY.items():
            spared = copy.deepcopy(exchange)
            model = Given()
            wrapped = dp.BucketedDataParallel(model, exchange=exchange, **options)
            other = dp.BucketedDataParallel(Given(), exchange=spared, **options)
            for each in (wrapped, other):
                each(given[0][me]).backward()
            before = exchange.state_dict()["remembered"]
            poisoned = copy.deepcopy(given[1][me])
            if me == 2:
                poisoned["d"][7, 1, 0, 1] = bad
            wrapped.zero_grad()
            with pytest.raises(FloatingPointError, match=r"not finite: 'd' on rank 2\. Skip"):
                wrapped(poisoned).backward()
            assert all(p.grad.isfinite().all() for p in model.parameters() if me != 2)
            torch.testing.assert_close(exchange.state_dict()["remembered"], before, rtol=0, atol=0)
            spared._times = dict(exchange._times)  # dice that were cast are not cast again
            if isinstance(exchange, compression.Hierarchy):
                spared.across._times = dict(exchange.across._times)
            for each in (wrapped, other):
                each.zero_grad()
                each(given[2][me]).backward()
            for mine, theirs in zip(model.parameters(), other.module.parameters(), strict=True):
                assert torch.equal(mine.grad, theirs.grad), name

    lab.run(train, N)


def test_a_sum_that_overflows_is_told_everywhere():
    def train():
        big = {"a": np.full((4, 3), 5e4), "b": np.ones(5)}
        for exchange in (compression.Cast(torch.float16), compression.Hierarchy(2, compression.Cast(torch.float16))):
            wrapped = dp.BucketedDataParallel(Given({"a": (4, 3), "b": (5,)}), exchange=exchange)
            with pytest.raises(FloatingPointError, match=r"overflows in what (Cast|Hierarchy) sends: 'b', 'a'"):
                wrapped({name: 4 * value for name, value in big.items()}).backward()
            wrapped.zero_grad()
            wrapped({name: value / 10 for name, value in big.items()}).backward()
            assert wrapped.module.a.grad.max() == pytest.approx(5e3, rel=1e-3)

    lab.run(train, N)


def test_a_sum_of_finite_messages_that_overflows_is_told_and_the_step_can_be_skipped():
    def train():
        whole = {"a": np.full((4, 3), 6e4)}  # two entries leave at once, the others' turn comes with the next gradient
        for exchange in (compression.TopK(1 / 6), compression.Hierarchy(2, compression.TopK(1 / 6))):
            model = Given({"a": (4, 3)}, dtype=torch.float16)
            wrapped = dp.BucketedDataParallel(model, exchange=exchange)
            wrapped(whole).backward()
            assert model.a.grad.float().sum() == pytest.approx(2 * 6e4, rel=1e-3)
            before = exchange.state_dict()
            wrapped.zero_grad()
            with pytest.raises(FloatingPointError, match=r"overflows in what (TopK|Hierarchy) sends: 'a'"):
                wrapped(whole).backward()
            assert model.a.grad.isfinite().all()
            after = exchange.state_dict()
            torch.testing.assert_close(after["remembered"], before["remembered"], rtol=0, atol=0)

    lab.run(train, N)


def test_gradients_of_another_shape_are_refused():
    def train():
        exchange, uneven = compression.TopK(0.5), compression.Hierarchy(3, dp.all_reduce)
        dp.BucketedDataParallel(Given({"a": (4,)}), exchange=exchange)({"a": np.ones(4)}).backward()
        with pytest.raises(ValueError, match=r"gradient of 'a' must have the shape of .* \(4,\), not \(5,\)"):
            dp.BucketedDataParallel(Given({"a": (5,)}), exchange=exchange)({"a": np.ones(5)}).backward()
        with pytest.raises(ValueError, match=r"ranks_per_node must divide the number of ranks, 2; 3 does not"):
            dp.BucketedDataParallel(Given({"a": (4,)}), exchange=uneven)({"a": np.ones(4)}).backward()

    lab.run(train, 2)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: compression.Cast(torch.int8), "dtype must be a floating-point one"),
        (lambda: compression.Cast(torch.float8_e4m3fn), "dtype must be a floating-point one of 2 bytes or more"),
        (lambda: compression.Cast("fp16"), "dtype must be a floating-point one"),
        (lambda: compression.Int8(0), "block must be at least 1"),
        (lambda: compression.QSGD(0), "levels must be at least 1"),
        (lambda: compression.QSGD(128), "levels must be at most 127"),
        (lambda: compression.TopK(0.0), "share must be above 0 and at most 1"),
        (lambda: compression.TopK(1.5), "share must be above 0 and at most 1"),
        (lambda: compression.RandomK(float("nan")), "share must be above 0 and at most 1"),
        (lambda: compression.PowerSGD(0), "rank must be at least 1"),
        (lambda: compression.PowerSGD(1.5), "rank must be a whole number"),
        (lambda: compression.Hierarchy(0, dp.all_reduce), "ranks_per_node must be at least 1"),
        (lambda: compression.Hierarchy(2, "ring"), "across must be a function of a bucket and a group"),
        (lambda: compression.Sign().rescale(old_lr=1.0, new_lr=0.0), "old_lr and new_lr must be above 0"),
        (lambda: compression.Sign().load_state_dict(compression.TopK(1.0).state_dict()), "state must be of Sign"),
    ],
)
def test_what_is_no_option_is_refused(make, told):
    with pytest.raises(ValueError, match=told):
        make()
