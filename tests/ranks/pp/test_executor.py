"""One executor, all schedules: losses, gradients and weights after three steps are one process's; mutants are refused.

float64: the sums over micro-batches are made in another order, which costs some 1e-13 of AdamW's first steps.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from dtlib import lab
from dtlib.ranks import model as gpt
from dtlib.ranks import pp
from dtlib.ranks.pp import executor
from dtlib.theory import pp as theory

CLOSE = {"rtol": 1e-9, "atol": 1e-11}
GPT = gpt.GPTConfig(num_layers=9, hidden=8, num_heads=2, seq=5, vocab=23, dtype=torch.float64)
MODELS = {
    "tied": GPT,
    "untied": replace(GPT, tied=False),
    "llama": replace(GPT, tied=False, rotary=True, rms_norm=True, swiglu=True, biases=False, num_kv_heads=1),
}


@dataclass(frozen=True)
class Case:
    """A schedule of so many micro-batches and chunks, a model, and what is special."""

    schedule: str
    m: int
    v: int = 1
    model: str = "tied"
    recompute: bool = False
    frozen: bool = False

    def made(self, p):
        if self.schedule == "interleaved":
            return theory.interleaved(p, self.m, self.v)
        if self.schedule == "automatic":
            return theory.zb_auto(p, self.m, p + 1)
        return theory.SCHEDULES[self.schedule](p, self.m)


def fits(case, p):
    return not (case.schedule == "interleaved" and case.m % p) and not (case.schedule == "DualPipeV" and case.m < 2 * p)


def data(m):
    """Three batches; some targets do not count, most of them in the first micro-batch."""
    tokens = torch.randint(23, (3, 2 * m, 6), generator=torch.Generator().manual_seed(m))
    targets = tokens[:, :, 1:].clone()
    targets[:, 0, :4] = gpt.IGNORED
    return tokens[:, :, :-1], targets


def built(case):
    """The model: for a frozen case neither the third layer nor the embedding is trained."""
    model = gpt.GPT(MODELS[case.model])
    if case.frozen:
        model.blocks[2].requires_grad_(False)
        model.token_embedding.requires_grad_(False)
    return model


@cache
def alone(case):
    """Losses, the gradients of every step, weights: of one process, the whole batch at once."""
    model, losses, gradients = built(case), [], []
    adam = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    for x, y in zip(*data(case.m), strict=True):
        loss = gpt.next_token_loss(model(x), y)
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: each.grad.clone() for name, each in model.named_parameters() if each.requires_grad})
        adam.step()
        adam.zero_grad()
    return losses, gradients, {name: each.detach() for name, each in model.named_parameters()}


def pipeline(case, schedule, **options):
    """The model, this rank's parameters of it by their names, and its pipeline."""
    model, rank = built(case), dist.get_rank()
    stages = pp.cut(model, schedule.num_stages)
    own = {stage: stages[stage] for stage, where in enumerate(schedule.placed) if where == rank}
    mine = {id(each) for stage in own.values() for each in stage.parameters()}
    names = {name: each for name, each in model.named_parameters() if id(each) in mine}
    at_an_end = model.config.tied and rank in (schedule.placed[0], schedule.placed[-1])
    options = {"tied": model.token_embedding.weight if at_an_end else None, "recompute": case.recompute} | options
    return names, pp.Pipeline(own, schedule, width=8, dtype=torch.float64, **options)


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


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_every_schedule_trains_like_one_process(p):
    check(p, CHOSEN)


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


def sent_elements(case):
    _, pipe = pipeline(case, case.made(dist.get_world_size()), tied=None)
    x, y = data(case.m)
    with lab.SendCounter() as counter:
        pipe.step(x[0], y[0])
    return counter.sent_bytes // 8  # float64


@pytest.mark.parametrize("case", [Case("1F1B", 8, model="untied"), Case("interleaved", 8, 2, model="untied")])
def test_cuts_are_crossed_by_activations_and_their_gradients_alone(case):
    assert sum(lab.run(sent_elements, 4, args=(case,))) == theory.boundary_elements(4, case.m, 2, 5, 8, case.v)


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


@pytest.mark.parametrize("case", [Case("GPipe", 6), Case("1F1B", 6), Case("interleaved", 6, 3)])
def test_a_rank_holds_as_many_activations_as_the_law_says(case):
    found = lab.run(held, 3, args=(case,))
    law = [theory.most_in_flight(case.schedule, 3, case.m, rank, case.v) * case.v for rank in range(3)]
    assert found == pytest.approx(law)


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


@pytest.mark.parametrize(
    ("schedule", "waiting"),
    [
        (theory.sequential(3, 6), 1), (theory.gpipe(3, 6), 1), (theory.one_f_one_b(3, 6), 1),
        (theory.interleaved(3, 6, 2), 1), (theory.zb_h1(3, 6), 1.25), (theory.zb_h2(3, 6), 1.25),
    ],
    ids=lambda each: getattr(each, "name", ""),
)  # fmt: skip
def test_bytes_held_follow_the_law_on_every_rank(schedule, waiting):
    """And about one more, for a backward pass that runs and what has come early; `waiting` for its weights' gradients
    a micro-batch takes a quarter more."""
    for rank, found in enumerate(lab.run(peak, 3, args=(schedule,))):
        law = theory.most_in_flight(schedule.name, 3, 6, rank, schedule.chunks)
        assert law < found <= waiting * law + 1.2


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


def on_a_page(case):
    """The version of the page: gradients of a GPT without tied ends."""
    model, n, rank = built(case), dist.get_world_size(), dist.get_rank()
    stage = pp.cut(model, n)[rank]
    x, y = (each[0].chunk(case.m) for each in data(case.m))
    tokens = sum(int((each != gpt.IGNORED).sum()) for each in y)
    losses = [lambda found, each=each: executor.sum_of_losses(found, each) / tokens for each in y]
    actions = case.made(n).actions[rank]
    pp.simple_pipeline(actions, stage, x, losses, (2, 5, 8), torch.float64)
    mine = {id(each) for each in stage.parameters()}
    return {name: each.grad for name, each in model.named_parameters() if id(each) in mine}


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_the_version_of_the_page_has_the_gradients_of_one_process(p):
    for name in ("sequential", "GPipe", "1F1B"):
        case = Case(name, 4, model="untied")
        gradients = alone(replace(case, schedule=""))[1][0]
        seen = set()
        for found in lab.run(on_a_page, p, args=(case,)):
            assert_close(found, {name: gradients[name] for name in found}, **CLOSE)
            seen |= set(found)
        assert seen == set(gradients)
