"""What a case holds, drawn from its seed with numpy: the same in the ranks that run and in the process that judges."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Case = Mapping[str, Any]


def for_rank(case: Case, rank: int) -> dict[str, Any]:
    """What `rank` is told of a case: its own numbers, and nothing from which it could work out those of the others."""
    told = {name: value for name, value in case.items() if name != "seed"}
    if "num_tokens" in case:
        told["num_tokens"] = case["num_tokens"][rank]
    if "num_elements" in case:
        told["values"] = rank_values(case, rank)
    if "split_shapes" in case:
        told["weights"] = weights(case)
        told["factor"] = factor(rank)
    if case.get("sharded"):
        told["shards"] = [shard(weight, case["world_size"], rank) for weight, _ in layers(case)]
        told["batches"] = [list(batch(case, rank, number)) for number in range(_num_batches(case))]
    elif "widths" in case:
        told["layers"] = [list(layer) for layer in layers(case)]
        told["batches"] = [list(batch(case, rank, number)) for number in range(_num_batches(case))]
    return told


def _num_batches(case: Case) -> int:
    return int(case["micro_batches"] if "micro_batches" in case else case["steps"])


def rank_values(case: Case, rank: int) -> Array:
    """What `rank` holds at the start of a case: ``case["num_elements"]`` float32 numbers.

    They are multiples of 1/8 of moderate size, so that sums of a few hundred of them are exact in any order. A rank
    that has no tokens (``case["num_tokens"]``) has no gradient either: zeros.
    """
    rng = np.random.default_rng([int(case["seed"]), rank])
    values = rng.integers(-800, 800, int(case["num_elements"])) / 8
    if case.get("num_tokens", [1] * (rank + 1))[rank] == 0:
        values *= 0
    return values.astype(np.float32)


def all_values(case: Case) -> Array:
    """`rank_values` of every rank, one row a rank, in double precision."""
    return np.stack([rank_values(case, rank) for rank in range(case["world_size"])]).astype(np.float64)


def weights(case: Case) -> list[Array]:
    """The parameters of a case with ``"split_shapes"``, the same on every rank: float32 multiples of 1/8."""
    rng = np.random.default_rng([int(case["seed"]), 2**20 + 2])
    return [(rng.integers(-800, 800, shape) / 8).astype(np.float32) for shape in case["split_shapes"]]


def factor(rank: int) -> float:
    """By what `rank` multiplies its shard before the parameters are gathered again."""
    return float(rank + 2)


def shard(tensor: Array, n: int, rank: int) -> Array:
    """The share of `rank` of N in the flat elements of `tensor`: lengths differ by at most one, longer ones first."""
    return np.array_split(tensor.reshape(-1), n)[rank].copy()


# A network of tanh layers with one output and a mean squared error: small enough to differentiate by hand in numpy.


def layers(case: Case) -> list[tuple[Array, Array]]:
    """(weight of shape [out, in], bias of shape [out]) of each layer of the case's network, float32."""
    rng = np.random.default_rng([int(case["seed"]), 2**20])
    widths = case["widths"]
    return [
        (
            (rng.standard_normal((after, before)) / np.sqrt(before)).astype(np.float32),
            (rng.standard_normal(after) / 10).astype(np.float32),
        )
        for before, after in pairwise(widths)
    ]


def batch(case: Case, rank: int, number: int) -> tuple[Array, Array]:
    """Micro-batch `number` of `rank`: inputs [samples, in] and targets [samples, 1], float32."""
    rng = np.random.default_rng([int(case["seed"]), 2**20 + 1, rank, number])
    samples = int(case["samples"])
    inputs = rng.standard_normal((samples, case["widths"][0])).astype(np.float32)
    return inputs, rng.standard_normal((samples, 1)).astype(np.float32)


def is_frozen(case: Case, layer: int, part: str) -> bool:
    """Whether the ``"weight"`` or ``"bias"`` of a layer takes no gradient: layer 0's weight where the case says so."""
    return bool(case.get("frozen", False)) and layer == 0 and part == "weight"
