"""The gradients of the cases' networks, by hand in numpy: the single process that the ranks must agree with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dtlib.grading.compare import close, compare
from dtlib.grading.drawn import batch, is_frozen, layers
from dtlib.grading.exercise import Case, Finding

Gradients = list[Any]
"""One entry a parameter, in the order of ``model.parameters()``: an array, or None for a frozen one."""


def local_gradients(case: Case, rank: int, number: int) -> Gradients:
    """Of the mean squared error on micro-batch `number` of `rank`, in double precision."""
    inputs, targets = (each.astype(np.float64) for each in batch(case, rank, number))
    parameters = [(weight.astype(np.float64), bias.astype(np.float64)) for weight, bias in layers(case)]
    outputs = [inputs]
    for layer, (weight, bias) in enumerate(parameters):
        before_tanh = outputs[-1] @ weight.T + bias
        outputs.append(before_tanh if layer == len(parameters) - 1 else np.tanh(before_tanh))
    gradient = 2 * (outputs[-1] - targets) / targets.size
    found: Gradients = []
    for layer in reversed(range(len(parameters))):
        weight_gradient, bias_gradient = gradient.T @ outputs[layer], gradient.sum(0)
        found = [
            None if is_frozen(case, layer, "weight") else weight_gradient,
            None if is_frozen(case, layer, "bias") else bias_gradient,
            *found,
        ]
        gradient = gradient @ parameters[layer][0] * (1 - outputs[layer] ** 2)
    return found


def combine(parts: Sequence[Gradients], factor: float = 1.0) -> Gradients:
    """`factor` times the sum of gradients, parameter by parameter."""
    return [None if each[0] is None else factor * sum(each) for each in zip(*parts, strict=True)]


def mean_gradients(case: Case, numbers: Sequence[int]) -> Gradients:
    """The mean over all ranks and over the micro-batches `numbers`: what one process would find on all samples."""
    parts = [local_gradients(case, rank, number) for rank in range(case["world_size"]) for number in numbers]
    return combine(parts, 1 / len(parts))


def trainable_elements(case: Case) -> list[int]:
    """The number of elements of each parameter that takes a gradient, in the order of ``model.parameters()``."""
    sizes = []
    for layer, (weight, bias) in enumerate(layers(case)):
        sizes += [weight.size] * (not is_frozen(case, layer, "weight")) + [bias.size] * (
            not is_frozen(case, layer, "bias")
        )
    return sizes


def num_frozen(case: Case) -> int:
    """The number of elements of the parameters that take no gradient."""
    return sum(weight.size + bias.size for weight, bias in layers(case)) - sum(trainable_elements(case))


def greedy_buckets(sizes_bytes: Sequence[int], bucket_bytes: int) -> list[list[int]]:
    """Sizes in the given order, cut greedily: a bucket closes before it would exceed `bucket_bytes`."""
    buckets: list[list[int]] = []
    for size in sizes_bytes:
        if buckets and sum(buckets[-1]) + size <= bucket_bytes:
            buckets[-1].append(size)
        else:
            buckets.append([size])
    return buckets


# Float32 sums of a few dozen numbers around 1 round by less than 1e-5; known mistakes are off by a factor of 2 or more.
_RTOL, _ATOL = 1e-3, 1e-5


def all_reduce_total(case: Case, num_bytes: float) -> float:
    """What all ranks together send in an all-reduce of `num_bytes` that meets the lower bound."""
    return 2 * (case["world_size"] - 1) * num_bytes


def _names(case: Case) -> list[str]:
    return [f"{2 * layer}.{part}" for layer in range(len(case["widths"]) - 1) for part in ("weight", "bias")]


def compare_gradients(seen: Any, expected: Gradients, case: Case, where: str) -> Finding | None:
    """The first parameter whose gradient is not as expected, by its name in the model."""
    for name, one, two in zip(_names(case), seen, expected, strict=True):
        place = f"gradient of `{name}`, {where}"
        if two is None and one is not None:
            return Finding("a gradient", "None, because the parameter is frozen", place)
        if two is not None and one is None:
            return Finding("None", "a gradient", place)
        finding = None if two is None else compare(one, two, place, _RTOL, _ATOL)
        if finding:
            return finding
    return None


def same_gradients(seen: Any, expected: Gradients) -> bool:
    """Whether every gradient is as expected (frozen parameters aside)."""
    return all(
        two is None or (one is not None and close(one, two, _RTOL, _ATOL))
        for one, two in zip(seen, expected, strict=True)
    )
