"""Checkpoints of replicas: frozen and tied parameters and buffers, read by other numbers of ranks and one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.testing import assert_close

from dtlib import lab
from dtlib.ranks import dp
from dtlib.ranks.dp import checkpoint as module

BATCH, SAVED_AFTER, STEPS = 12, 2, 4
CLOSE = {"rtol": 1e-9, "atol": 1e-11}  # float64, and gradients summed in another order


class Awkward(nn.Module):
    """A tied weight, one that is frozen in the middle, one that rests, and a buffer that counts."""

    def __init__(self):
        super().__init__()
        self.first, self.frozen, self.last = (nn.Linear(6, 6, dtype=torch.float64) for _ in range(3))
        self.last.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.unused = nn.Parameter(torch.randn(3, dtype=torch.float64), requires_grad=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        return self.last(torch.tanh(self.frozen(torch.tanh(self.first(x)))))


def optimizer_of(model):
    biases = {"params": [model.first.bias, model.last.bias], "lr": 3e-3}
    return torch.optim.AdamW([{"params": [model.first.weight, model.unused]}, biases], lr=1e-2)


def steps(model, optimizer, first, last, rank=0, n=1):
    for step in range(first, last):
        x = torch.randn(BATCH, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x[rank * BATCH // n : (rank + 1) * BATCH // n]).square().mean().backward()
        optimizer.step()


def made(wrap, seed):
    torch.manual_seed(seed)
    inner = Awkward()
    model = wrap(inner)
    return model, inner, optimizer_of(inner)


def begin(wrap, folder):
    model, inner, optimizer = made(wrap, 0)
    steps(model, optimizer, 0, SAVED_AFTER, dist.get_rank(), dist.get_world_size())
    optimizer.param_groups[1]["lr"] = 1e-3  # as a schedule would
    dp.save(model, optimizer, folder, extra={"step": SAVED_AFTER})
    return {name: each.clone() for name, each in inner.state_dict().items()}


def finish(wrap, folder):
    model, inner, optimizer = made(wrap, 5 + dist.get_rank())
    steps(model, optimizer, 0, 1)  # to be forgotten
    extra = dp.load(model, optimizer, folder)
    read = {name: each.clone() for name, each in inner.state_dict().items()}
    steps(model, optimizer, extra["step"], STEPS, dist.get_rank(), dist.get_world_size())
    return (
        read,
        inner.last.weight is inner.first.weight,
        inner.state_dict(),
        [each.requires_grad for each in inner.parameters()],
    )


def alone():
    _, inner, optimizer = made(nn.Identity, 0)
    steps(inner, optimizer, 0, SAVED_AFTER)
    optimizer.param_groups[1]["lr"] = 1e-3
    steps(inner, optimizer, SAVED_AFTER, STEPS)
    return inner.state_dict(), [each.requires_grad for each in inner.parameters()]


def goes_on(wrap, writers, readers, folder):
    saved = lab.run(begin, writers, args=(wrap, folder))
    wanted, trained = alone()
    for read, tied, weights, requires_grad in lab.run(finish, readers, args=(wrap, folder)):
        assert tied
        assert requires_grad == trained
        for name in saved[0]:
            assert torch.equal(read[name], saved[0][name]), name
            assert_close(weights[name], wanted[name], **CLOSE, msg=name)


CASES = [(1, 3, "Naive"), (2, 2, "Flat"), (2, 4, "Bucketed"), (3, 1, "Bucketed")]


@pytest.mark.parametrize(("writers", "readers", "name"), CASES)
def test_frozen_and_tied_parameters_and_buffers_go_on_with_other_ranks(writers, readers, name, tmp_path):
    wrap = getattr(dp, f"{name}DataParallel")
    goes_on(wrap, writers, readers, tmp_path)


def test_each_tensor_is_written_once_and_torch_reads_the_weights_alone(tmp_path):
    saved, *_ = lab.run(begin, 2, args=(dp.BucketedDataParallel, tmp_path))
    (checkpoint,) = tmp_path.iterdir()
    stored = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    weights = {name for name in stored if not name.startswith("optimizer/")}
    assert weights == saved.keys() - {"last.weight"}  # the other name of a tied one
    assert {name.split("/")[2] for name in stored if name.startswith("optimizer/")} == {
        "first.weight", "first.bias", "last.bias",
    }  # fmt: skip
    read = {name: torch.zeros_like(saved[name]) for name in weights}
    with pytest.warns(UserWarning, match=r"torch.distributed is disabled"):
        dcp.load(read, checkpoint_id=checkpoint, no_dist=True)
    assert all(torch.equal(read[name], saved[name]) for name in weights)


def only_trained(model, optimizer):
    return (each for each in HELD(model, optimizer) if each.stepped is not None)


def without_states(model, optimizer):
    return HELD(model, torch.optim.SGD([torch.ones(1)]))


HELD = module._held


@pytest.mark.parametrize("mutant", [only_trained, without_states])
def test_mutants_lose_something(mutant, tmp_path):
    def wrap(inner):
        module._held = mutant
        return dp.BucketedDataParallel(inner)

    with pytest.raises((AssertionError, lab.RankError)):
        goes_on(wrap, 2, 2, tmp_path)
