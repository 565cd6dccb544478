"""What crosses the wire is what theory counts, for each exchange, and no more."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist

from dtlib import lab
from dtlib.ranks import compression, dp
from dtlib.theory import compression as theory

from .oracle import Given, gradients

MESSAGES = {"cast": 2, "int8": 1.5, "qsgd": 1, "sign": 1, "top-k": 1, "random-k": 2, "power": 4}
"""A rank's messages to another, in headers of a gathering's: two in an all-reduce, half a one in an all-to-all."""

SHAPES = {"a": (256, 300), "b": (700,), "c": (64, 32, 3, 3), "d": (9,)}
SIZES = [76800, 700, 18432, 9]
ELEMENTS, BLOCK, LEVELS, SHARE, RANK = sum(SIZES), 256, 7, 0.03, 3
KEPT = sum(max(1, round(SHARE * size)) for size in SIZES)
CODES = theory.quantised_bytes(ELEMENTS, (2 * LEVELS).bit_length(), ELEMENTS, 0)

EXCHANGES = {
    "cast": (compression.Cast(), lambda n: theory.all_reduced_bytes(2 * ELEMENTS, n)),
    "int8": (compression.Int8(BLOCK), lambda n: theory.two_pass_bytes(ELEMENTS, n, 8, BLOCK)),
    "qsgd": (compression.QSGD(LEVELS), lambda n: theory.all_gathered_bytes(CODES + 4 * len(SIZES), n)),
    "sign": (compression.Sign(), lambda n: theory.all_gathered_bytes(-(-ELEMENTS // 8) + 4 * len(SIZES), n)),
    "top-k": (compression.TopK(SHARE), lambda n: theory.all_gathered_bytes(theory.sparse_bytes(KEPT), n)),
    "random-k": (compression.RandomK(SHARE), lambda n: theory.all_reduced_bytes(theory.sparse_bytes(KEPT, 4, 0), n)),
    "power": (
        compression.PowerSGD(RANK),
        lambda n: theory.all_reduced_bytes(4 * theory.low_rank_elements(SHAPES.values(), RANK), n),
    ),
}


def of_all(exchanges):
    given, found = gradients(dist.get_world_size(), 2, SHAPES), {}
    for name, exchange in exchanges.items():
        wrapped = dp.BucketedDataParallel(Given(SHAPES, torch.float32), exchange=exchange, first_bucket_bytes=None)
        for by_rank in given:
            loss = wrapped(by_rank[dist.get_rank()])
            with lab.wire() as wire:
                loss.backward()
        found[name] = wire.total_bytes  # of the second step: the first one sends the order of the buckets
    word = torch.zeros(1)
    with lab.wire() as wire:
        dist.all_gather([torch.zeros(1) for _ in range(dist.get_world_size())], word)
    pairs = dist.get_world_size() * (dist.get_world_size() - 1)
    return found, wire.total_bytes // pairs - 4


@functools.cache
def sent(n):
    return lab.run(of_all, n, args=({name: each for name, (each, _) in EXCHANGES.items()},))[0]


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("name", EXCHANGES)
def test_each_sends_what_theory_counts(name, n):
    """To the byte: beyond it there are the headers of gloo's messages, which the gathering of a word shows."""
    found, header = sent(n)
    assert 0 < header < 500
    assert found[name] - n * (n - 1) * MESSAGES[name] * header == n * EXCHANGES[name][1](n)


def test_across_nodes_a_part_of_each_matrix_is_compressed():
    """Two nodes of two: what leaves a node is what `across` sends of half the rows."""

    def step():
        given = gradients(4, 2, {"a": (256, 300)})
        exchange = compression.Hierarchy(2, compression.PowerSGD(RANK))
        model = Given({"a": (256, 300)}, torch.float32)
        wrapped = dp.BucketedDataParallel(model, exchange=exchange, first_bucket_bytes=None)
        for by_rank in given:
            loss = wrapped(by_rank[dist.get_rank()])
            with lab.wire() as wire:
                loss.backward()
        return wire.sent_to

    by_rank = lab.run(step, 4)
    across = theory.all_reduced_bytes(4 * theory.low_rank_elements([(128, 300)], RANK), 2)
    inside = theory.all_reduced_bytes(4 * 256 * 300, 2)
    for rank, to in enumerate(by_rank):
        partner = rank ^ 1
        assert to[partner] == pytest.approx(inside, rel=0.01)
        assert sum(to) - to[partner] == pytest.approx(across, rel=0.02, abs=1500)
