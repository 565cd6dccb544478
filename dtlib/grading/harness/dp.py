"""Harnesses of data parallelism: gradients to average, micro-batches to accumulate, hooks to attach."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from dtlib.grading.drawn import is_frozen

from .meter import metered, settle
from .recorder import Recorder


def token_weighted(function: Callable[..., Any], case: Mapping[str, Any]) -> dict[str, Any]:
    """``function(gradient, num_tokens)``, in place."""
    gradient = torch.from_numpy(case["values"])
    with metered() as meter:
        returned = function(gradient, case["num_tokens"])
    return {"tensor": gradient, "returned": returned, **meter.counts}


def accumulate(function: Callable[..., Any], case: Mapping[str, Any]) -> dict[str, Any]:
    """``function(model, micro_batches, loss_fn)``, which leaves the gradients in ``parameter.grad``."""
    model = network(case)
    micro_batches = [_tensors(case, number) for number in range(case["micro_batches"])]
    with metered() as meter:
        function(model, micro_batches, loss_fn)
    return {"gradients": _gradients(model), **meter.counts}


def overlap(function: Callable[..., Any], case: Mapping[str, Any]) -> dict[str, Any]:
    """``finish = function(model, bucket_bytes)``, then two steps of backward and ``finish()``."""
    model = network(case)
    gradients = []
    with metered() as meter:
        recorder = meter.recorder
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: _ready(recorder))
        finish = function(model, case["bucket_bytes"])
        for step in range(case["steps"]):
            model.zero_grad(set_to_none=True)
            recorder.mark("step")
            loss_fn(model, _tensors(case, step)).backward()
            recorder.mark("backward done")
            settle(meter)
            finish()
            recorder.mark("finished")
            gradients.append(_gradients(model))
    return {"gradients": gradients, **meter.counts}


def _ready(recorder: Recorder) -> None:
    recorder.mark("ready")  # a hook must return None


def network(case: Mapping[str, Any]) -> torch.nn.Sequential:
    """The case's network, with the same weights on every rank."""
    modules: list[torch.nn.Module] = []
    for number, (weight, bias) in enumerate(case["layers"]):
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0])
        with torch.no_grad():
            linear.weight.copy_(torch.from_numpy(weight))
            linear.bias.copy_(torch.from_numpy(bias))
        linear.weight.requires_grad_(not is_frozen(case, number, "weight"))
        linear.bias.requires_grad_(not is_frozen(case, number, "bias"))
        modules += [linear, torch.nn.Tanh()]
    return torch.nn.Sequential(*modules[:-1])


def loss_fn(model: torch.nn.Module, micro_batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The mean squared error of `model` on a micro-batch (inputs, targets)."""
    inputs, targets = micro_batch
    return torch.nn.functional.mse_loss(model(inputs), targets)


def _tensors(case: Mapping[str, Any], number: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = case["batches"][number]
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def _gradients(model: torch.nn.Module) -> list[Any]:
    return [None if each.grad is None else each.grad.detach().clone() for each in model.parameters()]
