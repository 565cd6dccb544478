"""Means of neighbours, against matrices in one process, to the byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.testing import assert_allclose

from dtlib import lab
from dtlib.ranks.asynchrony import Gossip
from dtlib.ranks.asynchrony.flat import spread

from .oracle import Small, flat, trained

ROUNDS = 5


def matrix(graph, n, number):
    """Row r: with which weight rank r takes each rank's."""
    weights = np.eye(n)
    for rank in range(n):
        if graph == "ring":
            others = {(rank - 1) % n, (rank + 1) % n} - {rank}
        else:
            others = {(rank - 2 ** (number % int(np.ceil(np.log2(n))))) % n} if n > 1 else set()
        for each in others:
            weights[rank, each] += 1
        weights[rank] /= 1 + len(others)
    return weights


class Onesided(Gossip):
    """Mutant: of the ring's neighbours one counts double, the other not at all."""

    def distances(self):
        return [1, 1]


class Still(Gossip):
    """Mutant: the exponential graph stays at its first round."""

    def mix(self):
        super().mix()
        self.round = 0


def mixed(graph, kind=Gossip):
    """In a rank: weights before each round and after the last, bytes of the last round, a message's header."""
    model = Small(seed=7)
    gossip = kind(model, graph)
    own = torch.randn(flat(model).numel(), generator=torch.Generator().manual_seed(dist.get_rank())).double()
    spread(own, trained(model))
    found = [flat(model).numpy()]
    for _ in range(ROUNDS):
        with lab.wire() as wire:
            gossip.mix()
        found.append(flat(model).numpy())
    again = Gossip(model, graph)
    again.load_state_dict(gossip.state_dict())
    assert again.distances() == gossip.distances() or kind is not Gossip
    word, n, rank = torch.zeros(1), dist.get_world_size(), dist.get_rank()
    with lab.wire() as one:
        if n > 1:
            works = [dist.irecv(word, (rank - 1) % n), dist.isend(torch.ones(1), (rank + 1) % n)]
            for each in works:
                each.wait()
    return found, wire.total_bytes, one.total_bytes / n - 4


def compare(graph, n, found):
    weights = np.stack([each[0][0] for each in found])
    for number in range(ROUNDS):
        weights = matrix(graph, n, number) @ weights
        assert_allclose(np.stack([each[0][number + 1] for each in found]), weights, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("graph", ["ring", "exponential"])
def test_each_round_is_a_product_with_the_graphs_matrix(graph, n):
    found = lab.run(mixed, n, args=(graph,))
    compare(graph, n, found)
    first, last = (np.mean([each[0][at] for each in found], axis=0) for at in (0, -1))
    assert_allclose(last, first, rtol=1e-12, atol=1e-14)
    if graph == "exponential" and n in (1, 2, 4):
        after = int(np.log2(n))
        assert_allclose(np.ptp([each[0][after] for each in found], axis=0), 0, atol=1e-14)
    _, total, header = found[0]
    neighbours = 0 if n == 1 else 2 if graph == "ring" and n > 2 else 1
    full_bytes = 8 * flat(Small()).numel()
    assert total == n * neighbours * (full_bytes + header) if n > 1 else total == 0


@pytest.mark.parametrize(("graph", "kind"), [("ring", Onesided), ("exponential", Still)])
def test_mutants_are_told(graph, kind):
    found = lab.run(mixed, 4, args=(graph, kind))
    with pytest.raises(AssertionError):
        compare(graph, 4, found)


def test_what_cannot_be_is_refused():
    def refused():
        with pytest.raises(ValueError, match="graph must be one of ring, exponential, not 'star'"):
            Gossip(Small(), "star")
        with pytest.raises(ValueError, match="statistics beside its weights"):
            Gossip(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)))
        with pytest.raises(ValueError, match="must be alike on all ranks"):
            Gossip(Small(), ["ring", "exponential"][dist.get_rank()])

    lab.run(refused, 2)
