"""The single process that ranks must agree with: models and optimizers in numpy, in double precision.

Everything is computed from the case alone (see `inputs`); nothing that came back from a learner's process enters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from .inputs import Case, batch, factor, keys, parameters, shard, use

Tensors = list[Any]
"""One entry a parameter, in the order of ``model.parameters()``; for gradients, None where it is frozen."""
FLOAT_BYTES = 4


def start(case: Case) -> Tensors:
    """The parameters at the start."""
    return list(_start(case["weights_seed"], tuple(case["widths"]), bool(case.get("biases", True))))


@lru_cache(maxsize=4)
def _start(seed: int, widths: tuple[int, ...], biases: bool) -> tuple[Any, ...]:
    case = {"weights_seed": seed, "widths": widths, "biases": biases}
    return tuple(each.astype(np.float64) for each in parameters(case))


def names(case: Case) -> list[str]:
    """What each parameter is called."""
    parts = ("weight", "bias") if case.get("biases", True) else ("weight",)
    return [f"layers.{layer}.{part}" for layer in range(len(case["widths"]) - 1) for part in parts]


def names_of_steps(case: Case) -> list[str]:
    """What the gradients of each step are called, one step after the other."""
    return [f"gradient of {name}, step {step + 1}" for step in range(case["steps"]) for name in names(case)]


def sizes(case: Case, *, trained: bool = False) -> list[int]:
    """The elements of each parameter; of those that take a gradient with `trained`."""
    frozen = case.get("frozen", ()) if trained else ()
    found = []
    for before, after in pairwise(case["widths"]):
        found += [before * after, after] if case.get("biases", True) else [before * after]
    return [size for index, size in enumerate(found) if index not in frozen]


def num_bytes(case: Case, *, trained: bool = False) -> int:
    """Their bytes together."""
    return FLOAT_BYTES * sum(sizes(case, trained=trained))


def gather_bytes(case: Case, *, trained: bool = False) -> float:
    """What all ranks send where each gathers everything, or in a reduce-scatter: half of an all-reduce."""
    return float((case["world_size"] - 1) * num_bytes(case, trained=trained))


def forward(case: Case, at: Sequence[Any], ranks: Sequence[int], number: int) -> tuple[list[Any], Any]:
    """On batch `number` of each of `ranks`: what each place of the model is given, and the error of its outputs."""
    batches = [batch(case, rank, number) for rank in ranks]
    inputs, targets = (np.stack(each).astype(np.float64) for each in zip(*batches, strict=True))
    before_tanh, outputs = inputs, list[Any]()
    for layer in use(case):
        outputs.append(np.tanh(before_tanh) if outputs else inputs)
        weight, *bias = parts_of(case, at, layer)
        before_tanh = outputs[-1] @ weight.T + sum(bias)
    return outputs, before_tanh - targets


def backward(
    case: Case, at: Sequence[Any], ranks: Sequence[int], number: int, back: Callable[[Any], Any] = lambda g: g
) -> Iterator[tuple[int, list[Any]]]:
    """Each layer from the last one used on, and the gradients of its parameters, one a rank: [ranks, ...].

    A layer gives ``back(gradients of all ranks)`` to the one before it.
    """
    outputs, error = forward(case, at, ranks, number)
    gradient = 2 * error / error[0].size
    gates = case.get("gates", range(1, len(outputs)) if case.get("gated") else ())
    locks = [keys(case, rank, number) if gates else [] for rank in ranks]
    for place, layer in reversed(list(enumerate(use(case)))):
        weight, *bias = parts_of(case, at, layer)
        yield layer, [gradient.swapaxes(1, 2) @ outputs[place], *(gradient.sum(1) for _ in bias)]
        gradient = back(gradient @ weight) * (1 - outputs[place] ** 2)
        if place in gates:
            gradient = gradient * np.stack([own[-place] for own in locks])[:, None]


def parts_of(case: Case, tensors: Sequence[Any], layer: int) -> Sequence[Any]:
    """The weight of a layer, and its bias if there are any."""
    parts = 2 if case.get("biases", True) else 1
    return tensors[parts * layer : parts * (layer + 1)]


def loss_and_gradients(case: Case, at: Sequence[Any], rank: int, number: int) -> tuple[float, Tensors]:
    """On batch `number` of `rank`, at the parameters `at`: the mean squared error, and the gradients."""
    found = [np.zeros_like(each) for each in at]
    for layer, gradients in backward(case, at, [rank], number):
        for total, (gradient,) in zip(parts_of(case, found, layer), gradients, strict=True):
            total += gradient
    frozen = case.get("frozen", ())
    loss = float((forward(case, at, [rank], number)[1] ** 2).mean())
    return loss, [None if index in frozen else each for index, each in enumerate(found)]


def combined(parts: Sequence[Tensors], factor: float = 1.0) -> Tensors:
    """`factor` times the sum of gradients, parameter by parameter."""
    return [None if each[0] is None else factor * sum(each) for each in zip(*parts, strict=True)]


def local_gradients(case: Case, rank: int, number: int) -> Tensors:
    """What `rank` finds on batch `number`, at the start."""
    return loss_and_gradients(case, start(case), rank, number)[1]


def mean_gradients(case: Case, numbers: Sequence[int], at: Tensors | None = None) -> Tensors:
    """The mean over all ranks and over the batches `numbers`: what one process would find on all samples."""
    at = start(case) if at is None else at
    parts = [loss_and_gradients(case, at, rank, n)[1] for rank in range(case["world_size"]) for n in numbers]
    return combined(parts, 1 / len(parts))


def shares(case: Case, rank: int, tensors: Tensors) -> Tensors:
    """The share of `rank` in each of `tensors`, flat."""
    return [None if each is None else shard(each, case["world_size"], rank) for each in tensors]


def rescaled(case: Case, tensor: Any, times: int, ranks: Sequence[int] | None = None) -> Any:
    """`tensor` when each rank, or each of `ranks`, has multiplied its share by its first factors."""
    changed = range(case["world_size"]) if ranks is None else ranks
    pieces = np.array_split(np.asarray(tensor, np.float64).reshape(-1), case["world_size"])
    for rank in changed:
        pieces[rank] = pieces[rank] * np.prod([factor(case, rank, number) for number in range(times)])
    return np.concatenate(pieces).reshape(np.shape(tensor))


Update = Callable[[int, Any, Any, dict[str, Any]], Any]
"""(step from 1 on, weight, gradient, state of this weight) -> the new weight."""


def adamw(settings: Case) -> Update:
    """One step of AdamW as torch makes it."""
    rate, (beta1, beta2) = settings["lr"], settings["betas"]

    def update(step: int, weight: Any, gradient: Any, state: dict[str, Any]) -> Any:
        state["first"] = beta1 * state.get("first", 0.0) + (1 - beta1) * gradient
        state["second"] = beta2 * state.get("second", 0.0) + (1 - beta2) * gradient**2
        root = np.sqrt(state["second"] / (1 - beta2**step)) + settings["eps"]
        return weight * (1 - rate * settings["weight_decay"]) - rate * state["first"] / (1 - beta1**step) / root

    return update


def sgd(settings: Case) -> Update:
    """One step of SGD with momentum, Nesterov's or not, and weight decay as torch makes it."""

    def update(step: int, weight: Any, gradient: Any, state: dict[str, Any]) -> Any:
        gradient = gradient + settings["weight_decay"] * weight
        state["buffer"] = gradient if step == 1 else settings["momentum"] * state["buffer"] + gradient
        ahead = gradient + settings["momentum"] * state["buffer"]
        return weight - settings["lr"] * (ahead if settings.get("nesterov") else state["buffer"])

    return update


OPTIMIZERS = {"adamw": adamw, "sgd": sgd}


def trajectory(
    case: Case,
    steps: int,
    gradients_of: Callable[[Tensors, int], Tensors] | None = None,
    *,
    fresh: bool = False,
) -> list[Tensors]:
    """The parameters after each of `steps` steps of the case's optimizer.

    ``gradients_of(parameters, number)`` are those of a step, by default the mean over the ranks; with `fresh` the
    optimizer forgets what it knew before each step.
    """
    update = OPTIMIZERS[case["optimizer"]](case["settings"])
    path, states = [start(case)], [dict[str, Any]() for _ in sizes(case)]
    for number in range(steps):
        now = path[-1]
        found = mean_gradients(case, [number], now) if gradients_of is None else gradients_of(now, number)
        if fresh:
            states = [{} for _ in states]
        step = 1 if fresh else number + 1
        path.append(
            [
                weight if gradient is None else update(step, weight, gradient, state)
                for weight, gradient, state in zip(now, found, states, strict=True)
            ]
        )
    return path[1:]


def flat(tensors: Sequence[Any]) -> Any:
    """All elements end to end."""
    return np.concatenate([np.asarray(each, np.float64).reshape(-1) for each in tensors])


def remembered(theory: Callable[[Case], Any]) -> Callable[[Case], Any]:
    """`theory`, computed once for each case: the same is asked by a check and by its mistakes."""
    known: dict[int, tuple[Case, Any]] = {}

    def told(case: Case) -> Any:
        found = known.get(id(case))
        if found is None or found[0] is not case:
            found = case, theory(case)
            if len(known) > 16:
                known.clear()
            known[id(case)] = found
        return found[1]

    return told
