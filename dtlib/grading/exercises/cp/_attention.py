"""Attention of tokens that lie split over ranks, in numpy and double precision, and ways to get it wrong."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from dtlib.grading.exercises import inputs, oracle
from dtlib.grading.exercises.seen import Case


def case(
    rng: inputs.Rng, lengths: list[int], *, causal: bool, largest: float = 1.5, shape: Sequence[int] = (),
    weighed: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Ranks with so many tokens each, their queries as large as that."""
    n = len(lengths)
    num_heads, width = shape or (int(rng.integers(2, 4)), int(rng.integers(12, 20)))
    words = f"{n} ranks with {', '.join(map(str, lengths))} tokens, {num_heads} heads of {width}"
    words += ", causal" * causal + ", large scores" * (largest > 2)
    told = {"two ranks": n == 2, "equal lengths": len(set(lengths)) == 1, "causal": causal, "small scores": largest < 2}
    drawn = {name: int(rng.integers(2**31)) for name in ("seed", "weights_seed")}
    more = {"lengths": lengths, "causal": causal, "factor": largest, "heads": num_heads, "width": width}
    return drawn | more | {"world_size": n, "weighed": weighed, "words": words, "is": told}


def in_front(lengths: list[int]) -> list[int]:
    """The longest in front: places from rank times the own length then overlap, and are in another order. Of four the
    shortest: places from rank times the first length overlap as well."""
    first = min(lengths) if len(lengths) == 4 else max(lengths)
    return sorted(lengths, key=lambda each: each != first)


def given(case: Case, rank: int) -> dict[str, Any]:
    """What a rank is told."""
    seed = int(np.random.default_rng([case["seed"], rank]).integers(2**62))
    shape = [case["heads"], case["lengths"][rank], case["width"]]
    common = {name: case[name] for name in ("lengths", "causal", "factor")}
    return {"own_seed": seed, "shape": shape, "positions": None, **common}


def starts(case: Case) -> list[int]:
    """The place of each rank's first token."""
    return [0, *accumulate(case["lengths"])][:-1]


@oracle.remembered
def tensors(case: Case) -> list[list[Any]]:
    """Of each rank q, k, v and the gradient that comes back."""
    ranks = range(case["world_size"])
    return [[each.astype(float) for each in inputs.heads(given(case, rank), "qkvg")] for rank in ranks]


def seen(case: Case, rank: int, block: int) -> Any:
    """Which keys of a rank's block which queries of `rank` see: those at their place and before it."""
    return local(case, rank, block, starts(case)[rank], starts(case)[block])


def in_all(case: Case, rank: int, block: int) -> Any:
    """What they would see if all cases were causal."""
    return seen({**case, "causal": True}, rank, block)


def local(case: Case, rank: int, block: int, first: int = 0, first_key: int = 0) -> Any:
    """The same with places counted from these, on each rank from 0."""
    queries, keys = first + np.arange(case["lengths"][rank]), first_key + np.arange(case["lengths"][block])
    return keys <= queries[:, None] if case["causal"] else np.ones((len(queries), len(keys)), bool)


class Part(NamedTuple):
    """What one block gives: the mean of its values, its log-sum, its largest score (0 where nothing is seen)."""

    output: Any
    log_sum: Any
    largest: Any


def part(case: Case, rank: int, block: int, rows: Any, mask: Any = seen, power: float = -0.5) -> Part:
    """Of some queries of `rank`, all for None."""
    q, (_, k, v, _) = tensors(case)[rank][0], tensors(case)[block]
    visible = mask(case, rank, block)
    if rows is not None:
        q, visible = q[:, rows], visible[rows]
    scores = np.where(visible, q @ k.swapaxes(1, 2) * case["width"] ** power, -np.inf)
    largest = scores.max(-1, initial=-np.inf)
    largest = np.where(np.isfinite(largest), largest, 0)
    exponentials = np.exp(scores - largest[..., None])
    total = exponentials.sum(-1)
    with np.errstate(divide="ignore"):
        log_sum = largest + np.log(total)
    return Part(exponentials @ v / np.where(total, total, 1)[..., None], log_sum, largest)


Merge = Callable[[list[Part]], Any]


def merged(parts: list[Part]) -> Any:
    """One softmax over all blocks."""
    log_sums = np.stack([each.log_sum for each in parts])
    largest = log_sums.max(0)
    weights = np.exp(log_sums - np.where(np.isfinite(largest), largest, 0))
    return weighted(parts, weights / np.where(weights.sum(0), weights.sum(0), 1))


def weighted(parts: list[Part], weights: Any) -> Any:
    """The blocks' outputs with these weights, one for each block and query."""
    return sum(own[..., None] * each.output for own, each in zip(weights, parts, strict=True))


def averaged(parts: list[Part]) -> Any:
    """Each block weighs as much."""
    return weighted(parts, [np.ones_like(each.log_sum) / len(parts) for each in parts])


def averaged_of_seen(parts: list[Part]) -> Any:
    """Each block of which a query sees something weighs as much."""
    here = np.stack([np.isfinite(each.log_sum) for each in parts])
    return weighted(parts, here / np.maximum(here.sum(0), 1))


def own_largest(parts: list[Part]) -> Any:
    """Each block's exponentials are shifted by its own largest score."""
    sums = np.stack([np.exp(each.log_sum - each.largest) for each in parts])
    return weighted(parts, sums / np.where(sums.sum(0), sums.sum(0), 1))


@oracle.remembered
def whole(case: Case) -> list[tuple[Any, Any]]:
    """Of each rank the output for its queries, and their log-sum."""
    found = []
    for rank in range(case["world_size"]):
        parts = [part(case, rank, block, None) for block in range(case["world_size"])]
        found.append((merged(parts), np.logaddexp.reduce([each.log_sum for each in parts])))
    return found


class Back(NamedTuple):
    """What the queries of one rank and the keys of one block bring to the gradients of q, k and v."""

    to_q: Any
    to_k: Any
    to_v: Any


def back(
    case: Case, rank: int, block: int, *, mask: Any = seen, inner: float = 1.0, power: float = -0.5, own: bool = False
) -> Back:
    """With so many times the inner product of output and gradient, and a softmax over all blocks or the `own` one."""
    (q, _, _, gradient), (_, k, v, _), (output, log_sum) = tensors(case)[rank], tensors(case)[block], whole(case)[rank]
    if own:
        log_sum = part(case, rank, block, None).log_sum
    scores = q @ k.swapaxes(1, 2) * case["width"] ** -0.5
    visible = mask(case, rank, block)
    shifted = np.where(visible, scores, -np.inf) - np.where(np.isfinite(log_sum), log_sum, 0)[..., None]
    weights = np.exp(np.minimum(shifted, 80))  # a key that must not be seen may weigh anything
    slope = gradient @ v.swapaxes(1, 2) - inner * (gradient * output).sum(-1, keepdims=True)
    to_scores = weights * slope * case["width"] ** power
    return Back(to_scores @ k, to_scores.swapaxes(1, 2) @ q, weights.swapaxes(1, 2) @ gradient)
