"""Each exchange gives what one process says that it must, on 1 to 4 ranks, in the same bits on all of them."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.testing import assert_allclose

from dtlib import lab
from dtlib.ranks import compression, dp

from .oracle import Bits, Dice, Exact, Given, Largest, Lots, LowRank, eight_bits, gradients, means

BLOCK, LEVELS, SHARE, RANK = 32, 5, 0.2, 2


def drawn(kind):
    """What an exchange draws, one call after another, from the seed that it shares with all ranks."""
    source = compression.RandomK(1.0)

    def draw(name, *size):
        if kind == "places":
            return torch.randperm(size[0], generator=source.generator(0, name)).numpy()
        return torch.randn(*size, generator=source.generator(0, name), dtype=torch.float32).double().numpy()

    return draw


def dice():
    """Each rank has its own draws, the first time, the second, and so on."""
    sources = [compression.QSGD(1) for _ in range(4)]
    return lambda name, size, rank: torch.rand(size, generator=sources[rank].generator(0, name, rank)).double().numpy()


class WithoutSeed(compression.PowerSGD):
    """Mutant: each rank begins with a matrix of its own."""

    def generator(self, seed, name, *more):
        return super().generator(seed, name, dist.get_rank())


class Overflowing(compression.Int8):
    """Mutant: codes are added up in 8 bits, by a scale that all ranks share."""

    def summed(self, meant, group):
        scale = meant.flat.abs().max().float()
        yield dist.all_reduce(scale, op=dist.ReduceOp.MAX, group=group, async_op=True)
        codes = (meant.flat / scale * 127).round().to(torch.int8)
        yield dist.all_reduce(codes, group=group, async_op=True)
        return scale, lambda flat: flat.copy_(codes.to(flat.dtype) * scale / 127)


class Majority(compression.Sign):
    """Mutant: signs are added up as if all ranks had one scale."""

    def summed(self, meant, group):
        scale, signs = meant.flat.abs().mean(), meant.flat.sign()
        meant.flat -= scale * signs
        yield dist.all_reduce(signs, group=group, async_op=True)
        return signs, lambda flat: flat.copy_(signs * scale)


class Twice(compression.TopK):
    """Mutant: divided by the number of ranks once more."""

    def summed(self, meant, group):
        arrived, write = yield from super().summed(meant, group)
        return arrived, lambda flat: (write(flat), flat.div_(dist.get_world_size(group)))


EXCHANGES = {
    "cast": (compression.Cast(torch.float16), Exact),
    "int8": (compression.Int8(BLOCK), None),
    "qsgd": (compression.QSGD(LEVELS), lambda n: Dice(n, LEVELS, dice())),
    "qsgd, a byte": (compression.QSGD(127), lambda n: Dice(n, 127, dice())),
    "sign": (compression.Sign(), Bits),
    "top-k": (compression.TopK(SHARE), lambda n: Largest(n, SHARE)),
    "random-k": (compression.RandomK(SHARE), lambda n: Lots(n, SHARE, drawn("places"), True)),
    "random-k, scaled": (
        compression.RandomK(SHARE, feedback=False),
        lambda n: Lots(n, SHARE, drawn("places"), False),
    ),
    "power": (compression.PowerSGD(RANK), lambda n: LowRank(n, RANK, drawn("start"))),
    "power, cold": (
        compression.PowerSGD(RANK, warm_start=False),
        lambda n: LowRank(n, RANK, drawn("start"), warm=False),
    ),
    "power, full": (compression.PowerSGD(99), Exact),
    "two levels, exact": (compression.Hierarchy(1, dp.all_reduce), Exact),
}
MUTANTS = {
    "each its own start": (WithoutSeed(RANK), "power"),
    "summed in 8 bits": (Overflowing(BLOCK), "int8"),
    "majority": (Majority(), "sign"),
    "divided twice": (Twice(SHARE), "top-k"),
    "nothing fed back": (compression.TopK(SHARE, feedback=False), "top-k"),
    "not warm": (compression.PowerSGD(RANK, warm_start=False), "power"),
}


def all_of_them(exchanges):
    given = gradients(dist.get_world_size())
    found = {}
    for name, exchange in exchanges.items():
        wrapped = dp.BucketedDataParallel(Given(), exchange=exchange, first_bucket_bytes=None)
        found[name] = means(wrapped, given), wrapped.buckets
    return found


@functools.cache
def results(n):
    """By exchange, from each rank: gradients after each step, and the buckets after the last."""
    exchanges = {name: each for table in (EXCHANGES, MUTANTS) for name, (each, _) in table.items()}
    return lab.run(all_of_them, n, args=(exchanges,))


def wanted(name, n, buckets):
    """What one process says, after each step."""
    given = gradients(n)
    if n == 1:
        return [Exact(1).step(each) for each in given]
    if name == "int8":
        return [eight_bits(each, [k for bucket in buckets for k in bucket], BLOCK) for each in given]
    oracle = EXCHANGES[name][1](n)
    return [oracle.step(each) for each in given]


def compare(name, n, found, buckets):
    # The scales of signs and norms of QSGD are float32; fp16 rounds what each rank sends and each sum once.
    rtol = {"cast": 4 * 2.0**-11, "sign": 1e-6, "qsgd": 1e-6, "qsgd, a byte": 1e-6, "int8": 1e-6}.get(name, 1e-11)
    first = 1 if name == "int8" else 0  # the first step has another order in the bucket
    for step, theirs in list(zip(found, wanted(name, n, buckets), strict=True))[first:]:
        for key, value in theirs.items():
            assert_allclose(step[key], value, rtol=0, atol=rtol * max(1, np.abs(value).max()))


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("name", EXCHANGES)
def test_the_mean_is_what_one_process_says(name, n):
    by_rank = [each[name] for each in results(n)]
    compare(name, n, *by_rank[0])
    for found, _ in by_rank[1:]:
        for step, first in zip(found, by_rank[0][0], strict=True):
            assert all(np.array_equal(step[key], first[key]) for key in first)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_told(mutant, n):
    with pytest.raises(AssertionError):
        compare(MUTANTS[mutant][1], n, *results(n)[0][mutant])


@pytest.mark.parametrize("across", ["cast", "int8", "qsgd", "sign", "top-k", "random-k", "power"])
def test_two_levels_are_exact_inside_and_as_told_across(across):
    """Each place has a part of the rows: what crosses is what two ranks with the nodes' sums send of that part."""

    def two_levels():
        mine = compression.Hierarchy(2, EXCHANGES[across][0])
        return means(dp.BucketedDataParallel(Given(shapes), exchange=mine), given)

    def across_alone():
        return means(dp.BucketedDataParallel(Given(shapes), exchange=EXCHANGES[across][0]), nodes)

    shapes = {"a": (24, 10)}
    given = gradients(4, shapes=shapes)
    halves = [slice(0, 12), slice(12, 24)]
    found, others = lab.run(two_levels, 4), []
    for half in halves:
        nodes = [[{"a": (by[2 * i]["a"][half] + by[2 * i + 1]["a"][half]) / 2} for i in range(2)] for by in given]
        shapes = {"a": (12, 10)}
        others.append(lab.run(across_alone, 2)[0])
        shapes = {"a": (24, 10)}
    for step in range(len(given)):
        whole = np.concatenate([other[step]["a"] for other in others])
        for rank in range(4):
            assert np.array_equal(found[rank][step]["a"], found[0][step]["a"])
        assert_allclose(found[0][step]["a"], whole, rtol=0, atol=2e-3 if across == "cast" else 1e-6)
