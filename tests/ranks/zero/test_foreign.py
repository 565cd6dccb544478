"""What training loops from elsewhere do: the numbers of one process or of FSDP2, or an error with a name before any.

Each is held to an oracle by hand: the mean over the ranks of what each rank's rows give.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from dtlib import lab
from dtlib.ranks import dp

from .small import (
    CLOSE,
    STAGES,
    assert_same,
    every_stage,
    fresh,
    in_each_stage,
    make_sgd,
    mine,
    rows,
    stepped,
    train,
    train_alone,
)


class TwoTasks(nn.Module):
    """A trunk and a head for each of two tasks."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(3))

    def forward(self, x, task):
        for layer in self.layers[1:]:
            layer(x)  # all ranks run all units
        return self.layers[task](torch.tanh(self.layers[0](x)))


def test_a_task_that_touches_nothing_of_a_bucket():
    """Two synced passes, each through another head: the first one's mean must survive the second."""

    def both(model, share):
        for task in (1, 2):
            model(share(rows(task, 4)), task).square().mean().backward()

    def job(stage):
        options = {"reshard_after_forward": False} if stage == 3 else {"bucket_bytes": 1, "first_bucket_bytes": None}
        wrapped = STAGES[stage](fresh(TwoTasks), make_sgd, find_unused_parameters=True, **options)
        both(wrapped, mine)
        wrapped.optimizer.step()
        return wrapped.state_dict()

    model = fresh(TwoTasks)
    optimizer = make_sgd(model.parameters())
    both(model, lambda x: x)
    optimizer.step()
    assert_same(in_each_stage(job, 3), dict(model.named_parameters()))


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


def test_an_old_graph_after_the_step():
    def loss(model, share):
        return model(share(rows(0))).square().mean()

    def job(stage):
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
    assert_same(in_each_stage(job, 3), dict(model.named_parameters()))


def test_another_wrapper_on_the_same_module():
    def job(stage):
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

    in_each_stage(job, 2)


def test_a_parameter_from_outside():
    def job(stage):
        wrapped = STAGES[stage](fresh(), make_sgd)
        with pytest.raises(ValueError, match="param_group must come with the wrapper"):
            wrapped.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        return train(wrapped)

    model = fresh()
    assert_same(in_each_stage(job, 2), train_alone(model, make_sgd(model.parameters())))


# The gradients of master copies exist during the step alone: there are none of pieces to clear.
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
def test_gradients_cleared_by_hand(master, how):
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

    def job(stage):
        wrapped = STAGES[stage](fresh().to(dtype), make_sgd, master_dtype=master)
        steps(wrapped, wrapped.module, wrapped.optimizer, mine)
        return wrapped.state_dict()

    model = fresh().to(dtype)
    optimizer = make_sgd(model.parameters())
    steps(model, model, optimizer, lambda x: x)
    for weights in in_each_stage(job, 3):
        for name, weight in model.named_parameters():
            # three steps in float32, whose gradients are sums in another order
            assert_close(weights[name], weight, **(CLOSE if master is None else {"rtol": 1e-5, "atol": 1e-6}))


def test_a_gradient_set_by_hand_is_refused():
    def job(stage):
        wrapped = STAGES[stage](fresh(), make_sgd)
        with pytest.raises(RuntimeError, match=r"the gradient of '0.weight' lies with its owners"):
            wrapped.module[0].weight.grad = torch.ones(8, 8)

    in_each_stage(job, 1)


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


# --- what would be taken for the whole: a norm of pieces, dims of pieces -------------------------------------------


def test_torchs_clipping_is_refused_and_nothing_is_scaled():
    """On each rank alike, also where it owns nothing of a parameter; FSDP2 clips by the norm over all ranks."""

    def job(stage):
        wrapped = STAGES[stage](fresh(), make_sgd)
        wrapped(mine(rows(0))).square().mean().backward()
        norm = wrapped.clip_grad_norm_(1e9)
        pieces = [p for group in wrapped.optimizer.param_groups for p in group["params"]]
        clip = torch.nn.utils.clip_grad_norm_
        for call in (
            lambda: clip(wrapped.parameters(), 0.1),
            lambda: clip(wrapped.parameters(), 0.1, norm_type=torch.inf, foreach=False),
            lambda: clip(pieces, 0.1),
            lambda: torch.nn.utils.get_total_norm([p.grad for p in wrapped.parameters()]),
            lambda: wrapped.module[0].weight.grad.norm(),
        ):
            with pytest.raises(RuntimeError, match=r"clip, or measure .* by clip_grad_norm_ of the"):
                call()
        assert wrapped.clip_grad_norm_(1e9) == norm
        torch.nn.utils.clip_grad_value_(wrapped.parameters(), 0.01)  # each element by itself
        wrapped.optimizer.step()
        return norm, wrapped.state_dict()

    def alone(model):
        model(rows(0)).square().mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        make_sgd(model.parameters()).step()
        return norm, dict(model.named_parameters())

    norm, weights = alone(fresh())
    for found, their_weights in in_each_stage(job, 3):
        assert_close(found, norm, **CLOSE)
        assert_same([their_weights], weights)


def by_dim(groups, decay=0.1, lr=1e-5):
    """As many scripts choose what decays."""
    params = [p for group in groups for p in group["params"]]
    matrices, rest = [p for p in params if p.dim() > 1], [p for p in params if p.dim() < 2]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": decay}, {"params": rest, "weight_decay": 0.0}], lr=lr
    )


def by_shape(groups):
    """Settings alike, another algorithm for matrices."""

    class Normalised(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.sub_(p.grad if p.dim() < 2 else p.grad / p.grad.norm(), alpha=0.1)

    return Normalised(groups, lr=0.1)


def test_optimizers_that_look_at_dims_are_refused():
    def job(stage):
        for make, words in ((by_dim, "by_dim chooses by dim"), (by_shape, "by_shape looks at whole")):
            with lab.SendCounter() as seen, pytest.raises(TypeError, match=words):
                STAGES[stage](fresh(), make)
            assert not seen.sent_bytes
        STAGES[stage](fresh(), lambda groups: by_dim(groups, decay=0.0))  # alike in effect

    in_each_stage(job, 2)
