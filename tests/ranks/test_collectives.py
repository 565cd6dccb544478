"""The collectives from scratch give torch's values, in every dtype, length, layout and group."""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist

from dtlib import lab
from dtlib.ranks import collectives

ALL_REDUCES = ("naive", "ring", "tree", "recursive_doubling", "halving_doubling")
LENGTHS = (0, 1, 5, 24, 37)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
CASES = [(dtype, op) for dtype in DTYPES for op in ("sum", "mean", "max") if dtype.is_floating_point or op != "mean"]
# One, two, a power of two and none, one above a power of two; the soak has all up to nine.
WORLD_SIZES = [pytest.param(n, marks=pytest.mark.soak if n > 5 else ()) for n in range(1, 10)]


def everyones(dtype, length, n):
    """What each of n ranks holds: whole numbers, so that no order of adding rounds, in bfloat16 either."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(-9, 10, (n, length), generator=generator).to(dtype)


def reference(rows, op):
    """torch's own answer. gloo has no mean; a mean of whole numbers, sum and division, rounds once in any order."""
    total = rows[dist.get_rank()].clone()
    dist.all_reduce(total, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM)
    return total / len(rows) if op == "mean" else total


def same(got, want, *about):
    """Raise with all that was tried unless dtype, shape and every bit agree."""
    if got.dtype != want.dtype or got.shape != want.shape or not torch.equal(got, want):
        raise AssertionError(f"{about} on rank {dist.get_rank()}: {got} is not {want}")


def all_reduces(n):
    for name in ALL_REDUCES:
        yield name, getattr(collectives, f"{name}_all_reduce")
    for size in (g for g in range(1, n + 1) if n % g == 0):
        for name in ("two_level", "parallel_rings"):
            of_nodes = getattr(collectives, f"{name}_all_reduce")
            yield f"{name} {size}", functools.partial(of_nodes, ranks_per_node=size)


def try_reductions(dtype, op, length):
    rank, n = dist.get_rank(), dist.get_world_size()
    rows = everyones(dtype, length, n)
    want = reference(rows, op)
    for name, all_reduce in all_reduces(n):
        tensor = rows[rank].clone()
        assert all_reduce(tensor, op) is tensor
        same(tensor, want, name, dtype, op, length)
    tensor = rows[rank].clone()
    chunk = collectives.ring_reduce_scatter(tensor, op)
    same(chunk, want.tensor_split(n)[rank], "reduce_scatter", dtype, op, length)
    same(tensor, rows[rank], "reduce_scatter changed its input", dtype, op, length)
    for dst in {0, n - 1}:
        tensor = collectives.tree_reduce(rows[rank].clone(), op, dst=dst)
        if rank == dst:
            same(tensor, want, "reduce", dtype, op, length, dst)


def try_moves(dtype, length):
    rank, n = dist.get_rank(), dist.get_world_size()
    rows = everyones(dtype, length, n)
    full = collectives.ring_all_gather(rows[0].tensor_split(n)[rank], num_elements=length)
    same(full, rows[0], "all_gather", dtype, length)
    same(collectives.ring_all_gather(rows[rank]), rows.view(-1), "all_gather of equal chunks", dtype, length)
    exchanged = collectives.pairwise_all_to_all(rows[rank].clone())
    same(exchanged, torch.cat([row.tensor_split(n)[rank] for row in rows]), "all_to_all", dtype, length)
    for src in range(n):
        same(collectives.tree_broadcast(rows[rank].clone(), src=src), rows[src], "broadcast", dtype, length, src)


@pytest.mark.parametrize("n", WORLD_SIZES)
def test_values_equal_torchs(n):
    def try_everything():
        for length in LENGTHS if n <= 4 else LENGTHS[::2]:
            for dtype, op in CASES:
                try_reductions(dtype, op, length)
            for dtype in (*DTYPES, torch.bool):
                try_moves(dtype, length)

    lab.run(try_everything, n, timeout_s=120)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("pipelined", [True, False])
def test_values_when_messages_are_cut_or_batched(n, pipelined):
    """Pieces of eight bytes, two of them under way, stand for a long message; batches are what an accelerator uses."""

    def try_everything():
        from dtlib.ranks.shared import peers

        peers.ADDED_BYTES, peers.MOVED_BYTES, peers.SCRATCH_BYTES = 8, 16, 16
        if not pipelined:
            peers.Peers.pipelined = property(lambda self: False, lambda self, value: None)
        for length in (0, 1, 3, 37):
            for dtype, op in CASES[::2]:
                try_reductions(dtype, op, length)
                try_moves(dtype, length)

    lab.run(try_everything, n, timeout_s=120)


def test_rings_among_some_ranks_in_any_order():
    """Pieces of eight bytes, two or three posted ahead: scratch memory is used again; chunks of no piece, one, many."""

    def try_rings():
        from dtlib.ranks.collectives import _rings
        from dtlib.ranks.shared import peers

        peers.ADDED_BYTES, peers.MOVED_BYTES = 8, 16
        us = peers.Peers(torch.device("cpu"))
        for n, held in itertools.product((2, 3, 5), (16, 24)):
            members, peers.SCRATCH_BYTES = [*range(n, 0, -2), *range(n - 1, 0, -2)], held
            if us.rank not in members:
                continue
            here = members.index(us.rank)
            for length, (dtype, op) in itertools.product((1, n - 1, n + 1, 5 * n + 1, 20 * n - 1), CASES):
                rows, about = everyones(dtype, length, n), (n, dtype, op, length, held)
                want = rows.amax(0) if op == "max" else rows.sum(0, dtype=dtype)
                want = want / n if op == "mean" else want
                part, whole, given = want.tensor_split(n)[here], rows[here].clone(), rows[here].clone()
                _rings.all_reduce_among(us, members, whole, op)
                same(whole, want, "all_reduce", *about)
                same(_rings.reduce_scatter_among(us, members, given, op, torch.empty_like(part)), part, "out", *about)
                same(given, rows[here], "reduce_scatter changed its input", *about)
                same(_rings.reduce_scatter_among(us, members, given, op), part, "reduce_scatter in place", *about)
                _rings.all_gather_among(us, members, given)
                same(given, want, "all_gather", *about)

    lab.run(try_rings, 6, timeout_s=120)


def test_long_messages():
    """Several real pieces a chunk, and a length that divides by nothing."""
    from dtlib.ranks.shared.peers import MOVED_BYTES

    def try_everything():
        try_reductions(torch.float32, "sum", 3 * 2 * MOVED_BYTES // 4 + 5)

    lab.run(try_everything, 3, timeout_s=120)


def test_rounding_is_the_same_on_every_rank_and_close_to_torchs():
    """Other orders of adding round differently: float32 sums of n terms of size 1 agree to n units of 2⁻²³."""

    def reduce_noise():
        generator = torch.Generator().manual_seed(dist.get_rank())
        noise, results = torch.randn(1001, generator=generator), []
        theirs = noise.clone()
        dist.all_reduce(theirs)
        for _, all_reduce in all_reduces(dist.get_world_size()):
            results.append(all_reduce(noise.clone()))
            torch.testing.assert_close(results[-1], theirs, rtol=0, atol=6 * 6 * 2**-23)
        return results

    by_rank = lab.run(reduce_noise, 6)
    for results in by_rank[1:]:
        for mine, first in zip(results, by_rank[0], strict=True):
            torch.testing.assert_close(mine, first, rtol=0, atol=0)


def test_shapes_and_layouts():
    def try_layouts():
        rank, n = dist.get_rank(), dist.get_world_size()
        rows = everyones(torch.float32, 48, n)
        for make in (
            lambda row: row.view(8, 6).t(),  # transposed
            lambda row: row.view(24, 2)[:, 1],  # every second
            lambda row: row[:1].reshape(()),  # a scalar
            lambda row: row.view(2, 4, 6).permute(2, 0, 1),
        ):
            want = sum(make(row) for row in rows)
            for name, all_reduce in all_reduces(n):
                tensor = make(rows[rank].clone())
                strides = tensor.stride()
                all_reduce(tensor)
                same(tensor, want, name)
                assert tensor.stride() == strides
            same(collectives.tree_broadcast(make(rows[rank].clone()), src=1), make(rows[1]), "broadcast")
            chunk = collectives.ring_reduce_scatter(make(rows[rank].clone()))
            same(chunk.reshape(-1), want.reshape(-1).tensor_split(n)[rank], "reduce_scatter")
        sheet = rows[rank].clone().view(12, 4)
        collectives.ring_all_reduce(sheet[2:5, 1:3])
        want = rows[rank].clone().view(12, 4)
        want[2:5, 1:3] = sum(row.view(12, 4)[2:5, 1:3] for row in rows)
        same(sheet, want, "a window, and nothing around it")

    lab.run(try_layouts, 3)


def test_shapes_follow_torchs():
    def compare():
        rank, n = dist.get_rank(), dist.get_world_size()
        rows = everyones(torch.float32, 24 * n, n).view(n, 4 * n, 6)
        outputs = [torch.empty(4, 6) for _ in range(3)]
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        scatter(outputs[0], rows[rank].clone())
        same(collectives.ring_reduce_scatter(rows[rank]), outputs[0], "reduce_scatter")
        full = torch.empty(4 * n, 6)
        gather(full, outputs[0])
        same(collectives.ring_all_gather(outputs[0]), full, "all_gather")
        exchanged = torch.empty(4 * n, 6)
        dist.all_to_all_single(exchanged, rows[rank].contiguous())
        same(collectives.pairwise_all_to_all(rows[rank]), exchanged, "all_to_all")

    lab.run(compare, 4)


def test_results_may_go_to_memory_that_is_there():
    def reuse():
        rank, n = dist.get_rank(), dist.get_world_size()
        rows = everyones(torch.float32, 8, n)
        total, chunk, full = sum(rows), torch.empty(8).tensor_split(n)[rank].clone(), torch.empty(2, 4)
        assert collectives.ring_reduce_scatter(rows[rank], out=chunk) is chunk
        same(chunk, total.tensor_split(n)[rank], "reduce_scatter")
        assert collectives.ring_all_gather(chunk, num_elements=8, out=full) is full
        same(full, total.view(2, 4), "all_gather")

    lab.run(reuse, 3)


def test_a_parameter_is_reduced_without_autograd_seeing_it():
    def reduce_parameter():
        parameter = torch.nn.Parameter(torch.ones(5))
        collectives.ring_all_reduce(parameter, "mean")
        assert parameter.requires_grad
        assert parameter.grad_fn is None
        return parameter.sum().item()

    assert lab.run(reduce_parameter, 2) == [5.0, 5.0]


def test_groups_speak_among_themselves():
    """Ranks 1, 3 and 4 of five, and the pair that is left, at the same time."""

    def in_groups():
        trio, pair = dist.new_group([4, 1, 3]), dist.new_group([0, 2])
        group = pair if dist.get_rank() in (0, 2) else trio
        members = dist.get_process_group_ranks(group)
        mine = torch.full((7,), 10.0 ** dist.get_rank())
        want = torch.full((7,), sum(10.0**rank for rank in members))
        for name in ALL_REDUCES:
            same(getattr(collectives, f"{name}_all_reduce")(mine.clone(), group=group), want, name)
        nodes = collectives.two_level_all_reduce(mine.clone(), ranks_per_node=len(members), group=group)
        same(nodes, want, "two_level")
        place = dist.get_rank(group)
        chunk = collectives.ring_reduce_scatter(mine, group=group)
        same(chunk, want.tensor_split(len(members))[place], "reduce_scatter")
        same(collectives.ring_all_gather(chunk, num_elements=7, group=group), want, "all_gather")
        root = collectives.tree_broadcast(mine.clone(), src=1, group=group)
        same(root, torch.full((7,), 10.0 ** members[1]), "broadcast")
        reduced = collectives.tree_reduce(mine.clone(), dst=1, group=group)
        if place == 1:
            same(reduced, want, "reduce")
        exchanged = collectives.pairwise_all_to_all(mine[: len(members)].clone(), group=group)
        same(exchanged, torch.tensor([10.0**rank for rank in members]), "all_to_all")

    lab.run(in_groups, 5)


def _refusals():
    tensor, group = torch.ones(4), None
    yield lambda: collectives.ring_all_reduce([1.0], "sum"), "tensor must be a torch.Tensor, not list"
    yield lambda: collectives.ring_all_reduce(tensor, "avg"), "op must be one of sum, mean, max, not 'avg'"
    yield lambda: collectives.tree_all_reduce(tensor, None), "op must be one of"
    yield lambda: collectives.ring_all_reduce(tensor.long(), "mean"), "op must be sum or max for torch.int64"
    yield lambda: collectives.ring_all_reduce(tensor.to(torch.complex64)), "must be of dtype .* not torch.complex64"
    yield lambda: collectives.halving_doubling_all_reduce(tensor > 0), "must be of dtype .* not torch.bool"
    yield lambda: collectives.naive_all_reduce(tensor.to_sparse()), "tensor must be a dense tensor"
    yield lambda: collectives.recursive_doubling_all_reduce(torch.ones(1).expand(4)), "share memory"
    yield lambda: collectives.tree_broadcast(torch.ones(1).expand(4)), "share memory"
    yield lambda: collectives.ring_reduce_scatter(tensor, "min"), "op must be one of"
    yield lambda: collectives.ring_all_gather("chunk"), "chunk must be a torch.Tensor, not str"
    yield lambda: collectives.ring_all_gather(tensor, num_elements=9), "chunk must have"
    yield lambda: collectives.ring_all_gather(tensor, num_elements=-1), "num_elements must be at least 0"
    yield lambda: collectives.ring_all_gather(tensor, out=torch.ones(3)), "out must have 12 elements"
    yield lambda: collectives.ring_all_gather(tensor, out=torch.ones(2, 6).t()), "out must be contiguous"
    yield lambda: collectives.ring_reduce_scatter(torch.ones(6), out=torch.ones(2).half()), "out must have 2 elements"
    yield lambda: collectives.two_level_all_reduce(tensor, ranks_per_node=2), "ranks_per_node must divide"
    yield lambda: collectives.two_level_all_reduce(tensor, ranks_per_node=0), "ranks_per_node must be"
    yield lambda: collectives.two_level_all_reduce(tensor, ranks_per_node=1.5), "ranks_per_node must be"
    yield lambda: collectives.tree_broadcast(tensor, src=3), "src must be below the number of ranks, 3, not 3"
    yield lambda: collectives.tree_broadcast(tensor, src=-1), "src must be at least 0, not -1"
    yield lambda: collectives.tree_reduce(tensor, dst=3), "dst must be below the number of ranks, 3, not 3"
    yield lambda: collectives.pairwise_all_to_all(tensor.to(torch.complex64), group=group), "complex64"


def test_bad_input_is_named_before_anything_is_sent():
    def refuse():
        count = 0
        with lab.messages() as seen:
            for call, message in _refusals():
                with pytest.raises(ValueError, match=message):
                    call()
                count += 1
        outside = dist.new_group([0, 1])
        if dist.get_rank() == 2:
            with pytest.raises(ValueError, match="group must contain the calling process"):
                collectives.ring_all_reduce(torch.ones(2), group=outside)
        return count, seen.num_sent

    assert lab.run(refuse, 3) == [(23, 0)] * 3


def test_what_differs_between_ranks_is_named_at_torchs_debug_level():
    """Before a message leaves. Without it another size is gloo's abort, another dtype of that size other numbers."""

    def unlike(rank):
        odd = rank == 1
        x, whole = torch.ones(3, 4), torch.ones(6)
        yield "ring_all_reduce", lambda: collectives.ring_all_reduce(torch.ones(4 if odd else 3, 4))
        yield "int32", lambda: collectives.tree_all_reduce(x.int() if odd else x)
        yield "(4, 3)", lambda: collectives.ring_reduce_scatter(x.t() if odd else x)
        yield "max", lambda: collectives.naive_all_reduce(x, "max" if odd else "sum")
        yield "src", lambda: collectives.tree_broadcast(x, src=rank % 2)
        yield "a part of", lambda: collectives.ring_all_gather(whole[:2], num_elements=6 if not odd else 5)
        yield (
            "pairwise_all_to_all",
            lambda: collectives.pairwise_all_to_all(x) if odd else collectives.halving_doubling_all_reduce(x),
        )

    def main():
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        words = "all ranks must ask for the same; rank 1"
        for what, call in unlike(dist.get_rank()):
            with lab.SendCounter() as seen, pytest.raises(ValueError, match=words) as error:
                call()
            assert not seen.sent_bytes, "no message has left"
            assert what in str(error.value) or what == "src"
        same(collectives.ring_all_reduce(torch.ones(5)), torch.full((5,), 3.0))  # and what is alike goes on
        return True

    assert lab.run(main, 3, timeout_s=30) == [True] * 3
