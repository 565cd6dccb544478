"""Harnesses of pipeline parallelism."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from .desk import Desk
from .given import Given
from .model import Gate


def split(function: Callable[..., Any], desk: Desk) -> dict[str, Any]:
    """``function(weights, x)`` for each micro-batch; then all first halves, and all second halves, the last one first.

    Operations of each part are counted. The desk is asked for the gradients when all forward passes are done.
    """
    given = desk.next()
    operations: dict[str, int] = {}

    def counted(part: str, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        with FlopCounterMode(display=False) as counter:
            found = [call() for call in calls]
        operations[part] = counter.get_total_flops()
        return found

    weights = [torch.from_numpy(each) for each in given["weights"]]
    inputs = [torch.from_numpy(each) for each in given["inputs"]]
    kept = [Given(function, [weights, x]) for x in inputs]
    passes = counted("forward", [partial(function, weights, x) for x in inputs])
    gradients = [torch.from_numpy(each) for each in desk.next()]
    kept += [Given(each[1], [gradient]) for each, gradient in zip(passes, gradients, strict=True)]
    first_halves = [partial(each[1], gradient) for each, gradient in zip(passes, gradients, strict=True)]
    to_inputs = counted("first half", first_halves)
    to_weights = counted("second half", [each[2] for each in reversed(passes)])
    return {
        "outputs": [each[0] for each in passes],
        "inputs": to_inputs,
        "weights": [list(each) for each in reversed(to_weights)],
        "operations": operations,
        "changed": sorted({name for each in kept for name in each.changed()}),
    }


class _Stage(torch.nn.Module):
    """tanh of a product, times a key that is asked for; what comes back to it is multiplied by another one."""

    def __init__(self, weight: torch.Tensor, desk: Desk) -> None:
        super().__init__()
        self.weight, self.desk = torch.nn.Parameter(weight), desk

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, h) to (n, h)."""
        y = torch.tanh(x @ self.weight.T)
        return Gate.apply(y * torch.from_numpy(self.desk.ask("forward", y.detach().norm())), self.desk, "back")


def executor(function: Callable[..., Any], desk: Desk) -> dict[str, Any]:
    """``function(actions, stage, rows, inputs, losses)``: the gradient of the stage's weight; the last rank's loss."""
    given = desk.next()
    stage = _Stage(torch.from_numpy(given["weight"]), desk)

    def loss(i: int, y: torch.Tensor) -> torch.Tensor:
        return (y * torch.from_numpy(desk.ask(f"loss {i}"))).sum()

    losses = [partial(loss, i) for i in range(len(given["rows"]))] if given["is_last"] else None
    inputs = [torch.from_numpy(each) for each in given["inputs"]] if given["inputs"] is not None else None
    actions = [(kind, i) for kind, i in given["actions"]]
    arguments = [actions, stage, given["rows"], inputs, losses]
    kept = Given(function, arguments)
    total = function(*arguments)
    told = float(total) if given["is_last"] else None
    return {"gradient": stage.weight.grad, "loss": told, "changed": kept.changed()}
