"""Training loops from elsewhere that once crashed, hung, or ended in an error that named nothing.

Right now as one process or FSDP2 has it, or refused by name before anything is computed.
"""

from __future__ import annotations

import functools
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

from dtlib import lab
from dtlib.ranks import zero

from .small import (
    CLOSE,
    STAGES,
    a_step,
    alone,
    assert_as_alone,
    assert_same,
    fresh,
    fsdp2,
    full,
    in_each_stage,
    make_sgd,
    mine,
    rows,
    three_steps,
    train,
)

# --- a crash or a hang once ----------------------------------------------------------------------------------------


class Gated(nn.Module):
    """Another path of its graph reads the weight after its last gradient."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(64, dtype=torch.float64))

    def forward(self, x):
        return torch.tanh(x * self.weight.detach()) * self.weight


def gates():
    return nn.Sequential(*(Gated() for _ in range(4)))


def test_weights_that_are_read_after_their_last_gradient():
    assert_as_alone(train_widely, make=gates)

    def theirs():
        sharded = fsdp2(fresh(gates))
        train_widely(sharded, make_sgd(sharded.parameters()), mine)
        return full(sharded)

    assert_same(lab.run(theirs, 3), alone(train_widely, gates))


def train_widely(model, optimizer, share):
    for step in range(3):
        optimizer.zero_grad()
        model(share(rows(step, 64)).requires_grad_()).square().mean().backward()
        optimizer.step()


def test_a_grad_scaler_is_refused_on_all_ranks():
    """It would look for overflow in this rank's piece: some ranks would step, and some not."""

    def job(stage):
        wrapped = STAGES[stage](fresh(), make_sgd)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        before = {name: value.clone() for name, value in wrapped.state_dict().items()}
        x = mine(rows(0))
        x[0, 0] = torch.inf if dist.get_rank() == 0 else 1.0
        scaler.scale(wrapped(x).square().mean()).backward()
        with pytest.raises(RuntimeError, match="this rank's part of the gradients alone"):
            scaler.step(wrapped.optimizer)
        assert_same([wrapped.state_dict()], before)

    in_each_stage(job, 2, timeout_s=30)


def test_a_wrapper_that_is_gone():
    """It and its module are collected; and where the module lives on, nothing of the wrapper does."""

    def job(stage):
        model = fresh()
        wrapped = STAGES[stage](model, make_sgd)
        train(wrapped)
        gone = weakref.ref(wrapped), *(weakref.ref(shard) for shard in wrapped.shards)
        del wrapped
        gc.collect()
        assert not any(each() for each in gone)
        if dist.get_rank() == 0:  # alone: whoever sent something would wait for ever
            if stage == 3:
                with pytest.raises(RuntimeError, match="are split among the ranks"):
                    model(rows(0))
            else:
                model(rows(0)).mean().backward()
                assert model[0].weight.grad.shape == (8, 8)
        module = weakref.ref(model)
        del model
        gc.collect()
        assert module() is None

    in_each_stage(job, 2, timeout_s=30)


# --- unclear once --------------------------------------------------------------------------------------------------


def test_gradients_of_inputs_alone():
    """A saliency map, an adversarial example: no parameter has a gradient, nothing is sent, training goes on."""

    def of_inputs(model, x):
        x = x.clone().requires_grad_()
        by_function = torch.autograd.grad(model(x).square().sum(), x)[0]
        model(x).square().sum().backward(inputs=[x])
        return by_function, x.grad

    def job(stage):
        wrapped = STAGES[stage](fresh(), make_sgd)
        found = of_inputs(wrapped, rows(5))
        assert all(p.grad is None for p in wrapped.module.parameters())
        return found, train(wrapped)

    def theirs():
        return of_inputs(fsdp2(fresh()), rows(5))[0]

    expected = of_inputs(fresh(), rows(5))
    results = in_each_stage(job, 3)
    for found, _ in results:
        assert_close(found, expected, **CLOSE)
    assert_same([trained for _, trained in results], alone())
    for found in lab.run(theirs, 3):
        assert_close(found, expected[0], **CLOSE)


def test_an_optimizer_from_outside():
    def job(stage):
        model = fresh()
        early = make_sgd(model.parameters())
        wrapped = STAGES[stage](model, make_sgd)
        late = make_sgd(wrapped.module.parameters())
        wrapped(mine(rows(0))).mean().backward()
        for optimizer in (early, late):
            with pytest.raises(RuntimeError, match=r"'0.weight' was wrapped by Zero, whose optimizer alone"):
                optimizer.step()
        wrapped.optimizer.step()
        return wrapped.state_dict()

    assert_same(in_each_stage(job, 3), alone(a_step(lambda model, share: model(share(rows(0))).mean())))


class Unknown(torch.optim.Optimizer):
    """An optimizer that torch does not know, which moves a parameter along `direction`."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.direction(p), alpha=group["lr"])


class Lamb(Unknown):
    """Steps of the length of the whole parameter."""

    def direction(self, p):
        return p.grad / p.grad.norm() * p.norm()


class SignSGD(Unknown):
    """Treats each element by itself."""

    def direction(self, p):
        return 0.1 * p.grad.sign()


def test_optimizers_are_judged_by_what_they_do():
    def refused(stage):
        for make in (Lamb, functools.partial(Lamb, lr=1e-3)):
            with lab.SendCounter() as seen, pytest.raises(TypeError, match="by itself; Lamb looks at whole"):
                STAGES[stage](fresh(), make)
            assert not seen.sent_bytes
            assert not seen.collectives

    in_each_stage(refused, 2)
    assert_as_alone(optimizer=SignSGD)


def test_under_compile():
    def loop(model, optimizer, share):
        is_wrapped = isinstance(model, zero.Zero)
        three_steps(torch.compile(model, backend="eager") if is_wrapped else model, optimizer, share)

    assert_as_alone(loop, n=2, timeout_s=120)
