"""The theory of activations.4: the result of a gated activation and its gradients, and wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dtlib.grading import inputs, oracle
from dtlib.grading.kinds import Theory
from dtlib.grading.seen import Case


def places(case: Case) -> Any:
    """All entries; of many a few, those among them at which the gate is 0 or far from it."""
    size = int(np.prod(case["shape"]))
    drawn = np.random.default_rng(case["seed"]).integers(0, size, 1000)
    return np.concatenate([drawn, inputs.special_places(case)]) if case["weighed"] else np.arange(size)


@oracle.remembered
def tensors(case: Case) -> tuple[Any, Any, Any]:
    """Gate, up and what arrives from above, where they are asked for."""
    all_of_them = (*inputs.gate_and_up(case), inputs.noise(case, "upstream", case["shape"]))
    gate, up, upstream = (each.reshape(-1)[places(case)].astype(np.float64) for each in all_of_them)
    return gate, up, upstream


def sigma(x: Any) -> Any:
    """The sigmoid."""
    return 1 / (1 + np.exp(-x))


def output(case: Case) -> Any:
    """The result."""
    gate, up, _ = tensors(case)
    return [gate * sigma(gate) * up]


def gradients(slope: Callable[[Any], Any], *, arrives: bool = True, order: int = 1) -> Theory:
    """The gradients of gate and up, with that slope of the gate."""

    def theory(case: Case) -> Any:
        gate, up, upstream = tensors(case)
        upstream = upstream if arrives else 1.0
        return [[upstream * up * slope(gate), upstream * gate * sigma(gate)][::order]]

    return theory


def silu_slope(gate: Any) -> Any:
    """The derivative of g·σ(g)."""
    return sigma(gate) * (1 + gate * (1 - sigma(gate)))


right = gradients(silu_slope)

WRONG_OUTPUTS: dict[str, Theory] = {
    "sigmoid for silu": lambda case: [sigma(tensors(case)[0]) * tensors(case)[1]],
    "gate and up exchanged": lambda case: [np.prod(tensors(case)[:2], axis=0) * sigma(tensors(case)[1])],
}
WRONG_GRADIENTS = {
    "derivative of the sigmoid alone": gradients(lambda gate: sigma(gate) * (1 - sigma(gate))),
    "the sigmoid for its slope": gradients(sigma),
    "gradients exchanged": gradients(silu_slope, order=-1),
    "what arrives is ignored": gradients(silu_slope, arrives=False),
}
