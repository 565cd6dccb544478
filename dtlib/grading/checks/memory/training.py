"""What the training steps of the cases should give: gradients by hand, AdamW and rounding to bf16, all in numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from dtlib.grading.exercise import Case, Finding, Run, describe_case
from dtlib.theory.units import format_bytes

Array = np.ndarray[Any, Any]
Tensors = list[Array]
BETAS, EPS = (0.9, 0.99), 1e-3  # those of the harness
_BATCH_SAMPLES = 2


def drawn_case(
    rng: np.random.Generator,
    widths: Sequence[int],
    steps: int,
    *,
    learning_rate: float,
    weight_decay: float,
    words: str,
    order: Sequence[int] | None = None,
    frozen: Sequence[int] = (),
    large: bool = False,
    weights_around: float = 0.0,
) -> dict[str, Any]:
    """A network of tanh layers and its batches; with `weights_around` no weight is much smaller than that."""
    layers = []
    for before, after in pairwise(widths):
        if weights_around:
            sizes = rng.uniform(weights_around, 1.8 * weights_around, (after, before + 1))
            both = sizes * rng.choice([-1.0, 1.0], (after, before + 1))
        else:
            both = rng.standard_normal((after, before + 1)) / np.sqrt(before)
        layers.append([both[:, :-1].astype(np.float32), both[:, -1].astype(np.float32)])
    scale = 0.1 if weights_around else 1.0  # so that no tanh is saturated
    return {
        "layers": layers,
        "order": list(range(len(layers)) if order is None else order),
        "frozen": list(frozen),
        "large": large,
        "learning_rate": learning_rate,
        "weight_decay": weight_decay,
        "inputs": (scale * rng.standard_normal((steps, _BATCH_SAMPLES, widths[0]))).astype(np.float32),
        "targets": (rng.choice([-1.0, 1.0]) * rng.uniform(2, 3, (steps, _BATCH_SAMPLES, 1))).astype(np.float32),
        "words": words,
    }


def start(case: Case) -> Tensors:
    """The weights at the start, in the order of ``model.parameters()``."""
    return [np.asarray(each, np.float64) for layer in case["layers"] for each in layer]


def is_trained(case: Case, index: int) -> bool:
    """Whether the parameter at `index` takes a gradient."""
    return index // 2 not in case["frozen"]


def num_params(case: Case, *, trained: bool = False) -> int:
    """Ψ of the case's network; with `trained` without what is frozen."""
    return sum(each.size for index, each in enumerate(start(case)) if not trained or is_trained(case, index))


def largest_bytes(case: Case) -> int:
    """Bytes of the largest parameter in fp32."""
    return 4 * max(each.size for each in start(case))


def gradients(case: Case, weights: Tensors, step: int) -> Tensors:
    """Of the mean squared error on batch `step`; a layer that stands twice in the order has the sum of both."""
    inputs, targets = (np.asarray(case[name][step], np.float64) for name in ("inputs", "targets"))
    order, outputs = case["order"], [inputs]
    for place, number in enumerate(order):
        linear = outputs[-1] @ weights[2 * number].T + weights[2 * number + 1]
        outputs.append(linear if place == len(order) - 1 else np.tanh(linear))
    found = [np.zeros_like(each) for each in weights]
    gradient = 2 * (outputs[-1] - targets) / targets.size
    for place in reversed(range(len(order))):
        number = order[place]
        found[2 * number] += gradient.T @ outputs[place]
        found[2 * number + 1] += gradient.sum(0)
        gradient = gradient @ weights[2 * number] * (1 - outputs[place] ** 2)
    return found


class AdamW:
    """AdamW as torch has it, in double precision."""

    def __init__(self, case: Case) -> None:
        self.rate, self.decay = case["learning_rate"], case["weight_decay"]
        self.steps = 0
        self.first: dict[int, Array] = {}
        self.second: dict[int, Array] = {}

    def step(self, weights: Tensors, found: Tensors, trained: Sequence[int]) -> Tensors:
        """The weights after a step with the gradients `found`; those not in `trained` stay."""
        self.steps += 1
        one, two = BETAS
        after = list(weights)
        for index in trained:
            gradient = np.asarray(found[index], np.float64)
            self.first[index] = one * self.first.get(index, 0.0) + (1 - one) * gradient
            self.second[index] = two * self.second.get(index, 0.0) + (1 - two) * gradient**2
            mean = self.first[index] / (1 - one**self.steps)
            size = np.sqrt(self.second[index] / (1 - two**self.steps)) + EPS
            after[index] = weights[index] * (1 - self.rate * self.decay) - self.rate * mean / size
        return after


def bf16(values: Array) -> Array:
    """`values` rounded to bf16 by way of fp32: to nearest, ties to even."""
    bits = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32).view(np.float32).astype(np.float64)


def half_step(values: Array) -> Array:
    """The furthest that a number near `values` can be from the nearest one of bf16, which has 8 significant bits."""
    _, exponent = np.frexp(np.abs(np.asarray(values, np.float64)))
    return np.ldexp(1.0, exponent - 9)


# What was held, and what to say about it


def rest_bytes(data: Mapping[str, Any]) -> int:
    """The bytes that were held after the last step, by all kinds together."""
    return sum(data["rest"][-1].values())


def aside_bytes(data: Mapping[str, Any], case: Case) -> int:
    """The bytes that Python and numpy held beside torch's tensors, where that is more than they need for themselves."""
    most = data["python_bytes"]
    return int(most) if most > 1.5 * num_params(case) else 0


def inspect_bytes(seen: float, most: float, least: float, case: Case, when: str) -> Finding | None:
    """That bytes are between two bounds; else how many there are for each parameter."""
    if least <= seen <= most:
        return None
    count, bound, words = num_params(case), most if seen > most else least, "at most" if seen > most else "at least"
    return Finding(
        f"{seen / count:.1f} bytes a parameter {when} ({format_bytes(seen)})",
        f"{words} {bound / count:.1f}",
        describe_case(case),
    )


def inspect_aside(run: Run) -> Finding | None:
    """That nothing of size was kept where torch does not count."""
    aside = aside_bytes(run.ranks[0], run.case)
    if not aside:
        return None
    return Finding(
        f"{format_bytes(aside)} of numpy arrays or Python objects",
        "nothing but torch's tensors",
        describe_case(run.case),
    )
