"""The parameter server: who waits, what a gradient is of, what is sent; against a replay of the order of arrival."""

from __future__ import annotations

import functools
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

from dtlib import lab
from dtlib.ranks.asynchrony import HEADER_BYTES, serve, server, work
from dtlib.ranks.mesh import Mesh
from dtlib.theory.asynchrony import staleness_bound

from .oracle import Small, flat, loss_of, replayed, trained, versions

RATE, UPDATES = 0.05, 12
D = 8 * sum(p.numel() for p in Small().parameters())


def halved(delay):
    return 1 / (1 + delay)


def modes(n):
    """By name: options that say who waits, and others, with `n` ranks of which one is the server."""
    return {
        "synchronous": ({"collect": n - 1}, {}),
        "backup": ({"collect": max(1, n - 2), "drop_stale": True}, {}),
        "bound 0": ({"bound": 0}, {}),
        "bound 1": ({"bound": 1}, {}),
        "bound 3": ({"bound": 3}, {}),
        "asynchronous": ({}, {}),
        "two of all": ({"collect": min(2, n - 1)}, {}),
        "aware": ({}, {"rate_of_staleness": halved}),
        "momentum": ({}, {"momentum": 0.9}),
    }


class FromPush(server._Server):
    """Mutant: a worker is told the version that its own push met, not the one that it pulls."""

    def answer(self, worker, kind):
        true = self.version
        self.copy = (true, self.weights.detach().clone())
        met = [push.version for push in self.log if push.worker == worker]
        self.version = met[-1] if met else 0
        self.copy = (self.version, self.copy[1])
        super().answer(worker, kind)
        self.version = true


class Late(server._Server):
    """Mutant: a worker may be one further ahead than the bound."""

    def may_go(self, worker):
        self.bound += 1
        try:
            return super().may_go(worker)
        finally:
            self.bound -= 1


class Summed(server._Server):
    """Mutant: gradients are added up."""

    def update(self):
        n = len(self.pending)
        self.pending = {worker: (gradient * n, delay) for worker, (gradient, delay) in self.pending.items()}
        super().update()


class Stale(server._Server):
    """Mutant: what is stale is used all the same."""

    @property
    def drop_stale(self):
        return False

    @drop_stale.setter
    def drop_stale(self, value):
        pass


MUTANTS = {
    "counted from the push": (FromPush, "asynchronous"),
    "one too far ahead": (Late, "bound 0"),
    "summed": (Summed, "synchronous"),
    "stale ones used": (Stale, "backup"),
}


def one_mode(rules, options, servers=(0,), updates=UPDATES, steps=None, group=None, mutant=None, frozen=True):
    """In a rank: the log of a server, or the losses of a worker; and the weights at the end."""
    rank, options = dist.get_rank(group), dict(options)
    model = Small(seed=dist.get_rank())
    model.first.bias.requires_grad_(not frozen)
    if rank in servers:
        before, server._Server = server._Server, mutant or server._Server
        optimizer = functools.partial(torch.optim.SGD, lr=RATE, momentum=options.pop("momentum", 0.0))
        log = serve(model, optimizer, servers=servers, updates=updates, group=group, **rules, **options)
        server._Server = before
        rows = [(p.worker, p.clock, p.pulled, p.version, p.used) for p in log]
        assert all(push.staleness == push.version - push.pulled for push in log)
        assert [p.seconds for p in log] == sorted(p.seconds for p in log)
        return rows, flat(model)

    def loss(step):
        time.sleep(0.002 * rank * (1 + step % 3))  # the later ranks are slower, and all are uneven
        return loss_of(model, rank, step)

    return work(model, loss, servers=servers, steps=steps and steps[rank], group=group), flat(model)


def all_modes():
    n = dist.get_world_size()
    found = {name: one_mode(*each) for name, each in modes(n).items()}
    for name, (mutant, mode) in MUTANTS.items():
        found[name] = one_mode(*modes(n)[mode], mutant=mutant)
    return found


@functools.cache
def results(n):
    return lab.run(all_modes, n, timeout_s=100)


def compare(name, mode, n):
    rules, options = modes(n)[mode]
    by_rank = [each[name] for each in results(n)]
    rows, weights = by_rank[0]
    assert rows == replayed([row[0] for row in rows], range(1, n), updates=UPDATES, **rules)
    made = versions(rows, rate=RATE, **options)
    assert len(made) == UPDATES + 1
    assert_close(weights, made[-1], rtol=1e-12, atol=1e-14)
    for worker in range(1, n):
        losses, theirs = by_rank[worker]
        assert torch.equal(theirs, weights)
        assert len(losses) == sum(row[0] == worker for row in rows)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("mode", modes(2))
def test_log_and_weights_are_those_of_a_replay(mode, n):
    """The order in which gradients arrive says the rest: which versions they are of, which are used, all weights."""
    compare(mode, mode, n)


@pytest.mark.parametrize("n", [3, 4])
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_told(mutant, n):
    with pytest.raises(AssertionError):
        compare(mutant, MUTANTS[mutant][1], n)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_clocks_differ_by_the_bound_at_most_and_staleness_follows(n):
    for bound in (0, 1, 3):
        rows = results(n)[0][f"bound {bound}"][0]
        clock = dict.fromkeys(range(1, n), 0)
        for worker, own, pulled, version, used in rows:
            clock[worker] = own + 1
            # its gradient of clock `own` was begun when it was at most `bound` ahead of everyone
            assert own - min(clock.values()) <= bound
            assert not used or version - pulled <= staleness_bound(n - 1, bound)
    assert all(version == pulled for _, _, pulled, version, _ in results(n)[0]["synchronous"][0])


@pytest.mark.parametrize("n", [3, 4])
def test_without_a_bound_each_update_ages_all_gradients_under_way(n):
    """W workers, W − 1 of which have a gradient under way at each update, which ages by it: all ages, those among them
    of gradients that come after the last update, add up to W − 1 times the updates."""
    rows = results(n)[0]["asynchronous"][0]
    others = n - 2
    assert sum(version - pulled for _, _, pulled, version, _ in rows) == others * UPDATES
    assert [used for *_, used in rows] == [True] * UPDATES + [False] * others


def sharded():
    return one_mode({"collect": 1}, {}, servers=(1, 0)), one_mode({"collect": dist.get_world_size() - 2}, {}, (0, 2))


@pytest.mark.parametrize("n", [3, 4])
def test_several_servers_have_a_part_each(n):
    found = lab.run(sharded, n)
    for case, servers in ((0, (1, 0)), (1, (0, 2))):
        workers = [rank for rank in range(n) if rank not in servers]
        last = found[workers[0]][case][1]
        cuts = last.tensor_split(2)
        for place, each in enumerate(servers):
            rows, weights = found[each][case]
            collect = len(workers) if case else 1
            assert rows == replayed([row[0] for row in rows], workers, updates=UPDATES, collect=collect)
            assert torch.equal(weights.tensor_split(2)[place], cuts[place])
        for worker in workers:
            assert torch.equal(found[worker][case][1], last)
    # in step, both parts are of the same gradients: as with one server, which begins with the weights of its seed
    rows, _ = found[0][1]
    starts = [flat(Small(seed)).tensor_split(2)[place] for place, seed in enumerate((0, 2))]
    assert_close(found[n - 1 if n > 3 else 1][1][1], _from(torch.cat(starts), rows), rtol=1e-12, atol=1e-14)


def _from(start, rows):
    """The last version, of rows in step, from these weights."""
    model, weights = Small(), start
    for version in range(UPDATES):
        gradients = []
        for worker, clock, *_ in sorted(row for row in rows if row[3] == version and row[4]):
            torch.nn.utils.vector_to_parameters(weights, trained(model))
            model.zero_grad()
            loss_of(model, worker, clock).backward()
            gradients.append(torch.cat([p.grad.reshape(-1) for p in trained(model)]))
        weights = weights - RATE * sum(gradients) / len(gradients)
    return weights


def test_workers_may_leave_at_different_times():
    steps = {1: 5, 2: 2, 3: 0, 0: None}

    def leaving():
        return [one_mode(rules, {}, updates=None, steps=steps) for rules in ({}, {"collect": 3}, {"bound": 0})]

    found = lab.run(leaving, 4)
    for case in range(3):
        rows, weights = found[0][case]
        assert [sum(row[0] == worker for row in rows) for worker in (1, 2, 3)] == [5, 2, 0]
        assert all(used for *_, used in rows)
        assert_close(weights, versions(rows, rate=RATE)[-1], rtol=1e-12, atol=1e-14)
        assert all(torch.equal(found[worker][case][1], weights) for worker in (1, 2, 3))
    assert {row[3] for row in found[0][1][0]} == set(range(5))  # of two gradients, then of one
    assert all(own < 2 or pulled == version for _, own, pulled, version, _ in found[0][2][0])


class Ones(nn.Module):
    """A gradient of ones: each entry of version v, at a rate of 1, is −v."""

    def __init__(self):
        super().__init__()
        self.x = nn.Parameter(torch.zeros(1000))

    def forward(self):
        """Their sum."""
        return self.x.sum()


class Writing(server._Server):
    """Mutant: the weights leave while the next update may write into them."""

    def answer(self, worker, kind):
        self.copy = (self.version, self.weights.detach())
        super().answer(worker, kind)


def seen(mutant):
    """In a rank: of each gradient what its weights were, or, from the server, should have been."""
    rank, model, pulled = dist.get_rank(), Ones(), []
    if rank == 0:
        server._Server = mutant or server._Server
        log = serve(model, lambda parameters: torch.optim.SGD(parameters, lr=1.0), updates=30)
        return {(push.worker, push.clock): (-push.pulled, -push.pulled) for push in log}
    if rank == 2:  # comes late for its answers, which leave when it is there
        receive = server._Place.receive
        server._Place.receive = lambda *args: (time.sleep(0.02), receive(*args))[1]

    def loss(step):
        pulled.append((model.x.min().item(), model.x.max().item()))
        return model()

    work(model, loss)
    return {(rank, clock): each for clock, each in enumerate(pulled)}


def test_an_answer_is_of_one_version():
    for mutant in (None, Writing):
        should, *workers = lab.run(seen, 4, args=(mutant,))
        assert ({key: each for own in workers for key, each in own.items()} == should) == (mutant is None)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_bytes_are_those_of_pushes_and_answers(n):
    """To the byte: beyond them there are the headers of gloo's messages, of which two in a row show the size."""

    def counted():
        word = torch.zeros(1)
        with lab.wire() as one:
            if dist.get_rank() == 0:
                for _ in range(n - 1):
                    dist.recv(word)
            else:
                dist.send(word, 0)
        with lab.wire() as wire:
            rows, _ = one_mode({"bound": 2}, {}, frozen=False)
        return one.total_bytes // (n - 1) - 4, wire.total_bytes, len(rows)

    header, total, pushes = lab.run(counted, n)[0]
    assert 0 < header < 500
    answers = pushes + n - 1
    messages = (n - 1) + 2 * pushes + 2 * answers
    assert total - messages * header == (n - 1 + pushes + answers) * HEADER_BYTES + (pushes + answers) * D


def test_a_worker_that_raises_ends_all():
    def broken():
        model = Small()
        if dist.get_rank() == 0:
            return serve(model, lambda p: torch.optim.SGD(p, lr=RATE), updates=100, collect=2)

        def loss(step):
            if step == 3 and dist.get_rank() == 2:
                raise ArithmeticError("no data")
            return loss_of(model, dist.get_rank(), step)

        return work(model, loss)

    with pytest.raises(lab.RankError, match="ArithmeticError: no data") as told:
        lab.run(broken, 3, timeout_s=30)
    assert told.value.rank == 2


def test_a_group_has_its_own_server():
    def in_halves():
        mesh = Mesh({"half": 2, "rank": 2})
        return one_mode({}, {}, group=mesh.group("rank"))

    found = lab.run(in_halves, 4)
    for first in (0, 2):
        rows, weights = found[first]
        assert rows == replayed([row[0] for row in rows], [1], updates=UPDATES)
        assert torch.equal(found[first + 1][1], weights)
        assert_close(weights, versions(rows, rate=RATE, seed=first)[-1], rtol=1e-12, atol=1e-14)


def test_what_cannot_be_is_refused():
    def refused():
        sgd, model = functools.partial(torch.optim.SGD, lr=RATE), Small()
        rank = dist.get_rank()
        for servers in ((), (0, 0), (0, 1), (2,)):
            with pytest.raises(ValueError, match="servers must be"):
                serve(model, sgd, servers=servers)
        with pytest.raises(ValueError, match="statistics beside its weights"):
            work(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), lambda step: None)
        mixed = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).double())
        with pytest.raises(ValueError, match="parameters of one dtype, not float32 and float64"):
            work(mixed, lambda step: None)
        with pytest.raises(ValueError, match="must contain this rank" if rank else "must not contain this rank"):
            (serve if rank else work)(model, sgd)
        with pytest.raises(ValueError, match="must be alike on all ranks"):
            work(nn.Linear(2 + rank, 3), lambda step: None)

    lab.run(refused, 2)

    def alone():
        with pytest.raises(ValueError, match="not all 1"):
            serve(Small(), functools.partial(torch.optim.SGD, lr=RATE))

    lab.run(alone, 1)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"collect": 2}, "collect must be at most the number of workers, 1, not 2"),
        ({"collect": 0}, "collect must be at least 1"),
        ({"bound": -1}, "bound must be at least 0"),
        ({"updates": 1.5}, "updates must be a whole number"),
        ({"drop_stale": 1}, "drop_stale must be True or False"),
    ],
)
def test_options_out_of_range_are_refused(options, told):
    def asked():
        if dist.get_rank() == 0:
            serve(Small(), functools.partial(torch.optim.SGD, lr=RATE), **options)
        else:
            work(Small(), lambda step: None)

    with pytest.raises(lab.RankError, match=told):
        lab.run(asked, 2)
