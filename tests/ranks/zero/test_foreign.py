"""What training loops from elsewhere do: the numbers of one process or of FSDP2, or an error with a name before any.

Each is held to an oracle by hand: the mean over the ranks of what each rank's rows give.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dtlib import lab
from dtlib.ranks import dp

from .small import (
    CLOSE,
    STAGES,
    a_step,
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

    def loop(model, optimizer, share):
        for task in (1, 2):
            model(share(rows(task, 4)), task).square().mean().backward()
        optimizer.step()

    def of_stage(stage):
        options = {"reshard_after_forward": False} if stage == 3 else {"bucket_bytes": 1, "first_bucket_bytes": None}
        return options | {"find_unused_parameters": True}

    assert_as_alone(loop, make=TwoTasks, of_stage=of_stage)


def penalty(model, share=None):
    return 0.5 * sum(p.square().sum() for p in model.parameters())


@pytest.mark.parametrize("stage", [1, 2])
def test_a_penalty_on_the_parameters(stage):
    def job():
        wrapped = STAGES[stage](fresh(), make_sgd)
        a_step(penalty)(wrapped.module, wrapped.optimizer, mine)
        return wrapped.state_dict()

    assert_same(lab.run(job, 3), alone(a_step(penalty)))


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

    assert_same(lab.run(job, 3), alone(a_step(penalty)))


def test_a_graph_of_gathered_weights_ends_with_them():
    def job():
        wrapped = STAGES[3](fresh(), make_sgd)
        with wrapped.gathered() as module:
            loss = penalty(module)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    lab.run(job, 2)


def test_an_old_graph_after_the_step():
    def loop(model, optimizer, share):
        def loss():
            return model(share(rows(0))).square().mean()

        old = loss()
        loss().backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            old.backward()
        model.zero_grad()
        loss().backward()  # and it goes on
        optimizer.step()

    assert_as_alone(loop)


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
    def loop(model, optimizer, share):
        if isinstance(model, dp.DataParallel):
            with pytest.raises(ValueError, match="param_group must come with the wrapper"):
                optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        three_steps(model, optimizer, share)

    assert_as_alone(loop, n=2)


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
        if how == "module.zero_grad()":
            getattr(model, "module", model).zero_grad()
            return
        pieces = (p for group in optimizer.param_groups for p in group["params"])
        for parameter in pieces if how == "pieces" else getattr(model, "module", model).parameters():
            parameter.grad = None

    def loop(model, optimizer, share):
        for step in range(3):
            clear(model, optimizer)
            model(share(rows(step)).to(dtype)).square().mean().backward()
            optimizer.step()
        clear(model, optimizer)
        optimizer.step()  # without gradients it changes nothing

    # three steps in float32, whose gradients are sums in another order
    close = CLOSE if master is None else {"rtol": 1e-5, "atol": 1e-6}
    assert_as_alone(
        loop, make=lambda: network().to(dtype), of_stage=lambda stage: {"master_dtype": master}, close=close
    )


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

    def loop(model, optimizer, share):
        model(share(rows(0))).square().mean().backward()
        if isinstance(model, dp.DataParallel):
            norm = model.clip_grad_norm_(1e9)
            pieces = [p for group in optimizer.param_groups for p in group["params"]]
            for call in (
                lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
                lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=torch.inf, foreach=False),
                lambda: nn.utils.clip_grad_norm_(pieces, 0.1),
                lambda: nn.utils.get_total_norm([p.grad for p in model.parameters()]),
                lambda: model.module[0].weight.grad.norm(),
            ):
                with pytest.raises(RuntimeError, match=r"clip, or measure .* by clip_grad_norm_ of the"):
                    call()
            assert model.clip_grad_norm_(1e9) == norm
        nn.utils.clip_grad_value_(model.parameters(), 0.01)  # each element by itself
        optimizer.step()

    assert_as_alone(loop)


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
