"""What a pipeline costs: bytes over its cuts, activations held, and the products of a split backward pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from dtlib import lab
from dtlib.ranks import model as gpt
from dtlib.ranks import pp
from dtlib.theory import pp as theory

from .cases import CLOSE, GPT, MODELS, Case, data, pipeline


def each(measure, world_size, cases):
    """Every case with what each rank measured of it, in one start of ranks."""
    by_rank = lab.run(lambda: [measure(case) for case in cases], world_size)
    return zip(cases, zip(*by_rank, strict=True), strict=True)


def sent_elements(case):
    _, pipe = pipeline(case, case.made(dist.get_world_size()), tied=None)
    x, y = data(case.m)
    with lab.SendCounter() as counter:
        pipe.step(x[0], y[0])
    return counter.sent_bytes // 8  # float64


def test_cuts_are_crossed_by_activations_and_their_gradients_alone():
    cases = [Case("1F1B", 8, model="untied"), Case("interleaved", 8, 2, model="untied")]
    for case, found in each(sent_elements, 4, cases):
        assert sum(found) == theory.boundary_elements(4, case.m, 2, 5, 8, case.v)


def held(case):
    """The most activations that are between forward and backward, counted by what autograd keeps of a marked tensor."""
    alive, most = 0, 0

    class Marked(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            nonlocal alive, most
            alive += 1
            most = max(most, alive)
            return x.view_as(x)

        @staticmethod
        def backward(context, gradient):
            nonlocal alive
            alive -= 1
            return gradient

    class Marking(nn.Module):
        def __init__(self, stage):
            super().__init__()
            self.stage = stage

        def forward(self, x):
            return Marked.apply(self.stage(x))

    _, pipe = pipeline(case, case.made(dist.get_world_size()), tied=None)
    pipe.stages = {number: Marking(stage) for number, stage in pipe.stages.items()}
    x, y = data(case.m)
    pipe.step(x[0], y[0])
    return most


def test_a_rank_holds_as_many_activations_as_the_law_says():
    for case, found in each(held, 3, [Case("GPipe", 6), Case("1F1B", 6), Case("interleaved", 6, 3)]):
        law = [theory.most_in_flight(case.schedule, 3, case.m, rank, case.v) * case.v for rank in range(3)]
        assert found == pytest.approx(law), case


WIDE = replace(GPT, num_layers=6, hidden=32, seq=64, vocab=11, tied=False, dtype=torch.float32)


def peak(schedule):
    """The most bytes that a step of this rank holds, over what its stages keep of one forward pass."""
    rank, stages = dist.get_rank(), pp.cut(gpt.GPT(WIDE), schedule.num_stages)
    own = {stage: stages[stage] for stage, where in enumerate(schedule.placed) if where == rank}
    for each in (each for stage in own.values() for each in stage.parameters()):
        each.grad = torch.zeros_like(each)
    tokens = torch.zeros(2 * schedule.micro_batches, 64, dtype=torch.long)
    with lab.memory() as memory:
        pp.Pipeline(own, schedule, width=32).step(tokens, tokens)
    kept = 0
    for number, stage in own.items():
        x = torch.zeros(2, 64, 32, requires_grad=True) if number else tokens[:2]
        last = number == schedule.num_stages - 1
        passed = (lambda x, stage=stage: gpt.next_token_loss(stage(x), tokens[:2])) if last else stage
        kept += lab.saved_bytes(passed, x).total
    return memory.peak / kept


def test_bytes_held_follow_the_law_on_every_rank():
    """And about one more, for a backward pass that runs and what has come early; where a micro-batch waits for its
    weights' gradients it takes a quarter more."""
    together = [theory.sequential(3, 6), theory.gpipe(3, 6), theory.one_f_one_b(3, 6), theory.interleaved(3, 6, 2)]
    split = [theory.zb_h1(3, 6), theory.zb_h2(3, 6)]
    for schedule, by_rank in each(peak, 3, together + split):
        for rank, found in enumerate(by_rank):
            law = theory.most_in_flight(schedule.name, 3, 6, rank, schedule.chunks)
            assert law < found <= (1.25 if schedule in split else 1) * law + 1.2, (schedule.name, rank)


def split(x, stage):
    """A stage's gradients in two parts; what the first has left undone; the products of matrices of both parts."""
    y = stage(x)
    later = pp.SplitBackward(x, y, stage.parameters())
    with FlopCounterMode(display=False) as now:
        of_input = later.input_gradient(torch.ones_like(y))
    assert all(each.grad is None for each in stage.parameters())
    with FlopCounterMode(display=False) as then:
        later.weight_gradients()
    return of_input, [each.grad for each in stage.parameters()], now.get_total_flops(), then.get_total_flops()


@pytest.mark.parametrize("name", MODELS)
def test_a_split_backward_pass_makes_each_product_once(name):
    config = replace(MODELS[name], num_layers=3)
    stage, twin = (pp.cut(gpt.GPT(config), 3)[1] for _ in range(2))
    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    of_input, of_weights, now, then = split(x, stage)
    other = x.detach().requires_grad_()
    y = twin(other)
    with FlopCounterMode(display=False) as both:
        y.sum().backward()
    assert_close(of_input, other.grad, **CLOSE)
    assert_close(of_weights, [each.grad for each in twin.parameters()], **CLOSE)
    assert now + then == both.get_total_flops()
    linear = 2 * 2 * 5 * sum(each.numel() for each in twin.parameters() if each.dim() == 2)
    assert then == linear  # the products for the weights, and nothing else
