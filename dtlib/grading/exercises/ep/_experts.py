"""The single process that has all tokens and all experts: what it gives, forward and backward, by pairs that count."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from dtlib.grading.exercises import inputs, oracle
from dtlib.grading.exercises.seen import Case
from dtlib.grading.exercises.signs import Theory


class Tensors(NamedTuple):
    """Of all ranks: tokens, weights of the choices, the matrices of all experts, and the gradient that comes back."""

    x: Any
    weights: Any
    up: Any
    down: Any
    back: Any


@oracle.remembered
def tensors(case: Case) -> Tensors:
    (h, f), (t, k), told = case["shape"], case["experts"].shape, {**case, "weights_seed": case["seed"]}
    num_experts = case["world_size"] * case["own"]
    shapes = {"x": (t, h), "weights": (t, k), "up": (num_experts, h, f), "down": (num_experts, f, h), "back": (t, h)}
    large = {"up": 3 / h**0.5, "down": 3 / f**0.5}
    found = {name: inputs.noise(told, name, shape, large.get(name, 1.5)) for name, shape in shapes.items()}
    return Tensors(**found | {"weights": np.abs(found["weights"]) + np.float32(0.1)})


def by_tokens(case: Case, whole: Any) -> list[Any]:
    """Of each rank its tokens' part."""
    return np.split(whole, np.cumsum(case["tokens"])[:-1])


# Which pairs of a token and an expert count, [tokens, choices]


def everyone(case: Case) -> Any:
    return np.ones(case["experts"].shape, bool)


def ranks_of(case: Case) -> Any:
    return case["experts"] // case["own"]


def at_home(case: Case) -> Any:
    return ranks_of(case) == np.repeat(np.arange(case["world_size"]), case["tokens"])[:, None]


def one_a_rank(key: Callable[[Case], Any]) -> Callable[[Case], Any]:
    """Of a token's experts on one rank the one with the largest key."""

    def pairs(case: Case) -> Any:
        ranks, mine = ranks_of(case), key(case)
        return ~((ranks[:, :, None] == ranks[:, None]) & (mine[:, :, None] < mine[:, None])).any(2)

    return pairs


first_in_row = one_a_rank(lambda case: -np.cumsum(everyone(case), axis=1))
last_of_rank = one_a_rank(lambda case: case["experts"])


class Found(NamedTuple):
    """The output and the gradients of all tokens, of their weights, and of the experts."""

    output: Any
    to_x: Any
    to_weights: Any
    to_up: Any
    to_down: Any


def found(case: Case, pairs: Callable[[Case], Any], power: int = 1) -> Found:
    """What comes of these pairs, each as often as its weight says."""
    x, weights, up, down, back = (each.astype(np.float64) for each in tensors(case))
    chosen, w = pairs(case), weights**power
    middle = np.tanh(np.einsum("th,tkhf->tkf", x, up[case["experts"]]))
    results = np.einsum("tkf,tkfh->tkh", middle, down[case["experts"]])
    gradient = back[:, None] * (w * chosen)[..., None]
    to_middle = np.einsum("tkh,tkfh->tkf", gradient, down[case["experts"]]) * (1 - middle**2)
    to_up, to_down = np.zeros_like(up), np.zeros_like(down)
    np.add.at(to_up, case["experts"], np.einsum("th,tkf->tkhf", x, to_middle))
    np.add.at(to_down, case["experts"], np.einsum("tkf,tkh->tkfh", middle, gradient))
    to_x = np.einsum("tkf,tkhf->th", to_middle, up[case["experts"]])
    to_weights = np.einsum("th,tkh->tk", back, results) * chosen
    return Found(np.einsum("tkh,tk->th", results, w * chosen), to_x, to_weights, to_up, to_down)


def theory(name: str, pairs: Callable[[Case], Any] = everyone, power: int = 1, n_to: int = 0) -> Theory:
    """Of each rank what is called so, times N to a power."""

    def of(case: Case) -> list[Any]:
        all_ranks, n = found(case, pairs, power), case["world_size"]
        if name == "experts":
            factor = float(n) ** n_to
            ups, downs = (np.split(each * factor, n) for each in (all_ranks.to_up, all_ranks.to_down))
            return [list(each) for each in zip(ups, downs, strict=True)]
        return by_tokens(case, getattr(all_ranks, name) * float(n) ** n_to)

    return oracle.remembered(of)
