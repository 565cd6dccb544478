"""What training loops from elsewhere do: the numbers of one process or of FSDP2, or an error with a name before any.

Each is held to an oracle by hand: the mean over the ranks of what each rank's rows give.
"""

from __future__ import annotations

import functools
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close

from dtlib import lab
from dtlib.ranks import dp

from .small import STAGES, assert_same, every_stage, fresh, make_sgd, mine, rows, train, train_alone

CLOSE = {"rtol": 1e-9, "atol": 1e-9}  # float64, as in the judge


def stepped(model, loss, optimizer=make_sgd):
    """One process: the weights after a step on `loss`."""
    optimizer = optimizer(model.parameters())
    loss(model).backward()
    optimizer.step()
    return dict(model.named_parameters())


def fsdp2(model):
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def full(model):
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


# --- silent once -------------------------------------------------------------------------------------------------


class TwoTasks(nn.Module):
    """A trunk and a head for each of two tasks."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(3))

    def forward(self, x, task):
        for layer in self.layers[1:]:
            layer(x)  # all ranks run all units
        return self.layers[task](torch.tanh(self.layers[0](x)))


@every_stage
def test_a_task_that_touches_nothing_of_a_bucket(stage):
    """Two synced passes, each through another head: the first one's mean must survive the second."""
    options = {"reshard_after_forward": False} if stage == 3 else {"bucket_bytes": 1, "first_bucket_bytes": None}

    def both(model, share):
        for task in (1, 2):
            model(share(rows(task, 4)), task).square().mean().backward()

    def job():
        wrapped = STAGES[stage](fresh(TwoTasks), make_sgd, find_unused_parameters=True, **options)
        both(wrapped, mine)
        wrapped.optimizer.step()
        return wrapped.state_dict()

    model = fresh(TwoTasks)
    optimizer = make_sgd(model.parameters())
    both(model, lambda x: x)
    optimizer.step()
    assert_same(lab.run(job, 3), dict(model.named_parameters()))


def penalty(model):
    return 0.5 * sum(p.square().sum() for p in model.parameters())


@pytest.mark.parametrize("stage", [1, 2])
def test_a_penalty_on_the_parameters(stage):
    def job():
        wrapped = STAGES[stage](fresh(), make_sgd)
        penalty(wrapped.module).backward()
        wrapped.optimizer.step()
        return wrapped.state_dict()

    assert_same(lab.run(job, 3), stepped(fresh(), penalty))


def test_a_penalty_on_pieces_is_refused_and_on_gathered_weights_right():
    """A piece is no parameter, and says so. (FSDP2 gives a gradient that its optimizer then refuses.)"""

    def job():
        wrapped = STAGES[3](fresh(), make_sgd)
        with pytest.raises(RuntimeError, match=r"the weights of '0.weight' are split among the ranks"):
            penalty(wrapped.module)
        with pytest.raises(RuntimeError, match=r"the weights of '2.bias' are split"):
            wrapped.module[2].bias.norm()
        with wrapped.gathered() as module:
            penalty(module).backward()
        wrapped.optimizer.step()
        return wrapped.state_dict()

    assert_same(lab.run(job, 3), stepped(fresh(), penalty))


def test_a_graph_of_gathered_weights_ends_with_them():
    def job():
        wrapped = STAGES[3](fresh(), make_sgd)
        with wrapped.gathered() as module:
            loss = penalty(module)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    lab.run(job, 2)


@every_stage
def test_an_old_graph_after_the_step(stage):
    def loss(model, share):
        return model(share(rows(0))).square().mean()

    def job():
        wrapped = STAGES[stage](fresh(), make_sgd)
        old = loss(wrapped, mine)
        loss(wrapped, mine).backward()
        wrapped.optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            old.backward()
        wrapped.zero_grad()
        loss(wrapped, mine).backward()  # and it goes on
        wrapped.optimizer.step()
        return wrapped.state_dict()

    model = fresh()
    optimizer = make_sgd(model.parameters())
    old = loss(model, lambda x: x)
    for _ in range(2):
        optimizer.zero_grad()
        loss(model, lambda x: x).backward()
        optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.backward()
    assert_same(lab.run(job, 3), dict(model.named_parameters()))


@every_stage
def test_another_wrapper_on_the_same_module(stage):
    def job():
        model = fresh()
        wrapped = STAGES[stage](model, make_sgd)
        if stage == 3:
            with pytest.raises(ValueError, match="module must have its weights, and a stage 3 of ZeRO has split them"):
                dp.BucketedDataParallel(model)
            return
        other = dp.BucketedDataParallel(model)
        other(mine(rows(0))).mean().backward()
        with pytest.raises(RuntimeError, match="module was wrapped again, and its gradients go to the last wrapper"):
            wrapped.optimizer.step()
        with pytest.raises(RuntimeError, match="module was wrapped again"):
            wrapped(mine(rows(0)))

    lab.run(job, 2)


@every_stage
def test_a_parameter_from_outside(stage):
    def job():
        wrapped = STAGES[stage](fresh(), make_sgd)
        with pytest.raises(ValueError, match="param_group must come with the wrapper"):
            wrapped.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        return train(wrapped)

    model = fresh()
    assert_same(lab.run(job, 2), train_alone(model, make_sgd(model.parameters())))


# The gradients of master copies exist during the step alone: there are none of pieces to clear.
@every_stage
@pytest.mark.parametrize(
    ("master", "how"),
    [
        (None, "p.grad = None"),
        (None, "module.zero_grad()"),
        (None, "pieces"),
        (torch.float64, "p.grad = None"),
        (torch.float64, "module.zero_grad()"),
    ],
)
def test_gradients_cleared_by_hand(stage, master, how):
    dtype = torch.float64 if master is None else torch.float32

    def clear(model, optimizer):
        if how == "p.grad = None":
            for parameter in model.parameters():
                parameter.grad = None
        elif how == "module.zero_grad()":
            model.zero_grad()
        else:
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                parameter.grad = None

    def steps(model, module, optimizer, share):
        for step in range(3):
            clear(module, optimizer)
            model(share(rows(step)).to(dtype)).square().mean().backward()
            optimizer.step()
        clear(module, optimizer)
        optimizer.step()  # without gradients it changes nothing

    def job():
        wrapped = STAGES[stage](fresh().to(dtype), make_sgd, master_dtype=master)
        steps(wrapped, wrapped.module, wrapped.optimizer, mine)
        return wrapped.state_dict()

    model = fresh().to(dtype)
    optimizer = make_sgd(model.parameters())
    steps(model, model, optimizer, lambda x: x)
    for weights in lab.run(job, 3):
        for name, weight in model.named_parameters():
            # three steps in float32, whose gradients are sums in another order
            assert_close(weights[name], weight, **(CLOSE if master is None else {"rtol": 1e-5, "atol": 1e-6}))


@every_stage
def test_a_gradient_set_by_hand_is_refused(stage):
    def job():
        wrapped = STAGES[stage](fresh(), make_sgd)
        with pytest.raises(RuntimeError, match=r"the gradient of '0.weight' lies with its owners"):
            wrapped.module[0].weight.grad = torch.ones(8, 8)

    lab.run(job, 1)


@every_stage
def test_master_copies_start_from_the_weights_as_they_were(stage):
    """As FSDP2 with mixed precision: bfloat16 to compute with, float32 kept and never rounded."""

    def job():
        wrapped = STAGES[stage](fresh().float(), make_sgd, param_dtype=torch.bfloat16)
        assert wrapped.module[0].weight.dtype == torch.bfloat16
        pieces = [p for group in wrapped.optimizer.param_groups for p in group["params"]]
        assert {p.dtype for p in pieces} == {torch.float32}
        start = torch.cat([p.detach().clone() for p in pieces])
        wrapped(mine(rows(0)).bfloat16()).float().square().mean().backward()
        wrapped.optimizer.step()
        moved = torch.cat([p.detach() for p in pieces])
        rounded = [p.bfloat16() for p in wrapped.state_dict().values()]
        return start, moved, rounded

    exact = torch.cat([p.detach().float().flatten() for p in fresh().parameters()])
    start, moved, _ = lab.run(job, 1)[0]
    order = start.sort().values
    assert torch.equal(order, exact.sort().values)
    assert not torch.equal(order, order.bfloat16().float())
    assert not torch.equal(moved, start)


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


@every_stage
def test_weights_that_are_read_after_their_last_gradient(stage):
    model = fresh(gates)
    expected = train_widely(model, model, make_sgd(model.parameters()), lambda x: x)

    def job():
        wrapped = STAGES[stage](fresh(gates), make_sgd)
        train_widely(wrapped, wrapped.module, wrapped.optimizer, mine)
        return wrapped.state_dict()

    def theirs():
        sharded = fsdp2(fresh(gates))
        train_widely(sharded, sharded, make_sgd(sharded.parameters()), mine)
        return full(sharded)

    assert_same(lab.run(job, 3), expected)
    assert_same(lab.run(theirs, 3), expected)


def train_widely(model, module, optimizer, share):
    for step in range(3):
        optimizer.zero_grad()
        model(share(rows(step, 64)).requires_grad_()).square().mean().backward()
        optimizer.step()
    return dict(module.named_parameters())


@every_stage
def test_a_grad_scaler_is_refused_on_all_ranks(stage):
    """It would look for overflow in this rank's piece: some ranks would step, and some not."""

    def job():
        wrapped = STAGES[stage](fresh(), make_sgd)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        before = {name: value.clone() for name, value in wrapped.state_dict().items()}
        x = mine(rows(0))
        x[0, 0] = torch.inf if dist.get_rank() == 0 else 1.0
        scaler.scale(wrapped(x).square().mean()).backward()
        with pytest.raises(RuntimeError, match="a GradScaler looks for overflow in this rank's pieces alone"):
            scaler.step(wrapped.optimizer)
        assert_same([wrapped.state_dict()], before)

    lab.run(job, 2, timeout_s=30)


@every_stage
def test_a_wrapper_that_is_gone(stage):
    """It and its module are collected; and where the module lives on, nothing of the wrapper does."""

    def job():
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

    lab.run(job, 2, timeout_s=30)


# --- unclear once --------------------------------------------------------------------------------------------------


@every_stage
def test_gradients_of_inputs_alone(stage):
    """A saliency map, an adversarial example: no parameter has a gradient, nothing is sent, training goes on."""

    def of_inputs(model, x):
        x = x.clone().requires_grad_()
        by_function = torch.autograd.grad(model(x).square().sum(), x)[0]
        model(x).square().sum().backward(inputs=[x])
        return by_function, x.grad

    def job():
        wrapped = STAGES[stage](fresh(), make_sgd)
        found = of_inputs(wrapped, rows(5))
        assert all(p.grad is None for p in wrapped.module.parameters())
        return found, train(wrapped)

    def theirs():
        return of_inputs(fsdp2(fresh()), rows(5))[0]

    model = fresh()
    expected = of_inputs(model, rows(5))
    weights = train_alone(fresh(), make_sgd(model.parameters())) and train_alone(model, make_sgd(model.parameters()))
    results = lab.run(job, 3)
    for found, _ in results:
        assert_close(found, expected, **CLOSE)
    assert_same([trained for _, trained in results], weights)
    if stage == 3:
        for found in lab.run(theirs, 3):
            assert_close(found, expected[0], **CLOSE)


@every_stage
def test_an_optimizer_from_outside(stage):
    def job():
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

    expected = stepped(fresh(), lambda model: model(rows(0)).mean())
    assert_same(lab.run(job, 3), expected)


class Lamb(torch.optim.Optimizer):
    """Steps of the length of the whole parameter: an optimizer that torch does not know."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / p.grad.norm() * p.norm(), alpha=group["lr"])


class SignSGD(torch.optim.Optimizer):
    """Treats each element by itself, and torch does not know it either."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign(), alpha=group["lr"])


@every_stage
def test_optimizers_are_judged_by_what_they_do(stage):
    def refused():
        for make in (Lamb, functools.partial(Lamb, lr=1e-3)):
            with lab.SendCounter() as seen, pytest.raises(TypeError, match="by itself; Lamb looks at whole"):
                STAGES[stage](fresh(), make)
            assert not seen.sent_bytes
            assert not seen.collectives

    lab.run(refused, 2)
    model = fresh()
    expected = train_alone(model, SignSGD(model.parameters()))
    assert_same(lab.run(lambda: train(STAGES[stage](fresh(), SignSGD)), 3), expected)


@every_stage
def test_under_compile(stage):
    def job():
        wrapped = STAGES[stage](fresh(), make_sgd)
        compiled = torch.compile(wrapped, backend="eager")
        for step in range(3):
            wrapped.optimizer.zero_grad()
            compiled(mine(rows(step))).square().mean().backward()
            wrapped.optimizer.step()
        return wrapped.state_dict()

    model = fresh()
    assert_same(lab.run(job, 2, timeout_s=120), train_alone(model, make_sgd(model.parameters())))
