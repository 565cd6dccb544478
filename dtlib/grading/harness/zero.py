"""Harnesses of ZeRO: weights to split, gradients and states in shares, layers gathered for use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .dp import loss_fn, network
from .meter import metered
from .recorder import Recorder
from .scale import unweighed


def split(function: Callable[..., Any], case: Mapping[str, Any]) -> dict[str, Any]:
    """``shard, unshard = function(parameters)``; then the parameters go, the shard changes, and ``unshard()`` gathers.

    Each rank multiplies its shard by a number of its own, so that only what comes from the shards can be right.
    """
    parameters = [torch.tensor(weight) for weight in case["weights"]]
    with metered(weighed=True) as meter:
        meter.scale.held("given")
        shard, unshard = _pair(function(parameters))
        del parameters
        meter.scale.held("kept")
        meter.recorder.mark("split")
        first = shard.detach().clone()
        with torch.no_grad():
            shard.mul_(case["factor"])
        rebuilt = unshard()
    return {"shard": first, "rebuilt": rebuilt, **meter.counts}


def _pair(returned: Any) -> tuple[torch.Tensor, Callable[[], Any]]:
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise TypeError(f"the function must return a pair (shard, unshard), not {type(returned).__name__}")
    shard, unshard = returned
    if not isinstance(shard, torch.Tensor) or not callable(unshard):
        raise TypeError(
            "the function must return a pair of a tensor and a function, "
            f"not of {type(shard).__name__} and {type(unshard).__name__}"
        )
    return shard, unshard


def optimizer(function: Callable[..., Any], case: Mapping[str, Any]) -> dict[str, Any]:
    """``step = function(parameters, make_optimizer)``, then some steps of backward and ``step()``."""
    model = network(case)
    with metered(weighed=True) as meter:
        meter.scale.know(model)
        meter.scale.held("start")
        step = function(list(model.parameters()), _maker(case))
        if not callable(step):
            raise TypeError(f"the function must return a function, not {type(step).__name__}")
        for number in range(case["steps"]):
            meter.recorder.mark("step")
            loss_fn(model, _tensors(case, number)).backward()
            step()
            model.zero_grad(set_to_none=True)
            if number == 0:
                first = [unweighed(each) for each in model.parameters()]
        meter.scale.held("trained")
    return {"first": first, "weights": list(model.parameters()), **meter.counts}


def _maker(case: Mapping[str, Any]) -> Callable[[Any], torch.optim.Optimizer]:
    chosen = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[case["optimizer"]]
    return lambda parameters: chosen(parameters, **case["settings"])


def gradients(function: Callable[..., Any], case: Mapping[str, Any]) -> dict[str, Any]:
    """``shards = function(model)``, a list that the hooks of the learner fill in every backward."""
    model = network(case)
    seen: list[Any] = []
    left: list[int] = []
    with metered(weighed=True) as meter:
        recorder = meter.recorder
        meter.scale.know(model)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda _: _ready(recorder))
        shards = function(model)
        for number in range(case["steps"]):
            recorder.mark("step")
            loss = loss_fn(model, _tensors(case, number))
            with meter.scale.peak("backward"):
                loss.backward()
            del loss
            recorder.mark("done")
            meter.scale.held("after")
            if not isinstance(shards, list):
                raise TypeError(f"the function must return a list, not {type(shards).__name__}")
            seen.append([each.detach().clone() if isinstance(each, torch.Tensor) else each for each in shards])
            left.append(sum(each.grad is not None for each in model.parameters()))
    return {"shards": seen, "left": left, **meter.counts}


def _ready(recorder: Recorder) -> None:
    recorder.mark("ready")  # a hook must return None


def stack(function: Callable[..., Any], case: Mapping[str, Any]) -> dict[str, Any]:
    """``outputs = function(inputs, shard, out_features)`` for layer after layer, backward, and a step of the shards."""
    shards = [torch.tensor(each).requires_grad_() for each in case["shards"]]
    widths = case["widths"]
    losses: list[float] = []
    found: list[Any] = []
    with metered(weighed=True) as meter:
        for number in range(case["steps"]):
            inputs, targets = _tensors(case, number)
            meter.recorder.mark("forward")
            with meter.scale.peak("forward"):
                outputs = inputs
                for layer, shard in enumerate(shards):
                    outputs = function(outputs, shard, widths[layer + 1])
                    meter.recorder.mark("layer")
                    if layer < len(shards) - 1:
                        outputs = torch.tanh(outputs)
                loss = torch.nn.functional.mse_loss(outputs, targets)
            del outputs
            meter.recorder.mark("backward")
            with meter.scale.peak("backward"):
                loss.backward()
            meter.recorder.mark("done")
            losses.append(loss.item())
            del loss
            found.append([None if each.grad is None else each.grad.detach().clone() for each in shards])
            with torch.no_grad():
                for each in shards:
                    if each.grad is not None:
                        each -= case["learning_rate"] * each.grad
                        each.grad = None
    return {"losses": losses, "gradients": found, **meter.counts}


def clip(function: Callable[..., Any], case: Mapping[str, Any]) -> dict[str, Any]:
    """``function(shards, max_norm)``, in place; it returns the norm before."""
    shards = [each.clone() for each in torch.from_numpy(case["values"]).split(case["pieces"])]
    with metered() as meter:
        returned = function(shards, case["max_norm"])
    return {"tensor": torch.cat(shards), "returned": returned, **meter.counts}


def _tensors(case: Mapping[str, Any], number: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = case["batches"][number]
    return torch.tensor(inputs), torch.tensor(targets)
