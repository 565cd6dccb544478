"""What a case holds, drawn from its seed with numpy: the same for the rank that is told it and for the judge.

A rank is told its own numbers, and nothing from which it could work out those of the others, or what comes later: from
a case's ``seed`` comes what nobody is told beforehand, and what is the same on all ranks from its ``weights_seed``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Rng = np.random.Generator
Case = Mapping[str, Any]
Cases = list[dict[str, Any]]


Pieces = list[tuple[str, Any]]
"""What is handed out to a rank, one piece after the other, each with a label under which the judge finds it again."""


def call(words: str, arguments: Sequence[Any], **properties: bool) -> dict[str, Any]:
    """A case on paper: a call in words, its arguments, and the properties that it has."""
    return {"arguments": list(arguments), "words": words, "is": properties}


def in_any_order(kinds: Sequence[tuple[Any, ...]], case: Callable[..., dict[str, Any]]) -> Callable[[Rng], Cases]:
    """How to draw a case of each kind: ``case(rng, number, *kind)``, numbered from 1 in the order that is drawn."""

    def draw(rng: Rng) -> Cases:
        return [case(rng, number, *kinds[place]) for number, place in enumerate(rng.permutation(len(kinds)), 1)]

    return draw


def in_order(kinds: Sequence[tuple[Any, ...]], case: Callable[..., dict[str, Any]]) -> Callable[[Rng], Cases]:
    """How to draw a case of each kind, in their order: ``case(rng, *kind)``."""
    return lambda rng: [case(rng, *kind) for kind in kinds]


def in_words(run: Mapping[str, Any]) -> str:
    """What a run's dictionary holds, so that a case can be computed by hand; lists of more than 32 entries are cut."""
    return ", ".join(f"{key} = {_in_words(value)}" for key, value in run.items())


def _in_words(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + in_words(value) + "}"
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list):
        return f"[{', '.join(map(_in_words, value[:32]))}{', …' if len(value) > 32 else ''}]"
    return f"{value:.7g}" if isinstance(value, float) else str(value)


def rounded(number: float) -> float:
    """With four digits, as a task tells it."""
    return float(f"{number:.4g}")


def arguments(case: Case, rank: int) -> Pieces:
    """What is handed out in an exercise on paper: the arguments of the function."""
    return [("arguments", list(case["arguments"]))]


SLOW = 2  # times that a rank that is slow to listen is held up when it does


def values(case: Case, rank: int) -> Pieces:
    """What is handed out in an exercise that gives each rank a tensor: its ``values``, and what all are told."""
    common = {name: case[name] for name in ("src", "op", "max_norm", "pieces") if name in case}
    own = {"num_tokens": case["num_tokens"][rank]} if "num_tokens" in case else {}
    slow = SLOW if case.get("slow") == rank else 0
    return [("start", {"values": rank_values(case, rank), "slow": slow, **common, **own}), *[("listens", None)] * slow]


def rank_values(case: Case, rank: int) -> Array:
    """What `rank` holds at the start of a case: ``case["num_elements"]`` float32 numbers.

    They are multiples of 1/8 of moderate size, so that sums of a few hundred of them are exact in any order, flat or in
    rows of ``case["columns"]``. A rank that has no tokens (``case["num_tokens"]``) has no gradient either: zeros.
    """
    rng = np.random.default_rng([int(case["seed"]), rank])
    drawn = rng.integers(-800, 800, int(case["num_elements"])) / 8
    if case.get("num_tokens", [1] * (rank + 1))[rank] == 0:
        drawn *= 0
    return drawn.astype(np.float32).reshape((-1, case["columns"]) if "columns" in case else -1)


def all_values(case: Case) -> Array:
    """`rank_values` of every rank, one row a rank, in double precision."""
    return np.stack([rank_values(case, rank) for rank in range(case["world_size"])]).astype(np.float64)


def shard(tensor: Array, n: int, rank: int) -> Array:
    """The share of `rank` of N in the flat elements of `tensor`: lengths differ by at most one, longer ones first."""
    return np.array_split(tensor.reshape(-1), n)[rank].copy()


def tensors(case: Case) -> list[Array]:
    """Tensors of ``case["shapes"]``, float32, the same on all ranks."""
    rng = np.random.default_rng(int(case["weights_seed"]))
    return [np.asarray(rng.standard_normal(shape, np.float32)) for shape in case["shapes"]]


def factor(case: Case, rank: int, number: int) -> float:
    """By what `rank` multiplies its share the n-th time; nobody knows it before."""
    return float(np.random.default_rng([int(case["seed"]), 2**20 + 3, rank, number]).uniform(0.5, 1.5))


# A model of tanh layers with a mean squared error: small enough to differentiate by hand in numpy (see `oracle`).
#
# ``widths`` are those between its layers, ``use`` says in which order they are used (a layer may be used twice), by
# default as they are listed; ``frozen`` are parameters that take no gradient, by their place in the list of all, and
# without ``biases`` there are none. Between two layers that are used one after the other stands a *gate*: the gradient
# that goes back through it is multiplied by a key, which a rank does not have before it asks for it.


def training(
    rng: np.random.Generator, n: int, widths: Sequence[int], words: str, properties: Mapping[str, bool], **more: Any
) -> dict[str, Any]:
    """A case in which `n` ranks train a model: what all such exercises draw, and `more` of its own."""
    common = {"world_size": n, "samples": int(rng.integers(2, 5)), "widths": list(widths)}
    seeds = {name: int(rng.integers(2**31)) for name in ("seed", "weights_seed")}
    told = {"words": f"{n} ranks, {words}", "is": {"two ranks": n == 2, **properties}}
    return common | seeds | more | told


def model(case: Case, rank: int, num_batches: int) -> dict[str, Any]:
    """What `rank` is told of its model: all ranks the same weights, each its own batches."""
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
    """The layers in the order in which the model uses them."""
    return list(case.get("use", range(len(case["widths"]) - 1)))


def keys(case: Case, rank: int, number: int) -> list[Array]:
    """The keys of the gates when `rank` goes back through batch `number`, in the order in which it asks for them."""
    rng = np.random.default_rng([int(case["seed"]), 2**20 + 2, rank, number])
    widths = [case["widths"][layer + 1] for layer in use(case)[:-1]]
    return [rng.uniform(0.5, 1.5, width).astype(np.float32) for width in reversed(widths)]


def gates(case: Case, rank: int, number: int) -> Pieces:
    """`keys` as pieces, each under the label ``gate``."""
    return [("gate", key) for key in keys(case, rank, number)]


def given_gradient(told: tuple[int, int], index: int, shape: tuple[int, ...]) -> Array:
    """A gradient that is given rather than computed, of parameter `index`, in 64ths: whole numbers from `told`'s second
    one to 127, which every format has. The first is a seed."""
    seed, lowest = told
    return np.random.default_rng([int(seed), 2**20 + 3, index]).integers(lowest, 128, shape, np.int8)


# Tensors of activations: of any size, and the same wherever they are made.


def every_so_often(num_elements: int) -> Any:
    """Some thousand places among so many."""
    return np.arange(0, num_elements, max(1, num_elements // 4096))


def noise(case: Case, name: str, shape: Sequence[int], largest: float = 1.0) -> Array:
    """The tensor called `name` of a case: float32 numbers from -largest to `largest`."""
    rng = np.random.default_rng([int(case["weights_seed"]), *name.encode()])
    drawn = rng.random(int(np.prod(shape)), np.float32) - np.float32(0.5)
    drawn *= np.float32(2 * largest)
    return drawn.reshape(shape)


def gate_and_up(case: Case) -> tuple[Array, Array]:
    """Two tensors of ``case["shape"]``. Some entries of the gate are 0, some are far from it (see `special_places`)."""
    gate, up = noise(case, "gate", case["shape"], 4.0), noise(case, "up", case["shape"], 2.0)
    zero, far = np.split(special_places(case), 2)
    gate.reshape(-1)[far] = np.where(far % 2, 100, -100)
    gate.reshape(-1)[zero] = 0
    return gate, up


def special_places(case: Case) -> Array:
    """Where the gate is 0, and then where it is far from it: as many places, of a small tensor none."""
    rng, size = np.random.default_rng([int(case["weights_seed"]), 2**20 + 3]), int(np.prod(case["shape"]))
    return rng.integers(0, size, 2 * min(20, size // 10))


def layer(case: Case, number: int) -> list[Array]:
    """The weights of a layer that is `hidden` wide inside: [hidden, width], [hidden], [width, hidden], [width]."""
    width, hidden = int(case["width"]), int(case["hidden"])
    shapes = ((hidden, width), (hidden,), (width, hidden), (width,))
    named = ((f"layer {number}, {part}", shape) for part, shape in enumerate(shapes))
    return [noise(case, name, shape, (3 / shape[-1]) ** 0.5) for name, shape in named]


def layer_keys(case: Case) -> dict[str, Array]:
    """By what the results of each layer are multiplied, and the gradients that come back to it; not told beforehand."""
    case = {**case, "weights_seed": case["seed"]}
    names = [f"{way} {number}" for number in range(case["layers"]) for way in ("layer", "back")]
    return {name: np.float32(1) + noise(case, name, (int(case["width"]),), 0.5) for name in names}


def logits(given: Mapping[str, Any]) -> Array:
    """A rank's slice of the logits, [tokens, words], made of a seed of its own, around numbers that all ranks have."""
    drawn = noise({"weights_seed": given["own_seed"]}, "logits", (given["tokens"], given["words"]), 4.0)
    drawn += noise(given, "around", (given["tokens"], 1), given["largest"])
    return drawn


def own_tokens(seed: int, shape: Sequence[int]) -> Array:
    """A rank's tokens, [tokens, entries], of a seed of its own; the first is so small that a norm's epsilon counts."""
    x = noise({"weights_seed": seed}, "x", shape, 1.5)
    x[0] *= np.float32(0.02)
    return x


def heads(given: Mapping[str, Any], names: str) -> list[Array]:
    """A rank's tensors of these names, [heads, tokens, entries], made of a seed of its own; q as large as a factor."""
    own = {"weights_seed": given["own_seed"]}
    return [noise(own, name, given["shape"], given["factor"] if name == "q" else 1.5) for name in names]


def words(given: Mapping[str, Any], step: int = -1) -> list[Array]:
    """The bits of a replica's parameters, as whole numbers of ``given["bits"]``, or in what low ones `step` differs
    from the step before: floating-point numbers of either sign between 1/2 and 2, and such they stay."""
    rng, found = np.random.default_rng([int(given["weights_seed"]), 2**20 + 4, step + 1]), []
    for shape, bits in zip(given["shapes"], given["bits"], strict=True):
        low = {16: 7, 32: 23, 64: 52}[bits]  # of the mantissa
        drawn = rng.integers(0, 2 ** (low - 1), int(np.prod(shape)), np.int64)
        if step < 0:
            exponents, signs = rng.integers(0, 2, (2, drawn.size), np.int64)
            drawn += (exponents + 2 ** (bits - low - 2) - 2 << low) - (signs << bits - 1)
        found.append(drawn.astype(f"int{bits}"))
    return found
