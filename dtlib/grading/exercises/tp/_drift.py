"""A run in small: ranks that share two matrices, each with copies of a scale in front and of keys, in numpy.

Shapes: t ranks, n tokens, h wide, m entries of a rank's middle, d of a head of keys. As in the chapter, and to be got
wrong in three ways.
"""

from typing import Any, NamedTuple

import numpy as np

from dtlib.grading.exercises.inputs import Rng

BACKWARD, KEYS, BIAS = "no sum in backward", "keys not summed", "bias in each part"
STEPS, RATE = 8, 1.0


class Drift(NamedTuple):
    """The losses, and by how much copies of the scale and of shared keys differ at the end."""

    losses: list[float]
    norms_apart: float
    keys_apart: float


def train(rng: Rng, t: int, kv_heads: int, mistake: str, *, goes_on: bool) -> Drift:
    """A few steps of gradient descent on t ranks. Without a mistake they are those of one rank that has all."""
    n, h, m, d = 24, 8, 6, 4
    group = np.arange(t) * min(kv_heads, t) // t  # of a rank, by the head of keys that it has
    x, target = rng.standard_normal((2, n, h))
    first, second = rng.standard_normal((t, h, m)) / h**0.5, rng.standard_normal((t, m, h)) / (t * m) ** 0.5
    keys, queries = rng.standard_normal((t, h, d))[group] / h**0.5, rng.standard_normal((t, d, m)) / d**0.5
    scale, bias = np.ones((t, 1, h)), goes_on * rng.standard_normal(h) / 2
    losses = []
    for _ in range(STEPS):
        inputs = x * scale
        key = inputs @ keys
        middle = np.tanh(inputs @ first + key @ queries)
        error = (middle @ second).sum(0) + (t if mistake == BIAS else 1) * bias - target
        losses.append(float((error**2).mean()))
        back = 2 * error / error.size
        to_middle = (back @ turned(second)) * (1 - middle**2)
        to_key = to_middle @ turned(queries)
        to_inputs = to_middle @ turned(first) + to_key @ turned(keys)
        if mistake != BACKWARD:
            to_inputs = np.repeat(to_inputs.sum(0, keepdims=True), t, 0)
        to_keys = turned(inputs) @ to_key
        if mistake != KEYS:
            to_keys = np.stack([to_keys[group == mine].sum(0) for mine in group])
        second -= RATE * turned(middle) @ back
        first, queries = first - RATE * turned(inputs) @ to_middle, queries - RATE * turned(key) @ to_middle
        scale, keys = scale - RATE * (x * to_inputs).sum(1, keepdims=True), keys - RATE * to_keys
        bias -= RATE * back.sum(0)
    apart = max(float(np.ptp(keys[group == mine], axis=0).max()) for mine in group)
    return Drift(losses, float(np.ptp(scale, axis=0).max()), apart)


def turned(tensor: Any) -> Any:
    """Rows for columns, of each rank."""
    return tensor.swapaxes(-1, -2)
