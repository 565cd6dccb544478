"""ZeRO++ as one step: gradients by one process that knows all, bytes on each level, losses, and what is wrong."""

from __future__ import annotations

import functools
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dtlib import lab, theory
from dtlib.ranks import zero
from dtlib.ranks.compression import ZeroPlusPlus, zeropp
from dtlib.ranks.model import GPT, GPTConfig, batches, load_text, next_token_loss
from dtlib.theory.collectives import chunk_bounds
from dtlib.theory.units import MB

from .oracle import SHAPES, Given, gradients

BLOCK, BITS = 32, 4
NODES = [(2, 2), (3, 2), (1, 3), (3, 1), (1, 1)]  # nodes, ranks in each
SIZES = [int(np.prod(shape)) for shape in SHAPES.values()]
make_sgd = functools.partial(torch.optim.SGD, lr=1.0)


def rounded(x, bits):
    """Block by block the nearest of 2 h + 1 even steps."""
    half, found = 2 ** (bits - 1) - 1, np.empty_like(x)
    for at in range(0, len(x), BLOCK):
        scale = np.abs(x[at : at + BLOCK]).max() or 1
        found[at : at + BLOCK] = np.round(x[at : at + BLOCK] / scale * half) / half * scale
    return found


def reduced(flats, nodes, q, *, bits=BITS):
    """What each rank keeps of the sum of all `flats`: inside nodes, then across, all but a rank's own rounded."""
    n, total = nodes * q, len(flats[0])
    bounds = chunk_bounds(total, n)
    chunk = lambda x, rank: x[bounds[rank] : bounds[rank + 1]]  # noqa: E731
    kept = [None] * n
    for place in range(q):
        ranks = range(place, n, q)
        sums = []
        for node in range(nodes):
            rows = [np.concatenate([chunk(flats[node * q + i], rank) for rank in ranks]) for i in range(q)]
            sums.append(sum(row if i == place else rounded(row, bits) for i, row in enumerate(rows)))
        ends = np.cumsum([0, *(bounds[rank + 1] - bounds[rank] for rank in ranks)])
        for mine, rank in enumerate(ranks):
            parts = [each[ends[mine] : ends[mine + 1]] for each in sums]
            kept[rank] = sum(part if node == mine else rounded(part, bits) for node, part in enumerate(parts))
    return kept


def given_to_ranks(q, mutants=()):
    """The gradient that this rank keeps, without and with each mutant."""
    n = dist.get_world_size()
    (by_rank,) = gradients(n, 1)

    def kept():
        model = Given(dtype=torch.float32)
        wrapped = ZeroPlusPlus(model, make_sgd, ranks_per_node=q, quantised_block=BLOCK, gradient_bits=BITS)
        wrapped(by_rank[dist.get_rank()]).backward()
        (shard,) = wrapped.shards
        return shard.grad.numpy().copy()

    found = [kept()]
    for mutant in mutants:
        with mock.patch.object(zeropp.NodeShard, *mutant):
            found.append(kept())
    return found


def oracle(nodes, q):
    n = nodes * q
    (by_rank,) = gradients(n, 1)
    flats = [np.concatenate([each[name].reshape(-1) for name in SHAPES]).astype(np.float32) / n for each in by_rank]
    return reduced(flats, nodes, q), sum(flats)


def is_right(found, expected):
    return all(np.allclose(one, other, rtol=1e-5, atol=1e-6) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(("nodes", "q"), NODES)
def test_gradients_are_those_of_one_process_that_rounds_alike(nodes, q):
    found = [each for (each,) in lab.run(given_to_ranks, nodes * q, args=(q,))]
    expected, exact = oracle(nodes, q)
    assert is_right(found, expected)
    assert (nodes * q == 1) == np.allclose(np.concatenate(found), exact, atol=1e-6)


def summed_in_codes(self, peers, rows):
    """The running sum is rounded each time, as a ring would."""
    how, num = (self.gradient_bits, self.quantised_block), rows[peers.rank].numel()
    total = rows[peers.rank].float()
    arrived = {r: zeropp.coded(torch.zeros(num), *how) for r in range(peers.n) if r != peers.rank}
    yield from zeropp.swap(peers, {r: zeropp.coded(rows[r], *how) for r in arrived}, arrived, self.number)
    for part in arrived.values():
        total = zeropp.decoded(zeropp.coded(total + zeropp.decoded(part, num, *how), *how), num, *how)
    return total


def across_alone(self, sent):
    """The second hop is left out."""
    chunks, q = sent.split(self.sizes), self.inside.n
    mine = yield from self._summed(self.inside, [torch.cat(chunks[place::q]) for place in range(q)])
    sent[self.own] = mine.split(self.sizes[self.inside.rank :: q])[self.across.rank]


def rounded_twice(self, sent):
    """What leaves the node is rounded before it is rounded for its journey: own parts too."""
    chunks, q = sent.split(self.sizes), self.inside.n
    mine = yield from self._summed(self.inside, [torch.cat(chunks[place::q]) for place in range(q)])
    how = self.gradient_bits, self.quantised_block
    mine = zeropp.decoded(zeropp.coded(mine, *how), mine.numel(), *how)
    sent[self.own] = yield from self._summed(self.across, mine.split(self.sizes[self.inside.rank :: q]))


def test_mutants_are_refused():
    mutants = [("_summed", summed_in_codes), ("scatter", across_alone), ("scatter", rounded_twice)]
    expected, _ = oracle(2, 2)
    for number, found in enumerate(zip(*lab.run(given_to_ranks, 4, args=(2, mutants)), strict=True)):
        assert is_right(found, expected) == (number == 0)


# --- a training -----------------------------------------------------------------------------------------------------

CONFIG = GPTConfig(num_layers=2, hidden=96)
WIDE = GPTConfig(num_layers=2, hidden=256)  # headers are less than 1 % of what travels
make_adamw = functools.partial(torch.optim.AdamW, lr=1e-3)


def train(make, steps, seed=5, config=CONFIG):
    """Losses; of the last step what crossed the wire, a weight that was used, and the exact one."""
    rank, n = dist.get_rank(), dist.get_world_size()
    wrapped = make(GPT(config, seed=seed), make_adamw)
    data, losses, used = batches(load_text(), batch=12, seq=16, rank=rank, world_size=n, seed=seed), [], {}
    block = wrapped.module.blocks[0].mlp
    block.register_forward_hook(lambda m, *_: used.update(weight=m.up.weight.detach().clone()))
    for step in range(steps):
        tokens, targets = next(data)
        before = wrapped.state_dict()["blocks.0.mlp.up.weight"] if step == steps - 1 else None
        with lab.wire() as wire:
            loss = next_token_loss(wrapped(tokens), targets)
            loss.backward()
            wrapped.optimizer.step()
            wrapped.optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach())
        losses.append(loss.item() / n)
    return losses, wire, used["weight"], before


@pytest.mark.parametrize(("nodes", "q"), [(2, 2), (3, 2)])
def test_a_step_sends_what_theory_says_on_each_level(nodes, q):
    make = functools.partial(ZeroPlusPlus, ranks_per_node=q, quantised_block=64)
    cluster, n = lab.cluster(nodes, q, inside=200 * MB, across=100 * MB), nodes * q
    found = lab.run(train, args=(make, 2, 5, WIDE), cluster=cluster)
    law = theory.zero.zero_plus_plus_traffic(WIDE.num_params, n, q, block=64)
    for rank, (losses, wire, used, exact) in enumerate(found):
        inside = sum(num for to, num in enumerate(wire.sent_to) if to // q == rank // q)
        across = sum(wire.sent_to) - inside
        assert across == pytest.approx(law.across_nodes, rel=0.01)
        assert inside == pytest.approx(law.within_node, rel=0.01)
        assert wire.across_bytes > across  # of the cable, with headers and acknowledgements
        assert losses[1] < losses[0]
        assert torch.equal(used, found[0][2])
        assert 0 < (used - exact).abs().max() <= exact.abs().max() / 254 * 1.001


def test_losses_stay_beside_those_of_stage_3():
    def both():
        make = functools.partial(ZeroPlusPlus, ranks_per_node=2, quantised_block=64)
        return [[train(each, 15, seed)[0] for each in (functools.partial(zero.Zero, stage=3), make)] for seed in (5, 6)]

    for exact, codes in lab.run(both, 4)[0]:
        assert exact[-1] < 0.75 * exact[0]
        assert codes != exact
        assert codes == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"ranks_per_node": 2}, "ranks_per_node must divide the number of ranks, 1; 2 does not"),
        ({"ranks_per_node": 1, "gradient_bits": 9}, "gradient_bits must be at most 8, not 9"),
        ({"ranks_per_node": 1, "gradient_bits": 1}, "gradient_bits must be at least 2, not 1"),
        ({"ranks_per_node": 1, "quantised_block": 0}, "quantised_block must be at least 1, not 0"),
    ],
)
def test_what_cannot_be_is_named(wrong, said):
    def refused():
        with lab.wire() as wire, pytest.raises(ValueError, match=said):
            ZeroPlusPlus(torch.nn.Linear(2, 2), make_sgd, **wrong)
        assert wire.total_bytes == 0

    lab.run(refused, 1)
