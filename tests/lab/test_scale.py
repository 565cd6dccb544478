"""lab.at_scale: one rank of a thousand holds and sends what the arithmetic says."""

import dataclasses
import math
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from dtlib import lab
from dtlib.ranks.model import GPT, GPTConfig, batches, load_text, next_token_loss, preset


def _train(config):
    """Build, shard block by block, train for a step: the model's memory after each part."""
    model = GPT(config)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens_bs, targets_bs = next(batches(load_text(), batch=2, seq=config.seq))
    with lab.memory(model, optimizer, tokens_bs, targets_bs, detail="marks") as memory:
        memory.mark("sharded")
        next_token_loss(model(tokens_bs), targets_bs).backward()
        memory.mark("backward done")
        optimizer.step()
        memory.mark("step done")
    return memory


def _shapes(config):
    """The shapes of the root's parameters, and of each block's."""
    with torch.device("meta"):
        model = GPT(config)
    blocks = [[tuple(p.shape) for p in block.parameters()] for block in model.blocks]
    inside = {id(p) for p in model.blocks.parameters()}
    return [[tuple(p.shape) for p in model.parameters() if id(p) not in inside], *blocks]


def _shard(shape, world_size, rank):
    """Numbers in a shard of the rows, as stored (the first rank's size for all) and as this rank owns them."""
    rows, width = shape[0], math.prod(shape[1:])
    stored = math.ceil(rows / world_size)
    owned = max(0, min(stored, rows - rank * stored))
    return stored * width, owned * width


@pytest.mark.parametrize(
    ("world_size", "rank"), [(1024, 0), (1024, 63), (1024, 64), (1024, 1023), (8, 3), (64, 63), (100, 57), (1, 0)]
)
def test_fsdp2_stores_the_shards_that_are_counted_by_hand(world_size, rank):
    config = preset("tiny")
    scaled = lab.at_scale(_train, world_size, rank, args=(config,))
    groups = _shapes(config)
    shards = [_shard(shape, world_size, rank) for group in groups for shape in group]
    stored, owned = (4 * sum(numbers) for numbers in zip(*shards, strict=True))
    sharded, backward, step = (moment.held for moment in scaled.result.timeline)
    assert (sharded.parameters, sharded.gradients, sharded.optimizer) == (stored, 0, 0)
    assert (backward.parameters, backward.gradients, backward.optimizer) == (stored, stored, 0)
    # Gradients are views of what reduce-scatter wrote, padding and all; optimizer states have the rank's own rows.
    assert (step.parameters, step.gradients, step.optimizer) == (stored, stored, 2 * owned + 4 * len(shards))
    assert step.activations == backward.activations == 0
    if (world_size, rank) == (1024, 1023):
        assert owned == 0  # no tensor has more than 256 rows
    if world_size == 1:
        assert stored == 4 * config.num_params

    full = [4 * world_size * sum(_shard(shape, world_size, rank)[0] for shape in group) for group in groups]
    sent = scaled.collectives
    if world_size == 1:
        assert sent.log == ()
        return
    assert sent.count("all_gather") == 1 + 2 * config.num_layers  # the root stays; a block is gathered again
    assert sent.full_bytes("all_gather") == full[0] + 2 * sum(full[1:])
    assert sent.count("reduce_scatter", world_size) == 1 + config.num_layers
    assert sent.full_bytes("reduce_scatter") == sum(full)
    assert {call.group_size for call in sent.log} == {world_size}


def test_real_ranks_hold_the_same():
    """A thread of gloo may let go of a finished collective late: ranks hold this or more, and this when it is quiet."""
    config = preset("tiny", seq=32)
    scaled = [_measured(lab.at_scale(_train, 3, rank, args=(config,)).result) for rank in range(3)]
    quietest = [dict.fromkeys(measured, math.inf) for measured in scaled]
    for _ in range(8):
        for least, memory in zip(quietest, lab.run(_train, 3, args=(config,)), strict=True):
            found = _measured(memory)
            assert found.keys() == least.keys()
            least.update({name: min(least[name], found[name]) for name in found})
        if quietest == scaled:
            return
    assert quietest == scaled


def _measured(memory):
    """Bytes of every kind at every mark, and the peak."""
    marked = {
        (mark, kind): held
        for mark, moment in enumerate(memory.timeline)
        for kind, held in dataclasses.asdict(moment.held).items()
    }
    return {**marked, "peak": memory.peak}


def test_dtensors_way_to_learn_a_shape_takes_nothing():
    def step(rows):
        linear = nn.Linear(16, rows, bias=False)
        fully_shard(linear)
        optimizer = torch.optim.AdamW(linear.parameters())
        linear.weight.grad = torch.zeros_like(linear.weight)
        with lab.memory(linear, optimizer, detail="marks") as memory:
            optimizer.step()
        return memory.peak

    shard = 4 * 16 * 2048 // 1024
    # Weight, gradient, two moments, the step, and what AdamW computes: a root, then a quotient beside it.
    assert lab.at_scale(step, args=(2048,)).result == 6 * shard + 4


def test_torchs_tracker_of_fsdp2_has_the_same_peak():
    def both(config):
        model = GPT(config)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        tokens_bs = torch.zeros(2, config.seq, dtype=torch.int64)
        theirs = FSDPMemTracker(model, optimizer)
        theirs.track_inputs((tokens_bs,))
        with lab.memory(model, optimizer, tokens_bs, detail="marks") as ours, theirs:
            next_token_loss(model(tokens_bs), tokens_bs).backward()
            optimizer.step()
        (snapshot,) = theirs.get_tracker_snapshot("peak").values()
        return ours.peak, {str(getattr(kind, "value", kind)): size for kind, size in snapshot.items()}

    peak, theirs = lab.at_scale(both, 1024, args=(preset("tiny"),)).result
    assert peak == theirs["Total"]


def test_a_large_model_takes_no_memory_here():
    def build(config):
        return sum(parameter.numel() for parameter in GPT(config).parameters())

    config = GPTConfig(num_layers=96, hidden=12288, num_heads=96, seq=2048, vocab=50257)  # GPT-3
    scaled = lab.at_scale(build, args=(config,), detail="modules")
    assert scaled.result == config.num_params
    assert scaled.memory.peak >= 4 * scaled.result > 690e9
    assert (scaled.world_size, scaled.rank) == (1024, 0)


def test_meshes_and_sharded_tensors():
    def look():
        mesh = init_device_mesh("cpu", (8, 128), mesh_dim_names=("replicate", "shard"))
        linear = nn.Linear(256, 256)
        fully_shard(linear, mesh=mesh)
        linear(torch.randn(2, 256)).sum().backward()
        row = distribute_tensor(torch.zeros(256, 3), mesh["shard"], [Shard(0)])
        again = DeviceMesh("cpu", list(range(1024)))
        return mesh.get_coordinate(), row.to_local().shape, again.size(), mesh["replicate"].get_local_rank()

    scaled = lab.at_scale(look, 1024, 130)
    assert scaled.result == ((1, 2), (2, 3), 1024, 1)
    full = 4 * (256 * 256 + 256)  # 256 rows on 128 ranks: no padding
    assert scaled.collectives.full_bytes("all_gather", 128) == full
    assert scaled.collectives.full_bytes("reduce_scatter", 128) == full
    assert scaled.collectives.full_bytes("all_reduce", 8) == full // 128


def test_every_collective_is_counted():
    def talk():
        x, many = torch.zeros(16), torch.zeros(16 * 4)
        dist.all_reduce(x)
        dist.broadcast(x, src=0)
        dist.all_gather_into_tensor(many, x)
        dist.all_gather([torch.zeros(16) for _ in range(4)], x)
        dist.reduce_scatter_tensor(x, many)
        dist.all_to_all_single(many, torch.zeros(64))
        dist.reduce(x, dst=1)
        dist.barrier()
        dist.send(x, dst=1)
        half = dist.new_group([0, 1])
        dist.all_reduce(x, group=half)
        return dist.get_rank(), dist.get_world_size(), dist.get_world_size(half)

    scaled = lab.at_scale(talk, 4)
    assert scaled.result == (0, 4, 2)
    assert [
        (call.name, call.group_size, call.full_bytes) for call in scaled.collectives.log if call.name != "barrier"
    ] == [
        ("all_reduce", 4, 64),
        ("broadcast", 4, 64),
        ("all_gather", 4, 256),
        ("all_gather", 4, 256),
        ("reduce_scatter", 4, 256),
        ("all_to_all", 4, 256),
        ("reduce", 4, 64),
        ("send", 4, 64),
        ("all_reduce", 2, 64),
    ]
    assert "all_gather" in scaled.collectives.table
    assert "<td" in scaled.collectives._repr_html_()


def test_messages_are_counted_one_by_one_and_go_nowhere():
    def talk():
        x = torch.zeros(16)
        works = [dist.isend(x, (dist.get_rank() + step) % 1024, tag=3) for step in range(1, 1024)]
        works += [dist.irecv(x, step) for step in range(7)]
        pair = dist.new_group([5, 9])
        batch = [dist.P2POp(dist.isend, x, 9, pair), dist.P2POp(dist.irecv, x, 9, pair)]
        return all(work.wait() and work.is_completed() for work in works + dist.batch_isend_irecv(batch))

    scaled = lab.at_scale(talk, 1024, 5)
    assert scaled.result
    assert scaled.collectives.count("send", 1024) == 1023
    assert scaled.collectives.full_bytes("send", 1024) == 1023 * 64
    assert scaled.collectives.count("recv", 1024) == 7
    assert scaled.collectives.count("send", 2) == scaled.collectives.count("recv", 2) == 1
    with pytest.raises(lab.RankError, match="the peer of a message must be a rank from 0 to 1023, not 1024"):
        lab.at_scale(lambda: dist.isend(torch.zeros(1), 1024), 1024, 5)


def test_arguments_come_as_shapes_and_results_go_home(capsys):
    def measure(x, times):
        print("one of", dist.get_world_size())
        return (x * times).shape, type(x).__name__

    scaled = lab.at_scale(measure, 32, 5, args=(torch.randn(3, 4), 2))
    assert scaled.result == ((3, 4), "FakeTensor")
    assert capsys.readouterr().out == "[rank 5] one of 32\n"
    assert pickle.loads(pickle.dumps(scaled)).memory.peak == scaled.memory.peak == 2 * 48
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda: torch.ones(3).sum().item(), "asked for the value of a tensor"),
        (lambda: (torch.randn(3) * 2).sum().item(), "asked for the value of a tensor"),
        (lambda: 1 if torch.randn(1) > 0 else 0, "asked for the value of a tensor"),
        (lambda: dist.all_gather_object([None] * 8, 3), "asked for the value of a tensor"),
        (lambda: torch.randn(3), "returned tensors without values"),
        (lambda: {"a": [torch.randn(3)]}, "returned tensors without values"),
        (lambda: nn.Linear(2, 2), "returned tensors without values"),
        (lambda: 1 / 0, "raised ZeroDivisionError: division by zero"),
        (lambda: lab.barrier(), "there are no other ranks to meet"),
        (lambda: lab.run(lambda: 1), "inside lab.run"),
        (lambda: lab.at_scale(lambda: 1), "inside a rank"),
        (lambda: __import__("os").kill(__import__("os").getpid(), 9), "rank 3 of 8 was killed"),
    ],
)
def test_what_cannot_be_is_said(fn, message):
    with pytest.raises(lab.RankError, match=message) as caught:
        lab.at_scale(fn, 8, 3)
    assert caught.value.rank == 3
    assert str(caught.value).startswith("rank 3 of 8 ")


def test_asking_for_a_value_shows_where_in_ones_own_code():
    def ask():
        return torch.randn(3).sum().item()

    with pytest.raises(lab.RankError, match="asked for the value") as caught:
        lab.at_scale(ask, 8, 3)
    assert "return torch.randn(3).sum().item()" in caught.value.traceback
    assert caught.value.traceback.count("File ") == 1


def test_a_job_that_takes_too_long_is_ended():
    def wait():
        __import__("time").sleep(60)

    with pytest.raises(lab.RankTimeout, match="rank 3 had not returned") as caught:
        lab.at_scale(wait, 8, 3, timeout_s=1)
    assert caught.value.ranks == [3]
    assert "wait" in caught.value.stacks[3]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"world_size": 0}, ValueError, "world_size must be a whole number from 1 to 1048576, not 0"),
        ({"world_size": 2.5}, ValueError, "world_size must be a whole number from 1 to 1048576, not 2.5"),
        ({"world_size": True}, ValueError, "world_size must be .* not True"),
        ({"world_size": 8, "rank": 8}, ValueError, "rank must be a whole number from 0 to world_size-1=7, not 8"),
        ({"rank": -1}, ValueError, "rank must be a whole number from 0 to world_size-1=1023, not -1"),
        ({"timeout_s": 0}, ValueError, "timeout_s must be a positive number of seconds, not 0"),
        ({"detail": "all"}, ValueError, "detail must be one of marks, modules, ops, not 'all'"),
        ({"args": 3}, TypeError, "args must be a tuple of the arguments of fn, not 3"),
        ({"fn": 3}, TypeError, "fn must be callable, not 3"),
    ],
)
def test_bad_input_is_named_before_anything_starts(arguments, error, message):
    with pytest.raises(error, match=message):
        lab.at_scale(**{"fn": lambda: 1, **arguments})
