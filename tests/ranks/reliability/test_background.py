"""What is saved behind training is what was there when it was asked for; errors come out, a full disk by name."""

from __future__ import annotations

import errno
import functools
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dtlib import lab
from dtlib.ranks import dp, reliability, zero
from dtlib.ranks.reliability import Background, NotSaved, last_saved
from dtlib.ranks.shared import background as module
from dtlib.ranks.shared import files

make_sgd = functools.partial(torch.optim.SGD, lr=0.5, momentum=0.9)


def filled(value, stage=3):
    wrapped = zero.Zero(nn.Linear(5, 4), make_sgd, stage=stage)
    change(wrapped, value)
    return wrapped


def change(wrapped, value):
    for shard in wrapped.shards:
        shard.chunk.fill_(value)
        for weight in shard.weights.values():
            state = wrapped.optimizer.state.setdefault(weight, {})
            state.setdefault("momentum_buffer", torch.zeros_like(weight)).fill_(value)


def values(folder):
    """All that the last checkpoint holds, each number once."""
    held = zero.merge(folder)
    kept = [each["momentum_buffer"] for each in held["optimizer"]["state"].values()]
    return torch.cat([each.flatten() for each in (*held["module"].values(), *kept)]).unique().tolist()


class Gate:
    """Holds the thread up before it writes a shard, until it is opened."""

    def __init__(self):
        self.open, self.reached, write = threading.Event(), threading.Event(), files.Writer.write_data

        def held_up(writer, plan, planner):
            self.reached.set()
            self.open.wait()
            return write(writer, plan, planner)

        files.Writer.write_data = held_up


def trained_meanwhile(folder):
    """What is changed after `save` has returned, and before a byte is written, is not in the checkpoint."""
    gate, wrapped = Gate(), filled(1.0)
    with Background() as background:
        zero.save(wrapped, folder, extra={"step": 1}, background=background)
        gate.reached.wait()
        nothing = last_saved(folder)
        change(wrapped, 2.0)
        dist.all_reduce(torch.ones(9))  # training's messages and the thread's are apart
        gate.open.set()
    first = values(folder)
    with Background() as background:
        for number in (3.0, 4.0, 5.0):
            change(wrapped, number)
            zero.save(wrapped, folder, extra={"step": number}, keep=2, background=background)
            change(wrapped, 0.0)
        waited = background.waited_seconds
    return nothing, first, values(folder), waited > 0, sorted(each.name for each in folder.iterdir())


@pytest.mark.parametrize("n", [1, 2, 3])
def test_what_is_saved_is_what_was_there_and_one_comes_after_another(n, tmp_path):
    found = lab.run(trained_meanwhile, n, args=(tmp_path,))
    assert found == [(None, [1.0], [5.0], True, ["000002", "000003"])] * n


def copies_nothing(self, found, write):
    self.wait()
    self._under_way = self._thread.submit(write, self.group)


def test_without_the_copy_it_holds_what_was_trained_since(tmp_path):
    def mutant():
        module.Background.start = copies_nothing
        return trained_meanwhile(tmp_path)[1]

    assert lab.run(mutant, 2) == [[2.0]] * 2


def dp_and_threads(folder):
    model = dp.BucketedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    optimizer = make_sgd(model.parameters())
    before = threading.active_count()
    with Background() as background:
        dp.save(model, optimizer, folder, extra=7, background=background)
        wanted = {name: each.clone() for name, each in model.module.state_dict().items()}
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    left = threading.active_count() - before
    assert dp.load(model, optimizer, folder) == 7
    return left, all(torch.equal(each, wanted[name]) for name, each in model.module.state_dict().items())


def test_replicas_too_and_no_thread_stays(tmp_path):
    assert lab.run(dp_and_threads, 2, args=(tmp_path,)) == [(0, True)] * 2


def full(folder, behind):
    """Rank 1's disk is full in step 1 and 2: what each save, and the end, come to."""
    wrapped, said = filled(0.0), []
    background = Background() if behind else None
    for step in range(3):
        lab.step(step)
        change(wrapped, float(step))
        try:
            zero.save(wrapped, folder, extra=step, keep=5, background=background)
            if background:
                background.wait()
        except NotSaved as error:
            said.append((step, str(error), [each.errno for each in error.failures.values()]))
    if background:
        zero.save(wrapped, folder, background=background)
        with pytest.raises(NotSaved), background:
            pass
    return said, values(folder), sorted(each.name for each in folder.iterdir())


@pytest.mark.parametrize("behind", [False, True], ids=["waiting", "background"])
@pytest.mark.parametrize("room_bytes", [0, 700], ids=["nothing", "torn"])
def test_a_full_disk_is_named_with_its_rank_and_leaves_the_older_one(behind, room_bytes, tmp_path):
    faults = [lab.fill(rank=1, step=1, room_bytes=room_bytes)]
    first, second = lab.run(full, 2, args=(tmp_path, behind), faults=faults)
    assert first == second
    said, kept, names = first
    assert [step for step, *_ in said] == [1, 2]
    for _, text, kinds in said:
        assert text.startswith(f"{tmp_path / '000001'} could not be written")
        assert "rank 1: OSError: [Errno 27] File too large" in text
        assert kinds == [errno.EFBIG]
    assert (kept, names) == ([0.0], ["000000"])  # nothing half written is left


def test_what_would_be_refused_is_refused_at_once_and_other_ranks_too(tmp_path):
    def job():
        groups = [dist.new_group([0, 1]), dist.new_group([2])]
        ranks = dist.get_process_group_ranks(groups[dist.get_rank() // 2])
        wrapped = filled(1.0)
        with Background() as background, pytest.raises(ValueError, match="what is saved must be tensors"):
            zero.save(wrapped, tmp_path, extra={1, object()}, background=background)
        with Background(groups[dist.get_rank() // 2]) as background:
            with pytest.raises(ValueError, match=r"background must be of the ranks that save, \[0, 1, 2\], not of"):
                zero.save(wrapped, tmp_path, background=background)
            dist.barrier(group=background.group)
        with pytest.raises(ValueError, match="group must contain this rank"):
            Background(groups[1 - dist.get_rank() // 2])
        return last_saved(tmp_path), background.ranks == ranks

    assert lab.run(job, 3) == [(None, True)] * 3


class Rest:
    """What each rank has of its own."""

    def __init__(self, value):
        self.value = torch.full((3,), float(value))

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def captured():
    return reliability.capture(own={"rest": Rest(10 + dist.get_rank())}, step=3)


@pytest.mark.parametrize("n", [1, 3])
def test_what_each_rank_has_of_its_own_comes_back_to_it(n):
    state, *_ = lab.run(captured, n)

    def back():
        rest = Rest(0)
        with pytest.raises(ValueError, match=r"own must be those that were captured, \['rest'\], not \[\]"):
            reliability.restore(state)
        assert reliability.restore(state, own={"rest": rest}) == {"step": 3}
        return rest.value.tolist()

    assert lab.run(back, n) == [[10.0 + rank] * 3 for rank in range(n)]
    assert lab.run(back, n + 1) == [[0.0] * 3] * (n + 1)  # a rank without a past begins anew
