"""One executor, all schedules: losses, gradients and weights after three steps are one process's; mutants are refused.

float64: the sums over micro-batches are made in another order, which costs some 1e-13 of AdamW's first steps.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from dtlib import lab
from dtlib.ranks import model as gpt
from dtlib.ranks import pp
from dtlib.ranks.pp import executor
from dtlib.theory import pp as theory

from .cases import CLOSE, GPT, Case, alone, built, data, fits, pipeline


def train(case, schedule):
    torch.manual_seed(dist.get_rank())  # nothing may depend on a rank's own random numbers
    names, pipe = pipeline(case, schedule)
    adam = torch.optim.AdamW([each for each in names.values() if each.requires_grad], lr=1e-2)
    losses, gradients = [], []
    for x, y in zip(*data(case.m), strict=True):
        losses.append(pipe.step(x, y).item())
        gradients.append({name: each.grad.clone() for name, each in names.items() if each.requires_grad})
        adam.step()
        adam.zero_grad()
    return losses, gradients, {name: each.detach().clone() for name, each in names.items()}


def on_a_rank(cases, mutants=None):
    results = []
    for case in cases:
        with (mutants or nullcontext)():
            results.append(train(case, case.made(dist.get_world_size())))
    return results


def compare(case, by_rank):
    """Every rank has the losses; together they have every gradient and every weight, each like one process's."""
    losses, gradients, weights = alone(replace(case, schedule="", v=1, recompute=False))
    seen = set()
    for found in by_rank:
        assert_close(found[0], losses, **CLOSE)
        for theirs, ours in zip(found[1], gradients, strict=True):
            assert_close(theirs, {name: ours[name] for name in theirs}, **CLOSE)
        assert_close(found[2], {name: weights[name] for name in found[2]}, **CLOSE)
        seen |= set(found[2])
    assert seen == set(weights)


def check(p, cases, **how):
    cases = [case for case in cases if fits(case, p)]
    by_rank = lab.run(on_a_rank, p, args=(cases,), timeout_s=300, **how)
    for number, case in enumerate(cases):
        compare(case, [found[number] for found in by_rank])


CHOSEN = [
    *(Case(name, 4) for name in ("sequential", "GPipe", "1F1B", "ZB-H1", "ZB-V")),
    Case("interleaved", 4, 2), Case("interleaved", 6, 3), Case("ZB-H2", 5, model="untied"), Case("DualPipeV", 8),
    Case("1F1B", 1), Case("ZB-V", 3, model="untied", recompute=True), Case("automatic", 6, model="llama"),
    Case("interleaved", 6, 2, model="llama", recompute=True), Case("ZB-H1", 7, model="llama", frozen=True),
    Case("1F1B", 3, frozen=True), Case("DualPipeV", 8, model="llama", recompute=True),
]  # fmt: skip


@pytest.mark.parametrize(
    ("p", "cases"),
    [
        (1, CHOSEN[::2]), (2, CHOSEN[1::2]), (3, CHOSEN), (4, CHOSEN),
        pytest.param(1, CHOSEN[1::2], marks=pytest.mark.soak), pytest.param(2, CHOSEN[::2], marks=pytest.mark.soak),
    ],
)  # fmt: skip
def test_every_schedule_trains_like_one_process(p, cases):
    check(p, cases)


@pytest.mark.soak
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_every_schedule_of_every_size_trains_like_one_process(p):
    names = [name for name in theory.SCHEDULES if name != "interleaved"]
    whole = [Case(name, m) for name in [*names, "automatic"] for m in range(1, 9)]
    chunked = [Case("interleaved", m, v) for m in range(1, 9) for v in (1, 2, 3) if p * v <= 9]
    check(p, whole + chunked)


MUTANTS = {
    "the last micro-batch alone": lambda: mock.patch.object(
        executor._Batch, "_forward", forgetting(executor._Batch._forward)
    ),
    "each micro-batch as a batch": lambda: mock.patch.object(
        executor._Batch, "_through", unscaled(executor._Batch._through)
    ),
    "tied ends not added up": lambda: mock.patch.object(executor.Pipeline, "_add_up_tied", return_value=None),
}


def forgetting(forward):
    def wrong(self, stage, i):
        for parameter in self.pipeline.stages[stage].parameters():
            parameter.grad = None
        forward(self, stage, i)

    return wrong


def unscaled(through):
    def wrong(self, stage, x, i, saved=None):
        y = through(self, stage, x, i, saved)
        return y * self.tokens / self.pipeline.count(self.targets[i]) if stage == self.last else y

    return wrong


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_executor_is_refused(name):
    case = Case("1F1B", 4)
    by_rank = lab.run(on_a_rank, 2, args=([case], MUTANTS[name]))
    with pytest.raises(AssertionError):
        compare(case, [found[0] for found in by_rank])


def more_than_a_step(m):
    """Accumulated over two batches, then evaluated: gradients, and the loss before and after."""
    case = Case("ZB-H1", m)
    names, pipe = pipeline(case, case.made(dist.get_world_size()))
    x, y = data(m)
    before = pipe.evaluate(x[0], y[0]).item()
    assert all(each.grad is None for each in names.values())
    losses = [pipe.step(x[k], y[k]).item() for k in (0, 1)]
    return before, losses, {name: each.grad for name, each in names.items()}


def test_gradients_add_up_over_batches_and_evaluation_leaves_none():
    model, (x, y) = built(Case("", 4)), data(4)
    expected = [gpt.next_token_loss(model(x[k]), y[k]) for k in (0, 1)]
    sum(expected).backward()
    weights = dict(model.named_parameters())
    for before, losses, gradients in lab.run(more_than_a_step, 3, args=(4,)):
        assert before == pytest.approx(losses[0], rel=1e-12)
        assert losses == pytest.approx([each.item() for each in expected], rel=1e-12)
        for name, gradient in gradients.items():
            assert_close(gradient, weights[name].grad, **CLOSE)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: pipeline(Case("1F1B", 4), theory.one_f_one_b(3, 4)), "schedule must be for 2 ranks"),
        (lambda: pp.Pipeline({}, theory.one_f_one_b(2, 4), width=8), "stages must be "),
        (
            lambda: pipeline(Case("1F1B", 4), theory.one_f_one_b(2, 4))[1].step(*(each[0] for each in data(3))),
            "multiple of 4",
        ),
        (lambda: ignored(), "targets must have one that counts"),
        (lambda: pipeline(Case("1F1B", 4), broken()), "never does B0.3"),
        (lambda: pp.cut(gpt.GPT(GPT), 2, [4, 4]), "layers must be 2 numbers that add up to 9"),
        (lambda: pp.cut(gpt.GPT(GPT), 10), "stages must be at most num_layers=9, not 10"),
    ],
)
def test_bad_arguments_are_named_before_anything_is_sent(build, said):
    for found in lab.run(refused, 2, args=(build,)):
        assert said in found[0]
        assert found[1] == 0


def refused(build):
    with lab.SendCounter() as counter, pytest.raises(ValueError) as error:
        build()
    return str(error.value), counter.num_sends


def ignored():
    x, y = data(4)
    return pipeline(Case("1F1B", 4), theory.one_f_one_b(2, 4))[1].step(x[0], torch.full_like(y[0], gpt.IGNORED))


def broken():
    schedule = theory.one_f_one_b(2, 4)
    return replace(schedule, actions=(schedule.actions[0][:-1], schedule.actions[1]))
