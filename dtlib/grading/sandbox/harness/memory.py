"""Harnesses of the chapter on memory: steps of training that are weighed from outside."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch

from dtlib.grading.exercises import inputs

from .desk import Desk
from .model import Changes, Model, batches, loss_fn, make_optimizer, returned_function, sample


def master_copy(function: Callable[..., Any], desk: Desk) -> dict[str, Any]:
    """``step = function(model, make_optimizer)``, then ``step()`` with gradients that the desk gives, some times.

    The desk is asked at each step of an optimizer, and after each ``step()`` for the elements of the weights to tell;
    it is shown by how much some others have changed.
    """
    given, optimizers = desk.next(), weakref.WeakSet[torch.optim.Optimizer]()
    model, weights, formats, kept = Model(given), [], set(), 0
    changed = Changes(model)

    def make(tensors: Any) -> torch.optim.Optimizer:
        optimizer = make_optimizer(given)(tensors)
        optimizer.register_step_pre_hook(lambda *call: desk.ask("optimizer step"))
        optimizers.add(optimizer)
        return optimizer

    step = returned_function(function(model, make))
    for _ in range(given["steps"]):
        _Given.backward_through(model, desk.next())
        step()
        gc.collect()  # what hangs in a cycle is nobody's to hold
        weights.append(sample(model.parameters(), desk.next(changed.by())))
        formats |= {str(each.dtype).removeprefix("torch.") for each in model.parameters()}
        groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
        kept = _gradient_bytes([*model.parameters(), *(each for group in groups for each in group)])
    return {"weights": weights, "formats": sorted(formats), "gradient_bytes": kept, "shown": changed.told}


def update_in_backward(function: Callable[..., Any], desk: Desk) -> dict[str, Any]:
    """``function(model, make_optimizer)``, then backward, and nothing else, for each batch.

    The desk is asked at each gate on the way back, if there are gates, and after it for the elements of the weights
    to tell; it is shown by how much some others have changed.
    """
    given, weights, kept = desk.next(), [], 0
    model = Model(given, desk if given["gated"] else None)
    changed = Changes(model)
    function(model, make_optimizer(given))
    for batch in batches(given):
        loss_fn(model, batch).backward()
        gc.collect()
        weights.append(sample(model.parameters(), desk.next(changed.by())))
        kept = _gradient_bytes(model.parameters())
    return {"weights": weights, "gradient_bytes": kept, "shown": changed.told}


class _Given(torch.autograd.Function):
    """Zero; on the way back the gradient is the one given, in the format of the parameter."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, told: tuple[int, int], index: int) -> torch.Tensor:
        ctx.given, ctx.format = (told, index, tuple(parameter.shape)), parameter.dtype
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, None, None]:
        return torch.from_numpy(inputs.given_gradient(*ctx.given)).to(ctx.format).div_(64), None, None

    @classmethod
    def backward_through(cls, model: torch.nn.Module, told: tuple[int, int]) -> None:
        """Give every parameter its gradient, as backward does."""
        parts = [cls.apply(each, told, index) for index, each in enumerate(model.parameters())]
        torch.stack(parts).sum().backward()


def _gradient_bytes(tensors: Any) -> int:
    """The bytes of all gradients that these tensors hold."""
    found = {id(each): each.grad.nbytes for each in tensors if each.grad is not None}
    return sum(found.values())
