"""The model of a case, with gates between its layers: a rank goes back through a gate with a key from the desk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch

from dtlib.grading.exercises import inputs

from .desk import Desk
from .given import Given


class Gate(torch.autograd.Function):
    """Gives what it gets; on the way back the gradient is multiplied by a key, which is asked for at that moment: the
    next piece, or the one called `label`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, desk: Desk, label: str) -> torch.Tensor:
        """What came in."""
        ctx.desk, ctx.label = desk, label
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, None, None]:
        """Asks for the key."""
        key = ctx.desk.ask(ctx.label, grad_outputs[0].norm())
        return grad_outputs[0] * torch.from_numpy(key), None, None


class Own(torch.nn.Module):
    """A linear layer that is none of torch's: what is told a model may meet any."""

    def __init__(self, before: int, after: int, bias: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(after, before))
        self.bias = torch.nn.Parameter(torch.empty(after)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[samples, before] to [samples, after]."""
        return torch.nn.functional.linear(x, self.weight, self.bias)


class Model(torch.nn.Module):
    """Linear layers with tanh between them, the last one of a class of its own, used in the order that the case says;
    gated where it is given a `desk`."""

    def __init__(self, given: Mapping[str, Any], desk: Desk | None = None) -> None:
        super().__init__()
        biased, frozen = given.get("biases", True), given.get("frozen", ())
        self.layers = torch.nn.ModuleList()
        *others, last = pairwise(given["widths"])
        for each in others:
            self.layers.append(torch.nn.utils.skip_init(torch.nn.Linear, *each, bias=biased))
        self.layers.append(Own(*last, bias=biased))
        for index, (parameter, value) in enumerate(zip(self.parameters(), inputs.parameters(given), strict=True)):
            parameter.data = torch.from_numpy(value)
            parameter.requires_grad_(index not in frozen)
        self.use, self.desk = inputs.use(given), desk

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[samples, in] to [samples, out]."""
        for place, layer in enumerate(self.use):
            if place:
                x = torch.tanh(x)
                x = Gate.apply(x, self.desk, "") if self.desk is not None else x
            x = self.layers[layer](x)
        return x


def loss_fn(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The mean squared error of `model` on a batch (inputs, targets)."""
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def batches(given: Mapping[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The batches that a rank was given."""
    return [(torch.from_numpy(one), torch.from_numpy(two)) for one, two in given["batches"]]


def make_optimizer(given: Mapping[str, Any]) -> Callable[[Any], torch.optim.Optimizer]:
    """A function that makes the optimizer of the case for a list of tensors."""
    chosen = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[given["optimizer"]]
    return lambda tensors: chosen(tensors, **given["settings"])


def returned_function(returned: Any) -> Callable[..., Any]:
    """What a learner's function returned, which must be a function."""
    if not callable(returned):
        raise TypeError(f"the function must return a function, not {type(returned).__name__}")
    return returned  # type: ignore[no-any-return]


def stepped(name: str, returned: Any, steps: int, desk: Desk) -> tuple[list[torch.Tensor], list[str]]:
    """What the function `returned`, called `name`, gives in each of some steps for a gradient from the desk, a tensor
    each; and which of its arguments it changed."""
    step, told, changed = returned_function(returned), list[torch.Tensor](), list[str]()
    for _ in range(steps):
        arguments = [torch.from_numpy(desk.next())]
        kept = Given(step, arguments)
        found = step(*arguments)
        if not isinstance(found, torch.Tensor):
            raise TypeError(f"{name} must return a tensor, not {type(found).__name__}")
        told.append(found.detach().clone())
        changed += kept.changed()
    return told, changed


def gradients(model: torch.nn.Module) -> list[Any]:
    """A copy of each parameter's gradient, None where there is none."""
    return [None if each.grad is None else each.grad.detach().clone() for each in model.parameters()]


def sample(tensors: Any, positions: Any) -> Any:
    """The elements at `positions` of all `tensors` end to end, without laying them so."""
    found, start = torch.zeros(len(positions)), 0
    places = torch.from_numpy(positions)
    for each in tensors:
        own = (places >= start) & (places < start + each.numel())
        found[own] = each.detach().reshape(-1)[places[own] - start].float()
        start += each.numel()
    return found


class Changes:
    """By how much some elements of a model's weights have changed since it was made: what there is to show."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._watched = inputs.every_so_often(sum(each.numel() for each in model.parameters()))
        self._before = sample(model.parameters(), self._watched)
        self.told: list[float] = []

    def by(self) -> float:
        """The norm of the changes."""
        self.told.append(float((sample(self._model.parameters(), self._watched) - self._before).norm()))
        return self.told[-1]


def elements(tensor: torch.Tensor | None, positions: Any) -> torch.Tensor | None:
    """A copy of the elements of `tensor` at `positions`, if there is one; without positions, of all of it."""
    if tensor is None or positions is None:
        return None if tensor is None else tensor.detach().clone()
    return tensor.detach().reshape(-1)[torch.from_numpy(positions)]
