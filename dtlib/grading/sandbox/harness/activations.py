"""Harnesses of activations: real forward and backward passes. What is kept between them is weighed from outside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dtlib.grading.exercises import inputs

from .desk import Desk
from .given import Given
from .model import elements

_DICE = 4  # how many dice others throw


def gated(function: Callable[..., Any], desk: Desk) -> dict[str, Any]:
    """``function(gate, up)`` of copies that nobody else keeps, forward and backward; with a `residual`, the first one
    goes into the result as well, and `twice` adds a call with both exchanged, whose result goes back last.

    Between the two the desk tells which elements it wants to know, and is shown the norm of some; it is asked once more
    when all but the gradients is let go.
    """
    given = desk.next()
    gate, up = (torch.from_numpy(each).requires_grad_() for each in inputs.gate_and_up(given))
    pair = _halves(gate, up) if given["fused"] else (gate * 1, up * 1)
    kept = Given(function, pair)
    y = function(*pair)
    changed = kept.changed()
    y = y + pair[0] if given["residual"] else y
    del pair, kept
    ends = [y, function(up * 1, gate * 1)] if given["twice"] else [y]
    del y
    shown = _some(ends[0])
    wanted = desk.next(shown)
    output = elements(sum(end.detach() for end in ends), wanted)
    while ends:
        ends.pop(0).backward(torch.from_numpy(inputs.noise(given, "upstream", given["shape"])))
    desk.next()
    found = [elements(each.grad, wanted) for each in (gate, up)]
    return {"output": output, "gradients": found, "changed": changed, "shown": [shown]}


def checkpoint(function: Callable[..., Any], desk: Desk) -> dict[str, Any]:
    """A step through layers, each called as ``function(fn, x)``, with dice thrown by others after either half.

    Where fewer have weights of their `own`, they are used again. Layers that are `apart` are all called with one x,
    or again with -x, and what the first one gives goes back first, and twice as much to the second. Where there are
    `earlier` gradients, those of the weights are the weights themselves. The desk is asked between the two and after
    them as in `gated`, and by each layer: when it is called, and when a gradient comes back to it.
    """
    given = desk.next()
    layers = [_Layer(given, number, desk) for number in range(given["own"])]
    shape = (given["tokens"], given["width"])
    x = torch.from_numpy(inputs.noise(given, "x", shape)).requires_grad_()
    torch.manual_seed(given["dice"])
    y = x if given["leaf"] else x.tanh()
    ends = []
    functions = [_opaque(layer) for layer in layers]
    for number in range(given["layers"]):
        again, which = divmod(number, given["own"])
        out = function(functions[which], -y if again and given["apart"] else y)
        if given["apart"]:
            ends.append(out)
        else:
            y = out + y if given["residual"] else out
        del out
    ends = ends or [y]
    del y
    shown = _some(ends[0])
    wanted = desk.next(shown)
    thrown, output = [torch.rand(_DICE)], elements(sum(end.detach() for end in ends), wanted)
    for number in range(1, len(ends) + 1):
        ends.pop(0).backward(number * torch.from_numpy(inputs.noise(given, "upstream", shape)))
    thrown.append(torch.rand(_DICE))
    desk.next()
    gradients = [elements(x.grad, wanted)]
    if not given["weighed"]:
        gradients += [weight.grad for layer in layers for weight in layer.weights]
    return {"results": [output, *gradients], "dice": thrown, "shown": [shown]}


def _some(result: Tensor) -> float:
    """The norm of some elements of a result."""
    return float(result.detach().reshape(-1)[inputs.every_so_often(result.numel())].norm())


class _Layer:
    """A matrix, a tanh, dropout and a matrix: each call asks the desk for a key by which the result is multiplied."""

    def __init__(self, given: Mapping[str, Any], number: int, desk: Desk) -> None:
        self.weights = [torch.from_numpy(each).requires_grad_() for each in inputs.layer(given, number)]
        for weight in self.weights if given["earlier"] else ():
            weight.grad = weight.detach().clone()
        self.dropout, self.number, self.desk = given["dropout"], number, desk

    def __call__(self, x: Tensor) -> Tensor:
        key = torch.from_numpy(self.desk.ask(f"layer {self.number}"))
        inside = torch.tanh(functional.linear(x, *self.weights[:2]))
        if self.dropout:
            inside = inside * ((torch.rand(inside.shape) >= self.dropout) / (1 - self.dropout))
        out: Tensor = _Lock.apply(functional.linear(inside, *self.weights[2:]), key, self)
        return out


class _Lock(torch.autograd.Function):
    """Multiplies by a key; a gradient is multiplied by another one, which is asked for when it comes."""

    @staticmethod
    def forward(x: Tensor, key: Tensor, layer: _Layer) -> Tensor:
        return x * key

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.layer = inputs[2]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, None, None]:
        return grad_outputs[0] * torch.from_numpy(ctx.layer.desk.ask(f"back {ctx.layer.number}")), None, None


def _halves(gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    return torch.cat([gate, up], dim=-1).chunk(2, dim=-1)


def _opaque(layer: _Layer) -> Callable[[Tensor], Tensor]:
    return lambda x: layer(x)
