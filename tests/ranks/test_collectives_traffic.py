"""What the collectives send is what theory says, to the byte, in as many steps; and wrong algorithms are found out."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from dtlib import lab, theory
from dtlib.ranks import collectives
from dtlib.theory.units import MiB

CALLS = {
    name: getattr(collectives, name)
    for name in theory.collectives.ALGORITHMS
    if name not in ("ring_all_gather", "two_level_all_reduce", "tree_reduce")
}


def calls(n):
    """(algorithm, options of theory, what a rank calls with its tensor) for everything there is on n ranks."""
    for name, call in CALLS.items():
        if name not in theory.collectives.ROOTED:
            yield name, {}, call
    for src in {0, n - 1}:
        yield "tree_broadcast", {"src": src}, lambda t, src=src: collectives.tree_broadcast(t, src=src)
        yield "tree_reduce", {"src": src}, lambda t, src=src: collectives.tree_reduce(t, dst=src)
    for size in (g for g in range(1, n + 1) if n % g == 0):
        options = {"ranks_per_node": size}
        yield "two_level_all_reduce", options, lambda t, o=options: collectives.two_level_all_reduce(t, **o)
    yield "ring_all_gather", {}, gather_own


def gather_own(tensor):
    chunk = tensor.tensor_split(dist.get_world_size())[dist.get_rank()]
    return collectives.ring_all_gather(chunk, num_elements=tensor.numel())


@pytest.mark.parametrize("n", [pytest.param(n, marks=pytest.mark.soak if n in (6, 7, 9) else ()) for n in range(1, 10)])
def test_payload_and_steps_are_exactly_theorys(n):
    cases = [(0, torch.float32), (1, torch.float64), (7, torch.bfloat16), (36, torch.int64), (50, torch.float32)]

    def send():
        records = []
        for _, _, call in calls(n):
            for length, dtype in cases:
                with lab.messages() as seen, lab.SendCounter() as dispatched:
                    call(torch.ones(length, dtype=dtype))
                assert dispatched.sent_bytes == seen.sent_bytes
                assert dispatched.collectives == []  # send and receive alone
                records.append(seen)
        return records

    by_rank = lab.run(send, n, timeout_s=120)
    expected = [
        (name, theory.collectives.traffic(name, length, dtype.itemsize, n, **options))
        for name, options, _ in calls(n)
        for length, dtype in cases
    ]
    for case, (name, traffic) in enumerate(expected):
        records = [records[case] for records in by_rank]
        assert tuple(record.sent_bytes for record in records) == traffic.sent_bytes, name
        assert lab.count_steps(records) == traffic.steps, name


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_wire_bytes_are_within_one_percent(n):
    length = MiB // 4 + 3

    def send():
        readings = []
        for _, _, call in calls(n):
            tensor = torch.ones(length)
            with lab.wire() as wire:
                call(tensor)
            readings.append((wire.total_bytes, wire.sent_bytes))
        return readings

    by_rank = lab.run(send, n)
    for case, (name, options, _) in enumerate(calls(n)):
        traffic = theory.collectives.traffic(name, length, 4, n, **options)
        assert by_rank[0][case][0] == pytest.approx(traffic.total_bytes, rel=0.01), name
        for rank, readings in enumerate(by_rank):
            # a rank that sends nothing still tells its partner that it is ready: a header a message
            assert readings[case][1] == pytest.approx(traffic.sent_bytes[rank], rel=0.01, abs=2048), name


def test_a_long_message_in_pieces_sends_no_more():
    length = 5 * 3 * MiB // 4 + 1

    def send():
        seen = []
        for call in (collectives.ring_all_reduce, collectives.naive_all_reduce):
            with lab.messages() as record:
                call(torch.ones(length))
            seen.append(record)
        return [(record.num_sent, record.sent_bytes) for record in seen]

    by_rank = lab.run(send, 3)
    for case, name in enumerate(("ring_all_reduce", "naive_all_reduce")):
        traffic = theory.collectives.traffic(name, length, 4, 3)
        assert tuple(results[case][1] for results in by_rank) == traffic.sent_bytes
        assert all(results[case][0] > traffic.sent_bytes[rank] / (5 * MiB) for rank, results in enumerate(by_rank))


# Wrong algorithms ---------------------------------------------------------------------------------------------------


def shifted(transfer, length, n):
    """The chunk after the right one."""
    size = length // n
    start = (transfer.start + size) % length
    return replace(transfer, start=start, stop=start + size)


MUTANTS = {
    "none": lambda rounds, length, n: rounds,
    "last step skipped": lambda rounds, length, n: rounds[:-1],
    "first step skipped": lambda rounds, length, n: rounds[1:],
    "a step twice": lambda rounds, length, n: (*rounds[: n - 1], rounds[n - 2], *rounds[n - 1 :]),
    "phases swapped": lambda rounds, length, n: (*rounds[n - 1 :], *rounds[: n - 1]),
    "off by one chunk": lambda rounds, length, n: (
        tuple(shifted(t, length, n) for t in rounds[0]),
        *rounds[1:],
    ),
    "replaced instead of added": lambda rounds, length, n: (
        tuple(replace(t, combine=False) for t in rounds[0]),
        *rounds[1:],
    ),
    "added instead of replaced": lambda rounds, length, n: (
        *rounds[:-1],
        tuple(replace(t, combine=True) for t in rounds[-1]),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.parametrize("n", [2, 4])
def test_a_wrong_ring_gives_wrong_values_and_the_right_one_does_not(name, n):
    def run_mutant():
        from dtlib.ranks.collectives._rounds import run_round
        from dtlib.ranks.shared.peers import Peers

        rank, length = dist.get_rank(), 4 * n
        tensor = 2.0 ** torch.arange(rank * length, (rank + 1) * length).double()
        expected = tensor.clone()
        dist.all_reduce(expected)
        rounds = theory.collectives.schedule("ring_all_reduce", length, n)
        for transfers in MUTANTS[name](rounds, length, n):
            run_round(Peers(tensor.device), transfers, tensor, "sum")
        return torch.equal(tensor, expected)

    assert all(lab.run(run_mutant, n)) == (name == "none")


def test_a_forgotten_group_reaches_strangers():
    def reduce(forget):
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        group = pairs[dist.get_rank() // 2]
        tensor = torch.tensor([2.0 ** dist.get_rank()])
        collectives.ring_all_reduce(tensor, group=None if forget else group)
        return tensor.item()

    assert lab.run(reduce, 4, args=(False,)) == [3, 3, 12, 12]
    assert lab.run(reduce, 4, args=(True,)) == [15, 15, 15, 15]


def test_sum_is_not_mean_and_naive_is_not_a_ring():
    """A value check alone would pass the star for a ring; the traffic tells them apart."""

    def compare():
        results = []
        for call in (collectives.ring_all_reduce, collectives.naive_all_reduce):
            tensor = torch.full((12,), float(dist.get_rank()))
            with lab.messages() as seen:
                call(tensor, "mean")
            results.append((tensor[0].item(), seen.sent_bytes))
        total = collectives.ring_all_reduce(torch.full((12,), float(dist.get_rank())), "sum")
        return results, total[0].item()

    by_rank = lab.run(compare, 4)
    ring, naive = ([results[case] for results, _ in by_rank] for case in range(2))
    assert [value for value, _ in ring] == [value for value, _ in naive] == [1.5] * 4
    assert [total for _, total in by_rank] == [6.0] * 4
    assert tuple(sent for _, sent in ring) == theory.collectives.traffic("ring_all_reduce", 12, 4, 4).sent_bytes
    assert tuple(sent for _, sent in naive) != tuple(sent for _, sent in ring)
