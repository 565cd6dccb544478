"""Local steps: weights, states and bytes of 1 to 4 ranks, against all of them in one process."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

from dtlib import lab
from dtlib.ranks import compression
from dtlib.ranks.asynchrony import LocalSGD
from dtlib.ranks.mesh import Mesh
from dtlib.theory.asynchrony import local_bytes

from .oracle import Side, Small, flat, loss_of, trained

PERIOD, STEPS, RATE, MOMENTUM = 4, 11, 0.7, 0.9
adam = functools.partial(torch.optim.Adam, lr=0.01)
sgd = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
WEIGHTS = [1.0, 3.0, 0.5, 2.0]
nesterov = functools.partial(torch.optim.SGD, lr=RATE, momentum=MOMENTUM, nesterov=True)

# By name: the inner optimizer, what the library is told, what the oracle is told.
CASES = {
    "mean": (sgd, {}, {}),
    "each step": (sgd, {"local_steps": 1}, {"period": 1}),
    "adam, kept": (adam, {}, {}),
    "adam, averaged": (adam, {"states": "averaged"}, {"states": "averaged"}),
    "adam, restarted": (adam, {"states": "restarted"}, {"states": "restarted"}),
    "outer": (adam, {"outer": nesterov}, {"outer": (RATE, MOMENTUM)}),
    "outer of rate 1": (sgd, {"outer": functools.partial(torch.optim.SGD, lr=1.0)}, {"outer": (1.0, 0.0)}),
    "weighted": (sgd, {"weight": "own"}, {"weights": WEIGHTS}),
    "weighted, outer": (sgd, {"weight": "own", "outer": nesterov},
                        {"weights": WEIGHTS, "outer": (RATE, MOMENTUM)}),
    "two parts": (sgd, {"fragments": 2}, {"fragments": 2}),
    "two parts, outer": (adam, {"fragments": 2, "outer": nesterov, "states": "averaged"},
                         {"fragments": 2, "outer": (RATE, MOMENTUM), "states": "averaged"}),
    "warm-up": (sgd, {"warm_up": 3}, {"warm_up": 3}),
    "late": (sgd, {"overlap": 3}, {"overlap": 3}),
    "late, outer": (adam, {"overlap": 1, "fragments": 2, "outer": nesterov, "kept": 0.25, "weight": "own"},
                    {"overlap": 1, "fragments": 2, "outer": (RATE, MOMENTUM), "kept": 0.25, "weights": WEIGHTS}),
    "late as can be": (sgd, {"overlap": 4, "outer": nesterov, "warm_up": 2, "exchange": compression.TopK(1.0)},
                       {"overlap": 4, "outer": (RATE, MOMENTUM), "warm_up": 2}),
    "all that is to be sent": (sgd, {"exchange": compression.TopK(1.0)}, {}),
    "all, outer": (adam, {"exchange": compression.TopK(1.0), "outer": nesterov}, {"outer": (RATE, MOMENTUM)}),
}  # fmt: skip


class Summed(LocalSGD):
    """Mutant: weights are added up."""

    def _mean(self, tensors, share, group):
        super()._mean(tensors, 1.0, group)


class Forgetful(LocalSGD):
    """Mutant: the outer optimizer forgets its momentum."""

    def _meet(self, number):
        for outer in self.outer:
            outer.state.clear()
        super()._meet(number)


class Early(LocalSGD):
    """Mutant: begins to count with 0, as torch's averagers do."""

    def _is_due(self, number):
        return (self.steps - 1) % self.local_steps == 0


class Equal(LocalSGD):
    """Mutant: all ranks weigh the same."""

    def __init__(self, *args, weight=1.0, **options):
        super().__init__(*args, **options)


class Waits(LocalSGD):
    """Mutant: what is to come some steps later is waited for."""

    def _arrive(self):
        if self._under_way is not None:
            self._under_way.until = self.steps
        super()._arrive()


class Overwrites(LocalSGD):
    """Mutant: what a rank did while the mean was under way is lost."""

    def __init__(self, *args, kept=0.5, **options):
        super().__init__(*args, kept=0.0, **options)


class Twice(LocalSGD):
    """Mutant: the difference is taken from the weights of the rank, not from those of the last meeting."""

    def _meet(self, number):
        for old, p in zip(self._old[number], self._parts[number].values(), strict=True):
            old.data.copy_(p.detach() + (old.detach() - p.detach()) / 2)
        super()._meet(number)


MUTANTS = {
    "summed": (Summed, "mean"),
    "outer momentum dropped": (Forgetful, "outer"),
    "one step early": (Early, "mean"),
    "weights ignored": (Equal, "weighted"),
    "waited for": (Waits, "late"),
    "own steps lost": (Overwrites, "late, outer"),
    "from elsewhere": (Twice, "outer"),
}


def made(name, kind=LocalSGD):
    """In a rank: a model and its local steps."""
    rank, (inner, options, theirs) = dist.get_rank(), CASES[name]
    model, options = Small(seed=rank), {"local_steps": PERIOD, **copy.deepcopy(options)}
    if "weight" in options:
        options["weight"] = theirs["weights"][rank]
    return model, kind(model, inner(model.parameters()), **options)


def train(model, local, steps):
    """In a rank: the weights after each of `steps`."""
    found = []
    for step in steps:
        local.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        local.step()
        found.append(flat(model))
    return found


def all_cases():
    n, found = dist.get_world_size(), {}
    for name in CASES:
        found[name] = train(*made(name), range(STEPS))
    for name, (kind, case) in MUTANTS.items() if n > 1 else ():
        found[name] = train(*made(case, kind), range(STEPS))
    return found


@functools.cache
def results(n):
    return lab.run(all_cases, n)


@functools.cache
def wanted(case, n):
    inner, _, options = CASES[case]
    options = {"period": PERIOD, **options}
    if "weights" in options:
        options["weights"] = options["weights"][:n]
    return Side(n, inner, **options).train(STEPS)


def compare(name, case, n):
    for rank, theirs in enumerate(wanted(case, n)):
        # float64: sums over ranks in another order, and Adam's division by roots of small numbers
        assert_close(results(n)[rank][name][-1], theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_one_process(case, n):
    compare(case, case, n)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_told(mutant, n):
    with pytest.raises(AssertionError):
        compare(mutant, MUTANTS[mutant][1], n)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("case", ["mean", "outer", "weighted", "all, outer"])
def test_ranks_differ_until_they_meet_and_have_the_same_bits_then(case, n):
    by_rank = [each[case] for each in results(n)]
    for step in range(1, STEPS + 1):
        same = all(torch.equal(each[step - 1], by_rank[0][step - 1]) for each in by_rank)
        assert same == (step % PERIOD == 0)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_one_step_of_sgd_at_a_time_is_data_parallelism(n):
    """Means of θ − η v_r, and of momenta v_r, are a step with those of the mean gradient: SGD is linear in it."""
    model = Small(0)
    optimizer = sgd(trained(model))
    for step in range(STEPS):
        optimizer.zero_grad()
        sum(loss_of(model, rank, step) / n for rank in range(n)).backward()
        optimizer.step()
    assert_close(results(n)[0]["each step"][-1], flat(model), rtol=1e-10, atol=1e-12)


def test_a_smaller_group_meets_in_between():
    def on_two_levels():
        node = Mesh({"node": 2, "card": 2}).group("card")
        model = Small(seed=dist.get_rank())
        return train(model, LocalSGD(model, sgd(model.parameters()), local_steps=4, inside=(2, node)), range(STEPS))

    found = lab.run(on_two_levels, 4)
    for rank, theirs in enumerate(Side(4, sgd, period=4, nodes=(2, 2)).train(STEPS)):
        assert_close(found[rank][-1], theirs, rtol=1e-10, atol=1e-12)
    assert torch.equal(found[0][1], found[1][1])
    assert torch.equal(found[2][1], found[3][1])
    assert not torch.equal(found[0][1], found[2][1])


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_bytes_are_those_of_the_meetings(n):
    """To the byte: an all-reduce has two headers to each rank where a gathering of a word has one."""

    def counted():
        header = 0
        if n > 1:
            with lab.wire() as one:
                dist.all_gather([torch.zeros(1) for _ in range(n)], torch.zeros(1))
            header = one.total_bytes // (n * (n - 1)) - 4
        found = {}
        for name, options in {"mean": {}, "outer": {"outer": nesterov}, "averaged": {"states": "averaged"},
                              "parts": {"fragments": 2}, "late": {"fragments": 2, "overlap": 1}}.items():  # fmt: skip
            model = nn.Sequential(nn.Linear(24, 24, bias=False), nn.Linear(24, 24, bias=False))
            local = LocalSGD(model, sgd(model.parameters()), local_steps=PERIOD, **options)
            with lab.wire() as wire:
                for _ in range(STEPS):
                    local.zero_grad()
                    model(torch.randn(3, 24)).square().sum().backward()
                    local.step()
            found[name] = wire.total_bytes
        return found, header

    found, header = lab.run(counted, n)[0]
    if n == 1:
        assert set(found.values()) == {0}
        return
    full, headers = 4 * 2 * 24 * 24, 2 * n * (n - 1) * header
    meetings = STEPS // PERIOD
    assert found["mean"] == found["outer"] == n * local_bytes(full, n, STEPS, PERIOD) + meetings * headers
    assert found["averaged"] == 2 * found["mean"]  # momentum as well
    halves = meetings + STEPS // PERIOD + (STEPS % PERIOD >= PERIOD // 2)
    assert found["late"] == found["parts"] == n * local_bytes(full / 2, n, halves) + halves * headers


@pytest.mark.parametrize("n", [1, 2, 3])
def test_ranks_that_never_agree_have_weights_in_common(n):
    def trained_late():
        model, local = made("late, outer")
        return train(model, local, range(STEPS))[-1], local.common(), made("mean")[1].common()

    found = lab.run(trained_late, n)
    side = Side(n, adam, period=PERIOD, **{**CASES["late, outer"][2], "weights": WEIGHTS[:n]})
    side.train(STEPS)
    for own, common, none in found:
        for name, old in zip(common, side.old, strict=True):
            assert_close(common[name], old, rtol=1e-9, atol=1e-11)
            assert torch.equal(common[name], found[0][1][name])
        assert not torch.equal(own, torch.cat([each.flatten() for each in common.values()]))
        assert none == {}
    assert n == 1 or not torch.equal(found[0][0], found[1][0])
