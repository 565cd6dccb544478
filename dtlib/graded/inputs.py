"""What a case holds, drawn from its seed with numpy: the same for the rank that is told it and for the judge.

A rank is told its own numbers, and nothing from which it could work out those of the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Case = Mapping[str, Any]


Pieces = list[tuple[str, Any]]
"""What is handed out to a rank, one piece after the other, each with a label under which the judge finds it again."""


def arguments(case: Case, rank: int) -> Pieces:
    """What is handed out in an exercise on paper: the arguments of the function."""
    return [("arguments", list(case["arguments"]))]


def values(case: Case, rank: int) -> Pieces:
    """What is handed out in an exercise that gives each rank a tensor: its ``values``, and what all are told."""
    common = {name: case[name] for name in ("src", "op", "max_norm", "pieces") if name in case}
    own = {"num_tokens": case["num_tokens"][rank]} if "num_tokens" in case else {}
    return [("start", {"values": rank_values(case, rank), **common, **own})]


def rank_values(case: Case, rank: int) -> Array:
    """What `rank` holds at the start of a case: ``case["num_elements"]`` float32 numbers.

    They are multiples of 1/8 of moderate size, so that sums of a few hundred of them are exact in any order. A rank
    that has no tokens (``case["num_tokens"]``) has no gradient either: zeros.
    """
    rng = np.random.default_rng([int(case["seed"]), rank])
    drawn = rng.integers(-800, 800, int(case["num_elements"])) / 8
    if case.get("num_tokens", [1] * (rank + 1))[rank] == 0:
        drawn *= 0
    return drawn.astype(np.float32)


def all_values(case: Case) -> Array:
    """`rank_values` of every rank, one row a rank, in double precision."""
    return np.stack([rank_values(case, rank) for rank in range(case["world_size"])]).astype(np.float64)


def shard(tensor: Array, n: int, rank: int) -> Array:
    """The share of `rank` of N in the flat elements of `tensor`: lengths differ by at most one, longer ones first."""
    return np.array_split(tensor.reshape(-1), n)[rank].copy()


# A network of tanh layers with a mean squared error: small enough to differentiate by hand in numpy (see `oracle`).
#
# ``widths`` are those between its layers, ``use`` says in which order they are used (a layer may be used twice), by
# default as they are listed; ``frozen`` are parameters that take no gradient, by their place in the list of all, and
# without ``biases`` there are none. Between two layers that are used one after the other stands a *gate*: the gradient
# that goes back through it is multiplied by a key, which a rank does not have before it asks for it.


def network(case: Case, rank: int, num_batches: int) -> dict[str, Any]:
    """What `rank` is told of its network: all ranks the same weights, each its own batches."""
    return {
        **{name: case[name] for name in ("weights_seed", "widths", "use", "frozen", "biases") if name in case},
        "batches": [list(batch(case, rank, number)) for number in range(num_batches)],
    }


def parameters(case: Case) -> list[Array]:
    """The weight of shape [out, in] and the bias [out] of each layer in turn, or the weights alone, float32."""
    rng = np.random.default_rng([int(case["weights_seed"]), 2**20])
    found = []
    for before, after in pairwise(case["widths"]):
        found.append(rng.standard_normal((after, before), np.float32) / np.float32(np.sqrt(before)))
        if case.get("biases", True):
            found.append(rng.standard_normal(after, np.float32) / np.float32(10))
    return found


def batch(case: Case, rank: int, number: int) -> tuple[Array, Array]:
    """Batch `number` of `rank`: inputs [samples, in] and targets [samples, out], float32."""
    rng = np.random.default_rng([int(case["seed"]), 2**20 + 1, rank, number])
    samples, widths = int(case["samples"]), case["widths"]
    inputs = rng.standard_normal((samples, widths[0])).astype(np.float32)
    return inputs, rng.standard_normal((samples, widths[-1])).astype(np.float32)


def use(case: Case) -> list[int]:
    """The layers in the order in which the network uses them."""
    return list(case.get("use", range(len(case["widths"]) - 1)))


def keys(case: Case, rank: int, number: int) -> list[Array]:
    """The keys of the gates when `rank` goes back through batch `number`, in the order in which it asks for them."""
    rng = np.random.default_rng([int(case["seed"]), 2**20 + 2, rank, number])
    widths = [case["widths"][layer + 1] for layer in use(case)[:-1]]
    return [rng.uniform(0.5, 1.5, width).astype(np.float32) for width in reversed(widths)]


def gates(case: Case, rank: int, number: int) -> Pieces:
    """`keys` as pieces, each under the label ``gate``."""
    return [("gate", key) for key in keys(case, rank, number)]
