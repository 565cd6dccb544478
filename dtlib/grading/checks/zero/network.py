"""The single process that the ranks must agree with: networks and optimizers in numpy, in double precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from dtlib.grading.checks.dp.network import Gradients, combine, local_gradients
from dtlib.grading.checks.on_ranks import FLOAT_BYTES
from dtlib.grading.compare import close
from dtlib.grading.drawn import batch, layers, shard
from dtlib.grading.exercise import Case

Parameters = list[Any]
"""Arrays: weight and bias of each layer, or its weight alone."""

# Through twenty layers, float32 rounds gradients by some 1e-6 of the largest; known mistakes are off by a factor.
_OF_LARGEST = 1e-4


def loss_and_gradients(parameters: Sequence[Any], inputs: Any, targets: Any) -> tuple[float, Parameters]:
    """Of the mean squared error of tanh layers (the last without tanh); `parameters` are weight and bias in turn."""
    pairs = list(zip(parameters[::2], parameters[1::2], strict=True))
    outputs = [inputs]
    for layer, (weight, bias) in enumerate(pairs):
        before_tanh = outputs[-1] @ weight.T + bias
        outputs.append(before_tanh if layer == len(pairs) - 1 else np.tanh(before_tanh))
    error = outputs[-1] - targets
    gradient = 2 * error / targets.size
    found: Parameters = []
    for layer in reversed(range(len(pairs))):
        found = [gradient.T @ outputs[layer], gradient.sum(0), *found]
        gradient = gradient @ pairs[layer][0] * (1 - outputs[layer] ** 2)
    return float((error**2).mean()), found


def start(case: Case) -> Parameters:
    """The parameters of the case's network at the start: weight and bias of each layer."""
    return [each.astype(np.float64) for pair in layers(case) for each in pair]


def mean_at(case: Case, parameters: Parameters, number: int) -> tuple[list[float], Parameters]:
    """At `parameters` on batch `number`: the loss of each rank, and the gradients' mean over the ranks."""
    losses, sums = [], [np.zeros_like(each) for each in parameters]
    for rank in range(case["world_size"]):
        inputs, targets = (each.astype(np.float64) for each in batch(case, rank, number))
        loss, found = loss_and_gradients(parameters, inputs, targets)
        losses.append(loss)
        sums = [one + two for one, two in zip(sums, found, strict=True)]
    return losses, [each / case["world_size"] for each in sums]


Update = Callable[[int, Any, Any, dict[str, Any]], Any]
"""(step from 1 on, weight, gradient, state of this weight) -> the new weight."""


def adamw(settings: dict[str, Any]) -> Update:
    """One step of AdamW as torch makes it."""
    rate, (beta1, beta2) = settings["lr"], settings["betas"]

    def update(step: int, weight: Any, gradient: Any, state: dict[str, Any]) -> Any:
        state["first"] = beta1 * state.get("first", 0.0) + (1 - beta1) * gradient
        state["second"] = beta2 * state.get("second", 0.0) + (1 - beta2) * gradient**2
        root = np.sqrt(state["second"] / (1 - beta2**step)) + settings["eps"]
        return weight * (1 - rate * settings["weight_decay"]) - rate * state["first"] / (1 - beta1**step) / root

    return update


def sgd(settings: dict[str, Any]) -> Update:
    """One step of SGD with momentum and weight decay as torch makes it."""

    def update(step: int, weight: Any, gradient: Any, state: dict[str, Any]) -> Any:
        gradient = gradient + settings["weight_decay"] * weight
        state["buffer"] = gradient if step == 1 else settings["momentum"] * state["buffer"] + gradient
        return weight - settings["lr"] * state["buffer"]

    return update


def trained(case: Case, factor: float = 1.0, moves: Callable[[int, int], bool] | None = None) -> Parameters:
    """The parameters after ``case["steps"]`` steps of the case's optimizer, of gradients `factor` times the mean.

    ``moves(position, total)`` tells which of the flat elements are updated; all where it is None.
    """
    update = {"adamw": adamw, "sgd": sgd}[case["optimizer"]](case["settings"])
    parameters = start(case)
    total = sum(each.size for each in parameters)
    allowed = [True] * total if moves is None else [moves(position, total) for position in range(total)]
    ends = np.cumsum([each.size for each in parameters])[:-1]
    masks = [part.reshape(each.shape) for part, each in zip(np.split(np.array(allowed), ends), parameters, strict=True)]
    states: list[dict[str, Any]] = [{} for _ in parameters]
    for number in range(case["steps"]):
        _, gradients = mean_at(case, parameters, number)
        parameters = [
            np.where(mask, update(number + 1, weight, factor * gradient, state), weight)
            for mask, weight, gradient, state in zip(masks, parameters, gradients, states, strict=True)
        ]
    return parameters


def num_elements(case: Case) -> int:
    """The elements of all parameters of the case's network."""
    return sum(weight.size + bias.size for weight, bias in layers(case))


# Gradients split among the ranks


def gradient_shards(case: Case, rank: int, numbers: Sequence[int], factor: float = 1.0) -> Gradients:
    """The share of `rank` in the mean gradients, added over the batches `numbers`: one entry a parameter."""
    full = summed(case, tuple(numbers))
    return [None if each is None else factor * shard(each, case["world_size"], rank) for each in full]


def summed(case: Case, numbers: tuple[int, ...]) -> Gradients:
    """The mean over the ranks, added over the batches `numbers`."""
    n = case["world_size"]
    return combine([local_gradients(case, rank, number) for rank in range(n) for number in numbers], 1 / n)


def atol(expected: Any) -> float:
    """How far an element of a gradient may be from what is expected."""
    return _OF_LARGEST * float(np.abs(expected).max(initial=1e-9))


def same(seen: Any, expected: Sequence[Any]) -> bool:
    """Whether a list of gradients and None is as expected."""
    return (
        isinstance(seen, list)
        and len(seen) == len(expected)
        and all(
            one is None if two is None else one is not None and close(one, two, atol=atol(two))
            for one, two in zip(seen, expected, strict=True)
        )
    )


# Layers without biases, their weights split among the ranks


def layer_sizes(case: Case) -> list[int]:
    """The elements of each weight."""
    return [weight.size for weight, _ in layers(case)]


def layers_bytes(case: Case) -> int:
    """The bytes of all weights."""
    return FLOAT_BYTES * sum(layer_sizes(case))


@cache
def _stack(key: tuple[Any, ...], factor: float, whose: int) -> tuple[tuple[tuple[float, ...], tuple[Any, ...]], ...]:
    seed, n, steps, rate, samples, widths = key
    case = {"seed": seed, "world_size": n, "samples": samples, "widths": list(widths)}
    parameters = [weight.astype(np.float64) for weight, _ in layers(case)]
    told = []
    for number in range(steps):
        losses, sums = [], [np.zeros_like(each) for each in parameters]
        for rank in range(n):
            inputs, targets = (each.astype(np.float64) for each in batch(case, rank, number))
            zeros = [np.zeros(each.shape[0]) for each in parameters]
            both = [each for pair in zip(parameters, zeros, strict=True) for each in pair]
            loss, found = loss_and_gradients(both, inputs, targets)
            losses.append(loss)
            if whose in (-1, rank):
                sums = [one + two for one, two in zip(sums, found[::2], strict=True)]
        gradients = [factor * each / n for each in sums]
        told.append((tuple(losses), tuple(gradients)))
        parameters = [weight - rate * each for weight, each in zip(parameters, gradients, strict=True)]
    return tuple(told)


def stack(case: Case, factor: float = 1.0, whose: int = -1) -> tuple[tuple[tuple[float, ...], tuple[Any, ...]], ...]:
    """For each step: every rank's loss, and the full gradients, `factor` times the mean over the ranks.

    With `whose`, the gradients are those of that rank alone, divided by N as well.
    """
    key = (
        case["seed"],
        case["world_size"],
        case["steps"],
        case["learning_rate"],
        case["samples"],
        tuple(case["widths"]),
    )
    return _stack(key, factor, whose)
