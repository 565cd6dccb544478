"""What else the stages must do: any module and optimizer of torch, forward without backward, errors with names."""

from __future__ import annotations

import functools
import math
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn

from dtlib import lab
from dtlib.ranks import zero

from .small import (
    STAGES,
    alone,
    assert_as_alone,
    assert_same,
    every_stage,
    fresh,
    in_each_stage,
    make_sgd,
    mine,
    network,
    rows,
    three_steps,
    train,
)

# --- any optimizer of torch that treats each element by itself ---------------------------------------------------

OPTIMIZERS = {
    "SGD with momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "AdamW with amsgrad": functools.partial(torch.optim.AdamW, lr=1e-2, amsgrad=True),
    "Adam, not foreach": functools.partial(torch.optim.Adam, lr=1e-2, foreach=False),
    "AdamW, fused": functools.partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=1e-2),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=1e-3, centered=True),
    "NAdam": functools.partial(torch.optim.NAdam, lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer(name):
    assert_as_alone(optimizer=OPTIMIZERS[name])


@pytest.mark.parametrize("name", ["LBFGS", "Adafactor", "Muon", "SparseAdam"])
def test_optimizers_that_look_at_whole_parameters_are_refused(name):
    def job():  # Muon refuses flat pieces by itself
        error = ValueError if name == "Muon" else TypeError
        with lab.SendCounter() as seen, pytest.raises(error, match=r"treats each element by itself|2D parameters"):
            zero.Zero(network(), getattr(torch.optim, name), stage=1)
        assert seen.sent_bytes == 0
        assert not seen.collectives

    lab.run(job, 1)


def test_a_schedule_of_the_learning_rate():
    def loop(model, optimizer, share):
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        for step in range(3):
            optimizer.zero_grad()
            model(share(rows(step))).square().mean().backward()
            optimizer.step()
            schedule.step()

    assert_as_alone(loop, n=2)


# --- any module ----------------------------------------------------------------------------------------------


def test_fewer_elements_than_ranks():
    def loop(model, optimizer, share):
        clip = getattr(model, "clip_grad_norm_", functools.partial(nn.utils.clip_grad_norm_, list(model.parameters())))
        for step in range(3):
            optimizer.zero_grad()
            model(share(rows(step, 1))).square().mean().backward()
            clip(0.5)
            optimizer.step()
        if isinstance(model, zero.Zero):
            assert sum(len(group["params"]) for group in optimizer.param_groups) == (dist.get_rank() < 2)

    assert_as_alone(loop, n=4, make=lambda: nn.Linear(1, 1, dtype=torch.float64))  # 2 elements


class Twice(nn.Module):
    """Calls one layer twice, and hands over a dictionary."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Named(), Named()])

    def forward(self, x):
        once = self.layers[0](x=x)["y"]
        return self.layers[1](x=self.layers[0](x=once)["y"])["y"]


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, *, x):
        return {"y": torch.tanh(self.linear(x)), "why": "a reason"}


class Checkpointed(nn.Module):
    """Computes its layers again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(network()[:4])
        self.head = nn.Linear(8, 1, dtype=torch.float64)

    def forward(self, x):
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.ModuleList([nn.LSTM(8, 5, dtype=torch.float64)])

    def forward(self, x):
        return self.cells[0](x[None])[0]


@pytest.mark.parametrize("make", [Twice, Checkpointed, Recurrent])
def test_modules_of_every_kind(make):
    assert_as_alone(make=make)


def test_channels_last_and_transposed_weights():
    def make():
        model = nn.Sequential(nn.Conv2d(2, 4, 3, dtype=torch.float64), nn.Flatten(), nn.Linear(16, 1).double())
        model[2].weight = nn.Parameter(torch.randn(16, 1, dtype=torch.float64).t())
        return model.to(memory_format=torch.channels_last)

    def loop(model, optimizer, share):
        for step in range(2):
            optimizer.zero_grad()
            model(share(rows(step, 32)).view(-1, 2, 4, 4)).square().mean().backward()
            optimizer.step()

    assert_as_alone(loop, make=make)


class Choosy(nn.Module):
    """Uses its second branch on some ranks, its third nowhere."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(2, 1, bias=False, dtype=torch.float64) for _ in range(3))

    def forward(self, x, second):
        for branch in self.branches[1:]:
            branch(x)  # all ranks run all units
        return self.branches[0](x) + (self.branches[1](x) if second else 0)


def test_unused_parameters():
    def job(stage):
        # a unit that gets no gradient on some ranks is not gathered again there, so it must stay
        options = {"reshard_after_forward": False} if stage == 3 else {}
        make_adamw = functools.partial(torch.optim.AdamW, lr=0.1)
        wrapped = STAGES[stage](fresh(Choosy), make_adamw, find_unused_parameters=True, **options)
        before = {name: weight.clone() for name, weight in wrapped.state_dict().items()}
        wrapped(torch.ones(1, 2, dtype=torch.float64), second=dist.get_rank() == 1).sum().backward()
        norm = wrapped.clip_grad_norm_(math.inf).item()
        wrapped.optimizer.step()
        moved = {name: bool((weight != before[name]).all()) for name, weight in wrapped.state_dict().items()}
        return list(moved.values()), norm

    for moved, norm in in_each_stage(job, 3):
        assert moved == [True, True, False]  # the one without any gradient does not even decay
        assert norm == pytest.approx((2 + 2 / 9) ** 0.5)


@every_stage
def test_an_unused_parameter_is_named(stage):
    def job():
        wrapped = STAGES[stage](fresh(Choosy), make_sgd)
        wrapped(torch.ones(1, 2, dtype=torch.float64), second=True).sum().backward()

    with pytest.raises(lab.RankError, match=r"no gradient for 'branches.2.weight' on rank \d"):
        lab.run(job, 2)


# --- passes of every kind --------------------------------------------------------------------------------------


def test_forward_without_backward():
    def loop(model, optimizer, share):
        expected = fresh()(rows(0))
        model.eval()
        with torch.no_grad():
            assert torch.equal(model(rows(0)), expected)
            assert torch.equal(model(rows(0)), expected)
        model.train()
        assert torch.equal(model(rows(0)), expected)  # with a graph that nobody follows
        three_steps(model, optimizer, share)

    assert_as_alone(loop)


def two_losses_and_a_graph_used_twice(model, x):
    y = model(x)
    first, second = y.square().mean(), y.mean()
    first.backward(retain_graph=True)
    second.backward()
    model(2 * x).mean().backward()


def two_forward_passes_before_their_backward(model, x):
    first, second = model(x).mean(), model(3 * x).square().mean()
    (first + second).backward()


@pytest.mark.parametrize("both", [two_losses_and_a_graph_used_twice, two_forward_passes_before_their_backward])
def test_two_passes_in_a_step(both):
    def loop(model, optimizer, share):
        both(model, share(rows(0)))
        optimizer.step()

    assert_as_alone(loop)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_forgets_everything(set_to_none):
    def loop(model, optimizer, share):
        model(share(rows(7))).mean().backward()
        with model.no_sync() if isinstance(model, zero.Zero) else nullcontext():
            model(share(rows(8))).mean().backward()
        optimizer.zero_grad(set_to_none=set_to_none)
        model(share(rows(9))).mean().backward()
        model.zero_grad(set_to_none=set_to_none)
        three_steps(model, optimizer, share)

    assert_as_alone(loop, n=2)


class Boom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("boom")


def test_recovers_from_a_backward_pass_that_failed():
    def loop(model, optimizer, share):
        handle = getattr(model, "module", model)[1].register_forward_hook(lambda m, a, out: Boom.apply(out))
        with pytest.raises(ArithmeticError):
            model(share(rows(5))).mean().backward()
        handle.remove()
        model.zero_grad()
        three_steps(model, optimizer, share)

    assert_as_alone(loop, n=2)


@every_stage
def test_a_group_of_some_ranks(stage):
    def job():
        groups = [dist.new_group([0, 2]), dist.new_group([3, 1])]
        rank = dist.get_rank()
        torch.manual_seed(rank)
        model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        wrapped = STAGES[stage](model, functools.partial(torch.optim.SGD, lr=1.0), group=groups[rank % 2])
        start = wrapped.state_dict()["weight"].item()
        wrapped(torch.full((1, 1), float(rank), dtype=torch.float64)).sum().backward()
        wrapped.optimizer.step()
        return start, start - wrapped.state_dict()["weight"].item()

    results = lab.run(job, 4)
    assert [moved for _, moved in results] == pytest.approx([1, 2, 1, 2])  # means of {0, 2} and of {1, 3}
    starts = [start for start, _ in results]
    assert starts[0] == starts[2] != starts[1] == starts[3]


def test_a_module_wrapped_anew():
    def job(stage):
        model = fresh()
        for before in (1, 2):
            STAGES[before](model, make_sgd)
        return train(STAGES[stage](model, make_sgd))

    assert_same(in_each_stage(job, 2), alone())


# --- norms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, math.inf])
def test_norms(norm_type):
    def job(stage):
        wrapped = STAGES[stage](fresh(), make_sgd)
        wrapped(mine(rows(0))).square().mean().backward()
        return [wrapped.clip_grad_norm_(limit, norm_type).item() for limit in (1e9, 0.01, 1e9)]

    model = fresh()
    model(rows(0)).square().mean().backward()
    whole = nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type).item()
    for first, second, clipped in in_each_stage(job, 3):
        assert first == pytest.approx(whole, rel=1e-9)
        assert second == pytest.approx(whole, rel=1e-9)
        assert clipped == pytest.approx(0.01, rel=1e-3)  # torch adds 1e-6 to the norm before it divides


def test_norms_that_cannot_be():
    def job():
        wrapped = zero.Zero(fresh(), make_sgd, stage=2)
        wrapped(mine(rows(0))).mean().mul(math.nan).backward()
        with pytest.raises(ValueError, match="max_norm must be at least 0, not -1"):
            wrapped.clip_grad_norm_(-1)
        with pytest.raises(ValueError, match="norm_type must be above 0"):
            wrapped.clip_grad_norm_(1, 0)
        with pytest.raises(RuntimeError, match="the norm of the gradient is nan"):
            wrapped.clip_grad_norm_(1, error_if_nonfinite=True)
        return wrapped.clip_grad_norm_(1).item()

    assert all(math.isnan(norm) for norm in lab.run(job, 2))
