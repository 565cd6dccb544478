"""Checkpoints: what one number of ranks wrote, another goes on with, as one process would have."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.testing import assert_close

from dtlib import lab
from dtlib.ranks import zero

from .judge import BATCH, CLOSE, MAX_NORM, STEPS, Awkward, groups, loss_of, make_adamw, single_process, whole_batch
from .small import STAGES

SAVED_AFTER = 2


def go_on(wrapped, first, last):
    rank, n = dist.get_rank(), dist.get_world_size()
    rows = slice(rank * BATCH // n, (rank + 1) * BATCH // n)
    for step in range(first, last):
        wrapped.optimizer.zero_grad()
        tokens, targets = whole_batch(step)
        loss_of(wrapped, tokens[0, rows], targets[0, rows]).backward()
        wrapped.clip_grad_norm_(MAX_NORM)
        wrapped.optimizer.step()


def wrap(stage, seed=0, model=None, **options):
    torch.manual_seed(seed)
    model = model or Awkward()
    return STAGES[stage](model, make_adamw, param_groups=groups(model), **options)


def begin(folder, stage):
    wrapped = wrap(stage)
    go_on(wrapped, 0, SAVED_AFTER)
    wrapped.optimizer.param_groups[1]["lr"] = 3e-3  # as a schedule would
    zero.save(wrapped, folder)


def finish(folder, stage):
    wrapped = wrap(stage, seed=7 + dist.get_rank())
    wrapped.optimizer.param_groups[1]["lr"] = 0.5  # must be forgotten
    go_on(wrapped, 0, 1)  # states, gradients and another order of buckets, all to be forgotten
    zero.load(wrapped, folder)
    go_on(wrapped, SAVED_AFTER, STEPS)
    return wrapped.state_dict()


def assert_as_one_process(weights):
    for name, weight in single_process(False)["weights"].items():
        if name not in ("seen", "calls"):
            assert_close(weights[name], weight, **CLOSE, msg=lambda m, k=name: f"weight {k}: {m}")


@pytest.mark.parametrize(
    ("saver", "ranks_before", "loader", "ranks_after"),
    [(1, 3, 1, 3), (2, 3, 2, 2), (3, 2, 3, 3), (3, 4, 3, 1), (3, 3, 1, 4), (1, 1, 3, 4), (2, 4, 3, 3)],
)
def test_goes_on_with_another_number_of_ranks_and_another_stage(tmp_path, saver, ranks_before, loader, ranks_after):
    lab.run(begin, ranks_before, args=(str(tmp_path), saver))
    for weights in lab.run(finish, ranks_after, args=(str(tmp_path), loader)):
        assert_as_one_process(weights)


@pytest.mark.parametrize("stage", STAGES)
def test_goes_on_in_one_process_without_ranks(tmp_path, stage):
    lab.run(begin, 3, args=(str(tmp_path), stage))
    merged = zero.merge(tmp_path)
    model = Awkward()
    model.load_state_dict(merged["module"])
    assert model.calls.item() == SAVED_AFTER
    trained = [{**g, "params": [p for p in g["params"] if p.requires_grad]} for g in groups(model)]
    optimizer = make_adamw(trained)
    optimizer.load_state_dict(merged["optimizer"])
    for step in range(SAVED_AFTER, STEPS):
        optimizer.zero_grad()
        tokens, targets = whole_batch(step)
        loss_of(model, tokens[0], targets[0]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    assert_as_one_process(model.state_dict())


def test_each_rank_writes_its_part_alone(tmp_path):
    def written():
        saved, write = [], dcp.FileSystemWriter.write_data
        with mock.patch.object(dcp.FileSystemWriter, "write_data", autospec=True) as spy:
            spy.side_effect = lambda writer, plan, planner: (
                saved.extend((each.index.fqn, planner.resolve_data(each).nbytes) for each in plan.items)
                or write(writer, plan, planner)
            )
            begin(str(tmp_path), 3)
        return saved

    by_rank = lab.run(written, 4)
    full = sum(p.numel() * 8 for p in Awkward().parameters())
    trained = sum(p.numel() * 8 for p in Awkward().parameters() if p.requires_grad)
    buffers = sum(each.nbytes for each in Awkward().buffers())
    large = [sum(size for name, size in saved if "/number/" not in name) for saved in by_rank]
    assert sum(large) == full + 2 * trained + buffers
    assert large == pytest.approx([(full + 2 * trained) / 4] * 4, abs=2 * 8 * 3 + buffers)  # an element more of each


def test_a_second_checkpoint_takes_the_place_of_the_first(tmp_path):
    lab.run(begin, 4, args=(str(tmp_path), 1))
    lab.run(begin, 2, args=(str(tmp_path), 3))
    assert len({each.name.split("_")[2] for each in tmp_path.glob("0*/*.distcp")}) == 2
    for weights in lab.run(finish, 2, args=(str(tmp_path), 1)):
        assert_as_one_process(weights)


def refused(folder, wrong=None):
    def job():
        model = wrong() if wrong else None
        wrapped = wrap(2, model=model)
        before = wrapped.state_dict()["embedding.weight"].clone()
        try:
            zero.load(wrapped, folder)
        except ValueError as error:
            assert torch.equal(before, wrapped.state_dict()["embedding.weight"])
            return str(error)

    first, second = lab.run(job, 2)
    assert first == second
    return first


def test_what_is_no_finished_checkpoint(tmp_path):
    assert "folder must hold a finished checkpoint, and" in refused(str(tmp_path))
    with pytest.raises(ValueError, match="finished checkpoint"):
        zero.merge(tmp_path)
    lab.run(begin, 2, args=(str(tmp_path), 2))
    (folder,) = tmp_path.iterdir()
    folder.rename(folder.with_suffix(".part"))  # as it is called until all is there
    assert "folder must hold a finished checkpoint, and" in refused(str(tmp_path))


def test_a_checkpoint_of_another_module(tmp_path):
    lab.run(begin, 2, args=(str(tmp_path), 2))

    def wider():
        model = Awkward()
        model.tiny = nn.Parameter(torch.zeros(5, dtype=torch.float64))
        return model

    def richer():
        model = Awkward()
        model.extra = nn.Parameter(torch.zeros(5, dtype=torch.float64))
        return model

    assert "'tiny' is of shape (5,) here and of shape (3,) in" in refused(str(tmp_path), wider)
    assert "'extra' is of shape (5,) here and missing in" in refused(str(tmp_path), richer)


def test_other_parameter_groups(tmp_path):
    lab.run(begin, 1, args=(str(tmp_path), 2))

    def job():
        with pytest.raises(ValueError, match=r"as many parameter groups as the optimizer has, 1; .* holds 2"):
            zero.load(zero.Zero(Awkward(), make_adamw, stage=2), str(tmp_path))

    lab.run(job, 1)


def test_only_stages_have_checkpoints(tmp_path):
    for call in (zero.save, zero.load):
        with pytest.raises(TypeError, match="model must be a Zero, not Linear"):
            call(nn.Linear(1, 1), tmp_path)


class Counting(torch.optim.Optimizer):
    """Keeps a plain number, a tensor with one number, nothing, and a tensor like the parameter."""

    def __init__(self, params, odd=False):
        super().__init__(params, {"lr": 0.1})
        self.odd = odd

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in (each for each in group["params"] if each.grad is not None):
                state = self.state[p]
                state["times"], state["none"] = state.get("times", 0) + 1, None
                state["time"] = state.get("time", torch.zeros(())) + 0.5
                state["sum"] = state.get("sum", torch.zeros_like(p)) + p.grad
                if self.odd:
                    state["odd"] = torch.zeros(7)
                p.add_(state["sum"], alpha=-group["lr"])


def a_network(seed):
    torch.manual_seed(seed)
    layers = nn.Conv2d(2, 3, 2, dtype=torch.float64), nn.Flatten(), nn.Linear(12, 1, dtype=torch.float64)
    return nn.Sequential(*layers)


def one_step(optimizer, model):
    model(torch.arange(18, dtype=torch.float64).view(1, 2, 3, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_whatever_an_optimizer_keeps_comes_back_as_it_was(tmp_path):
    def write():
        model = a_network(0)
        wrapped = zero.Zero(model, Counting, stage=3, units=[model[0], model[2]])
        for _ in range(3):
            one_step(wrapped.optimizer, wrapped)
        zero.save(wrapped, tmp_path)

    def read():
        wrapped = zero.Zero(a_network(1), Counting, stage=1)
        zero.load(wrapped, tmp_path)
        kinds = [{k: (type(v), getattr(v, "dtype", v)) for k, v in each.items()}
                 for each in wrapped.optimizer.state.values()]  # fmt: skip
        one_step(wrapped.optimizer, wrapped)
        return wrapped.state_dict(), kinds

    lab.run(write, 3)
    alone = a_network(0)
    optimizer = Counting(alone.parameters())
    for _ in range(3):
        one_step(optimizer, alone)
    merged = zero.merge(tmp_path)
    assert_close(merged["module"], dict(alone.state_dict()), **CLOSE)
    for kept, wanted in zip(merged["optimizer"]["state"].values(), optimizer.state.values(), strict=True):
        assert kept.keys() | {"none"} == wanted.keys()
        assert (kept["times"], kept["time"].item()) == (3, 1.5)
        assert_close(kept["sum"], wanted["sum"], **CLOSE)
    one_step(optimizer, alone)
    for weights, kinds in lab.run(read, 2):
        assert_close(weights, dict(alone.state_dict()), **CLOSE)
        for each in kinds:
            assert each["times"] == (int, 3)
            assert each["time"] == (torch.Tensor, torch.float32)


def test_what_is_no_state_of_elements_is_refused_before_anything_is_written(tmp_path):
    def write():
        model = a_network(0)
        wrapped = zero.Zero(model, Counting, stage=2)
        wrapped.optimizer.odd = True
        one_step(wrapped.optimizer, wrapped)
        with pytest.raises(ValueError, match=r"the optimizer must keep numbers, or a tensor like '.*', under 'odd'"):
            zero.save(wrapped, tmp_path)

    lab.run(write, 2)
    assert not list(tmp_path.iterdir())
