"""A backward pass in two parts, of any graph: weights used again, frozen, unused; gradients are those of one part."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from dtlib.ranks import pp
from dtlib.ranks.pp.split import Saved

WEIGHTS = 3
PLACES = st.integers(0, 99)
KINDS = st.sampled_from(["add", "times", "matmul", "tanh", "half", "square"])
STEPS = st.lists(st.tuples(KINDS, PLACES, PLACES), max_size=9)


class Square(torch.autograd.Function):
    """An operation of the user's own, which saves what it got."""

    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(context, gradient):
        return 2 * context.saved_tensors[0] * gradient


ONE = {"tanh": torch.tanh, "half": lambda x: x.chunk(2)[1].repeat(2, 1), "square": Square.apply}
TWO = {"add": torch.add, "times": torch.mul, "matmul": torch.matmul}


def output(x, weights, steps):
    """What a stage makes of x: each step takes values that are there, the newest or any, weights among them."""
    values = [*weights, x]
    for kind, a, b in steps:
        first = values[a % len(values)]
        values.append(TWO[kind](first, values[-1 - b % 3]) if kind in TWO else ONE[kind](first))
    return values[-1]


def made(frozen):
    draw = torch.Generator().manual_seed(1)
    numbers = [torch.rand(2, 2, generator=draw, dtype=torch.float64) / 2 for _ in range(WEIGHTS + 1)]
    weights = [each.requires_grad_(number != frozen) for number, each in enumerate(numbers[1:])]
    return numbers[0].requires_grad_(), weights


@given(steps=STEPS, frozen=st.integers(0, WEIGHTS), lets_go=st.booleans())
def test_gradients_of_any_graph_are_those_of_one_part(steps, frozen, lets_go):
    x, weights = made(frozen)
    y = output(x, weights, steps)
    if not y.requires_grad:
        return
    with FlopCounterMode(display=False) as at_once:
        y.backward(torch.ones_like(y))

    twin, ours = made(frozen)
    calls = []
    for number, each in enumerate(ours):
        if each.requires_grad:
            each.register_hook(lambda gradient, number=number: calls.append(number))
            each.register_post_accumulate_grad_hook(lambda _, number=number: calls.append(-1 - number))
    saved = Saved()
    with saved.noting():
        y = output(twin, ours, steps)
    later = pp.SplitBackward(twin, y, saved=saved if lets_go else None)
    with FlopCounterMode(display=False) as in_parts:
        found = later.input_gradient(torch.ones_like(y))
        assert all(each.grad is None for each in (twin, *ours))
        later.weight_gradients()
    assert_close(found, x.grad, rtol=1e-12, atol=1e-14)
    assert_close([each.grad for each in ours], [each.grad for each in weights], rtol=1e-12, atol=1e-14)
    assert in_parts.get_total_flops() == at_once.get_total_flops()  # no product twice
    got = [number for number, each in enumerate(ours) if each.grad is not None]
    assert sorted(calls) == sorted([*got, *(-1 - number for number in got)])  # every hook once


@pytest.mark.parametrize(
    "stage",
    [
        lambda x, c: x + c + c,
        lambda x, c: (x + c) * 2 - c,
        lambda x, c: torch.tanh(x * c) * c,
        lambda x, c: torch.tanh(torch.tanh(x @ c) @ c),
        lambda x, c: x * c.exp() + torch.tanh(x) * c.exp(),
        lambda x, c: x,
        lambda x, c: c * c,
    ],
)
def test_a_weight_that_is_used_twice_counts_twice(stage):
    (x, (c, *_)), (twin, (ours, *_)) = made(-1), made(-1)
    y = stage(x, c)
    y.backward(torch.ones_like(y))
    y = stage(twin, ours)
    later = pp.SplitBackward(twin, y)
    assert_close(later.input_gradient(torch.ones_like(y)), x.grad, rtol=1e-12, atol=1e-14)
    later.weight_gradients()
    assert_close(ours.grad, c.grad, rtol=1e-12, atol=1e-14)


def test_what_is_not_asked_for_gets_nothing():
    x, (a, b, _) = made(-1)
    later = pp.SplitBackward(x, x * a + b, [a])
    later.input_gradient(torch.ones_like(x))
    later.weight_gradients()
    assert_close(a.grad, x.detach())
    assert b.grad is None
