"""Harnesses of ZeRO: weights to split, gradients and states in shares, layers gathered for use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtlib.grading.exercises import inputs

from .desk import Desk
from .model import Gate, Model, batches, elements, loss_fn, make_optimizer, returned_function, sample


def split(function: Callable[..., Any], desk: Desk) -> dict[str, Any]:
    """``shard, unshard = function(parameters)``; then the parameters go, and twice the shard changes and is gathered.

    By what a rank multiplies its shard it asks when it holds nothing else, and shows the shard's norm. Of many elements
    it tells those at some ``positions``.
    """
    given, rebuilt, shown = desk.next(), [], []
    shard, unshard = _pair(function([torch.from_numpy(each).requires_grad_() for each in inputs.tensors(given)]))
    first = None if "positions" in given else shard.detach().clone()
    for _ in range(2):
        shown.append(float(shard.detach().norm()))
        with torch.no_grad():
            shard.mul_(desk.next(shown[-1]))
        found = unshard()
        rebuilt.append(sample(found, given["positions"]) if "positions" in given else _copied(found))
        del found
    return {"shard": first, "rebuilt": rebuilt, "shown": shown}


def _pair(returned: Any) -> tuple[torch.Tensor, Callable[[], Any]]:
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise TypeError(f"the function must return a pair (shard, unshard), not {type(returned).__name__}")
    shard, unshard = returned
    if not isinstance(shard, torch.Tensor) or not callable(unshard):
        kinds = f"{type(shard).__name__} and {type(unshard).__name__}"
        raise TypeError(f"the function must return a pair of a tensor and a function, not of {kinds}")
    if shard.requires_grad:
        raise ValueError("the shard must require no gradient, and this one does")
    return shard, unshard


def _copied(found: Any) -> Any:
    """Tensors in a list as they are now; anything else as it is."""
    if not isinstance(found, list | tuple):
        return found
    return [each.detach().clone() if isinstance(each, torch.Tensor) else each for each in found]


def optimizer(function: Callable[..., Any], desk: Desk) -> dict[str, Any]:
    """``step = function(parameters, make_optimizer)``, then some steps of backward and ``step()``.

    After each step the desk tells which elements of the weights it wants to know, and is shown by how much some others
    have changed: what is held then is held between steps.
    """
    given, seen = desk.next(), []
    model = Model(given)
    watched = inputs.every_so_often(sum(each.numel() for each in model.parameters()))
    before = sample(model.parameters(), watched)
    step = returned_function(function(list(model.parameters()), make_optimizer(given)))
    for batch in batches(given):
        loss_fn(model, batch).backward()
        step()
        model.zero_grad(set_to_none=True)
        changed = sample(model.parameters(), watched) - before
        seen.append(sample(model.parameters(), desk.next(changed.sum())))
    return {"weights": seen}


def gradients(function: Callable[..., Any], desk: Desk) -> dict[str, Any]:
    """``shares = function(model)``, a list that its hooks fill in every backward, through the gates.

    After each backward the desk is asked once more. Of many elements it tells those at some ``positions``.
    """
    given, seen, left = desk.next(), [], []
    model = Model(given, desk)
    shares = function(model)
    if not isinstance(shares, list):
        raise TypeError(f"the function must return a list, not {type(shares).__name__}")
    for batch in batches(given):
        loss_fn(model, batch).backward()
        if "positions" in given:
            seen.append([sample((each for each in shares if each is not None), given["positions"])])
        else:
            seen.append(_copied(shares))
        left.append(sum(each.grad is not None for each in model.parameters()))
        if given["clears"]:
            shares[:] = [None] * len(shares)
        desk.next()
    return {"shares": seen, "left": left}


def clip(function: Callable[..., Any], desk: Desk) -> dict[str, Any]:
    """``function(shards, max_norm)``, in place: shards are views of one long tensor; it returns the norm before."""
    given = desk.next()
    sizes = [len(each) for each in given["shards"]]
    whole = torch.cat([torch.from_numpy(each) for each in given["shards"]])
    returned = function(list(whole.split(sizes)), given["max_norm"])
    return {"shards": list(whole.split(sizes)), "returned": returned}


def stack(function: Callable[..., Any], desk: Desk) -> dict[str, Any]:
    """``outputs = function(inputs, shard, out_features)`` layer by layer, backward, and a step of the shards.

    Where the next backward ``adds`` there is no step, and gradients stay.
    The desk gives a batch at each step. It is asked at gates between layers, forward and back, and when either ends:
    then it is shown the loss, or the norm of the gradients. Of many elements of a gradient it tells those at some
    ``positions``.
    """
    given, losses, seen, shown = desk.next(), [], [], []
    widths = given["widths"][1:]
    shards = [torch.from_numpy(desk.next()).requires_grad_() for _ in widths]
    for step in range(given["steps"]):
        inputs, targets = map(torch.from_numpy, desk.next())
        outputs = inputs.requires_grad_()
        for layer, (shard, width) in enumerate(zip(shards, widths, strict=True)):
            outputs = torch.tanh(outputs) if layer else outputs
            if layer in given["gates"]:
                desk.ask(f"forward {step}, layer {layer}")
                outputs = Gate.apply(outputs, desk, f"back {step}, layer {layer}")
            outputs = function(outputs, shard, width)
        loss = torch.nn.functional.mse_loss(outputs, targets)
        del outputs
        losses.append(loss.item())
        desk.next(losses[-1])
        loss.backward()
        del loss
        found = [elements(each.grad, given["positions"]) for each in shards]
        shown += [losses[-1], float(sum(each.norm() for each in found if each is not None))]
        desk.next(shown[-1])
        seen += found
        with torch.no_grad():
            for each in () if given["adds"] else shards:
                if each.grad is not None:
                    each -= given["rate"] * each.grad
                    each.grad = None
    return {"losses": losses, "gradients": seen, "shown": shown}
