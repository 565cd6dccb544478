"""Replicas that drift are named, ranks skip alike, and a loss that spikes is not learned from."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dtlib import lab
from dtlib.ranks.reliability.guard import (
    Altered,
    AtRest,
    Drifted,
    Replicas,
    Spikes,
    checksum,
    drift_of,
    not_finite,
)

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


def numbers(n=999, dtype=torch.float32, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)


def flipped(tensor, place, bit):
    found = tensor.clone()
    data = found.view(-1).view(torch.uint8)
    data[place * tensor.element_size() + bit // 8] ^= 1 << bit % 8
    return found


def sees_all(sum_of):
    """Whether a checksum tells each change that one may meet, and nothing where nothing changed."""
    x = numbers()
    nan = torch.cat([x, torch.tensor([math.nan, math.inf, -0.0])])
    swapped = x.clone()
    swapped[[3, 7]] = x[[7, 3]]
    pair = flipped(flipped(x, 1, 0), 2, 0)
    double, mirrored = x.double(), x.double()
    mirrored[3] = -mirrored[7]
    turned = mirrored.clone()
    turned[[3, 7]] = mirrored[[7, 3]]
    return (
        sum_of(nan) == sum_of(nan.clone())
        and sum_of(x) == sum_of(x.view(27, 37).t().contiguous().t())
        and all(sum_of(flipped(x, place, bit)) != sum_of(x) for place in (0, 500, 998) for bit in range(32))
        and all(sum_of(flipped(nan, place, 22)) != sum_of(nan) for place in (0, 1000))
        and sum_of(swapped) != sum_of(x)
        and sum_of(pair) != sum_of(x)
        and sum_of(flipped(flipped(double, 1, 63), 2, 63)) != sum_of(double)
        and sum_of(turned) != sum_of(mirrored)
        and sum_of(nan) != sum_of(torch.cat([x, torch.tensor([math.nan, math.inf, 0.0])]))
    )


def odd_weights(flat):
    words = flat.view({4: torch.int32, 8: torch.int64}[flat.element_size()]).long()
    return int((words * (torch.arange(len(words)) * 2654435762 + 1)).sum())


MUTANTS = {
    "a sum of floats": lambda t: float(t.sum()),
    "a norm": lambda t: float(t.double().norm()),
    "no places": lambda t: int(t.contiguous().view(torch.int32).long().sum()),
    "odd weights of words of 64 bits": lambda t: odd_weights(t.contiguous().flatten()),
    "even weights": lambda t: int((t.contiguous().flatten().view(torch.int32).long() << 33).sum()),
    "the first thousand bits": lambda t: int(checksum(t.flatten()[:32])),
}


def test_a_checksum_tells_each_change_of_a_bit():
    assert sees_all(lambda tensor: int(checksum(tensor)))


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_miss(name):
    assert not sees_all(MUTANTS[name])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_checksums_of_all_dtypes_and_empty_tensors(dtype):
    x = numbers(40, torch.float32).abs().mul(3).to(dtype)
    assert int(checksum(x)) == int(checksum(x.clone())) == int(checksum(x.view(5, 8)))
    if dtype is not torch.bool:
        assert len({int(checksum(flipped(x, 5, bit))) for bit in range(8 * x.element_size())} - {int(checksum(x))}) == (
            8 * x.element_size()
        )
    assert int(checksum(x[:0])) == 0
    assert int(checksum(x[0])) == int(checksum(x[:1]))


def test_long_tensors_are_summed_in_parts():
    x = numbers(2**20 + 5)
    assert int(checksum(x)) != int(checksum(flipped(x, 2**20 + 2, 0)))
    y = x.clone()
    y[[0, 2**20]] = x[[2**20, 0]]
    assert int(checksum(x)) != int(checksum(y))


@pytest.mark.parametrize(
    ("rows", "first", "undecided"),
    [
        ([[1, 2], [1, 2], [1, 3]], {2: "b"}, ()),
        ([[1, 2], [4, 5], [1, 2]], {1: "a"}, ()),
        ([[1, 2], [1, 3]], {}, ("b",)),
        ([[1, 2], [4, 2], [1, 5], [1, 2]], {1: "a", 2: "b"}, ()),  # two rows of four alike: by parameter all is clear
        ([[1, 2], [1, 2], [1, 3], [1, 3]], {}, ("b",)),
        ([[1, 1], [2, 1], [3, 1]], {}, ("a",)),
    ],
)
def test_who_differs_by_majority(rows, first, undecided):
    found = drift_of("ab", rows, 7)
    assert (found.step, found.first, found.undecided) == (7, first, undecided)
    assert all(f"rank {rank} differs from most, first in {name}" in str(found) for rank, name in first.items())
    assert ("no value has a majority" in str(found)) == bool(undecided)


def test_replicas_alike_and_rows_of_other_lengths():
    assert drift_of("ab", [[1, 2]] * 5) is None
    assert drift_of("ab", [[1, 2]]) is None
    with pytest.raises(ValueError, match="checksums must have 2 of each rank, one a name; rank 1 has 1"):
        drift_of("ab", [[1, 2], [1]])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)


def train(every, at, bit, culprits, name):
    net, rank = Net(), dist.get_rank()
    with torch.no_grad():
        net.last.bias[1] = math.nan  # alike on all ranks, and no drift
    replicas = Replicas(net, every=every)
    torch.manual_seed(rank)
    for step in range(1, 13):
        with torch.no_grad():
            for each in net.parameters():
                each += 0.1
            if step == at and rank in culprits:
                each = net.get_parameter(name)
                each.copy_(flipped(each, 2, bit))
        try:
            replicas.step()
        except Drifted as drifted:
            return drifted.drift.step, drifted.drift.first, drifted.drift.undecided
    return None


@pytest.mark.parametrize(
    ("n", "every", "at", "culprits"),
    [(1, 3, 2, [0]), (2, 3, 4, [1]), (3, 4, 5, [0]), (4, 1, 6, [2, 3]), (4, 5, 5, [3]), (3, 3, 1, [])],
)
def test_a_flipped_bit_is_found_within_every_steps(n, every, at, culprits):
    name = "last.weight"
    found = lab.run(train, n, args=(every, at, 23, culprits, name))
    step = -(-at // every) * every
    if n == 1 or not culprits:
        expected = None
    elif 2 * len(culprits) < n:
        expected = step, dict.fromkeys(culprits, name), ()
    else:
        expected = step, {}, (name,)
    assert found == [expected] * n
    assert step - at < every


def sent(differ):
    net, rank = Net(), dist.get_rank()
    rows = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    if differ and rank == 0:
        net.first.bias.data[0] += 1
    replicas, found = Replicas(net, every=2), []
    dist.barrier()
    for _ in range(2):
        with lab.wire() as wire, contextlib.suppress(Drifted):
            replicas.step()
        found.append(wire.total_bytes)
    for count in (1, len(list(net.parameters())) + len(list(net.buffers()))):
        row, rows = torch.zeros(count, dtype=torch.int64), [torch.zeros(count, dtype=torch.int64) for _ in rows]
        with lab.wire() as wire:
            dist.all_gather(rows, row)
        found.append(wire.total_bytes)
    net.first.weight.grad = torch.ones(5, 6)
    with lab.wire() as wire:
        not_finite(net.parameters())
    return *found, wire.total_bytes


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("differ", [False, True])
def test_bytes_are_those_of_gathering_checksums(n, differ):
    for idle, checked, one, each, byte in lab.run(sent, n, args=(differ,)):
        assert idle == 0
        assert checked == one + (each if differ and n > 1 else 0)
        # The library's headers are the same for 1 word, for 9 and for a byte: the difference is what theory counts.
        assert each - one == n * (n - 1) * 8 * (9 - 1)  # of 8 bytes each
        assert one - byte == n * (n - 1) * (8 - 1)


def gradients(bad):
    net, rank = Net(), dist.get_rank()
    for parameter in list(net.parameters())[rank:]:
        parameter.grad = torch.ones_like(parameter)
    if rank in bad:
        net.last.bias.grad[0] = bad[rank]
    return not_finite(net.parameters()), not_finite([])


@pytest.mark.parametrize(
    ("n", "bad"), [(1, {0: math.nan}), (2, {1: math.inf}), (3, {}), (4, {0: -math.inf, 2: math.nan})]
)
def test_all_ranks_hear_of_gradients_that_are_not_finite(n, bad):
    assert lab.run(gradients, n, args=(bad,)) == [(tuple(bad), ())] * n


def looks(spikes, losses):
    return [spikes.look(loss) for loss in losses]


def falling(n, seed=0):
    noise = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    return [2 + 8 * math.exp(-step / 50) + 0.05 * float(noise[step]) for step in range(n)]


@pytest.mark.parametrize("seed", range(5))
def test_a_loss_that_falls_never_spikes(seed):
    assert set(looks(Spikes(), falling(400, seed))) == {"go"}


def test_a_spike_is_skipped_and_one_that_stays_rolls_back():
    spikes = Spikes(window=8)
    assert looks(spikes, falling(100)) == ["go"] * 100
    assert looks(spikes, [9.0, 3.1, math.nan, 9.0]) == ["skip", "go", "skip", "skip"]
    assert looks(spikes, [math.inf, 9.0, 9.0]) == ["roll back", "go", "go"]  # afresh: nothing to compare with
    assert looks(Spikes(patience=1), [math.nan]) == ["roll back"]


def test_what_spiked_is_not_learned_from():
    """A window that holds the spikes takes them for usual: a mutant that keeps every loss would go on."""
    spikes = Spikes(window=4, patience=100)
    assert looks(spikes, [1.0] * 4 + [5.0] * 20) == ["go"] * 4 + ["skip"] * 20
    assert list(spikes.losses) == [1.0] * 4


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"window": 1}, "window"),
        ({"factor": 0}, "factor"),
        ({"factor": math.nan}, "factor"),
        ({"patience": 0}, "patience"),
    ],
)
def test_bad_options_are_refused_by_name(options, name):
    with pytest.raises(ValueError, match=name):
        Spikes(**options)


def test_a_guard_of_no_steps_is_refused():
    with pytest.raises(ValueError, match="every must be at least 1, not 0"):
        Replicas(Net(), every=0)


def at_rest(change, culprit):
    """What `AtRest` says of a step, a change of one bit of `change` on rank `culprit`, and another step."""
    rank, guard = dist.get_rank(), AtRest()
    tensors = {f"weights of {rank}": numbers(50, seed=rank), "moments": numbers(50, seed=rank + 9)}
    guard.look(tensors)  # nothing was left yet
    for step in range(3):
        for each in tensors.values():
            each += 1  # training's own changes are none
        guard.leave(tensors)
        if step == 1 and rank == culprit:
            name = {"weights": f"weights of {rank}"}.get(change, change)
            tensors[name].copy_(flipped(tensors[name], 7, 0))
        try:
            guard.look(tensors)
        except Altered as found:
            return step, found.first, str(found)
    return None


@pytest.mark.parametrize(("n", "culprit"), [(1, 0), (2, 1), (3, 0), (4, 3), (3, None)])
@pytest.mark.parametrize("change", ["weights", "moments"])
def test_a_bit_that_changes_at_rest_is_named_on_all_ranks(n, culprit, change):
    name = f"weights of {culprit}" if change == "weights" else change
    said = f"{name} of rank {culprit} has changed while nobody used it"
    expected = None if culprit is None else (1, {culprit: name}, said)
    assert lab.run(at_rest, n, args=(change, culprit)) == [expected] * n


def test_other_tensors_than_were_left_are_refused():
    def job():
        guard = AtRest()
        guard.leave({"a": torch.ones(2)})
        with pytest.raises(ValueError, match=r"tensors must be those that were left, \['a'\], not \['b'\]"):
            guard.look({"b": torch.ones(2)})

    lab.run(job, 1)
