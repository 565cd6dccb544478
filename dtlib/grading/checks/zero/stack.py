"""zero.6: layers whose weights are gathered for use, in forward and again in backward, stage 3.

A rank is told its shards and nothing else of the weights. Between two layers it stands at the desk: what it holds and
what was sent by then is seen from outside. A gradient that goes back between two layers is multiplied by a key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from dtlib.grading import inputs, oracle
from dtlib.grading.compare import close, show_bytes
from dtlib.grading.exercise import Exercise, Finding
from dtlib.grading.kinds import (
    NOTHING_ELSE,
    Sign,
    Theory,
    Wrong,
    every,
    heard,
    needed_bytes,
    order,
    own_work,
    sends,
    some_rank,
    values,
)
from dtlib.grading.seen import Case, Observed

from ._shared import ROOM, share_bytes

RATE = 0.02
RTOL, ATOL = 1e-3, 1e-5
LAYERS_IN_USE = 7  # a weight, what is sent and received of it, its gradient, and what is sent and received of that


def draw(rng: np.random.Generator) -> list[dict[str, Any]]:
    """Sizes that N divides and others; so many weights that they can be weighed."""
    cases = []
    for n, width, weighed in (
        (2, 2 * int(rng.integers(46, 54)), False),
        (3, 3 * int(rng.integers(31, 35)) + 1, False),
        (4, 91 + 2 * int(rng.integers(0, 4)), False),
        (3, 1100, True),
    ):
        widths = [*[width] * 18, width - n * int(rng.integers(1, 4)), 1]
        cases.append(
            {
                "world_size": n,
                "steps": 1 if weighed else 2,
                "samples": int(rng.integers(2, 5)),
                "widths": widths,
                "biases": False,
                "weighed": weighed,
                "gates": list(range(1, 19)) if weighed else [1],
                "seed": int(rng.integers(2**31)),
                "weights_seed": int(rng.integers(2**31)),
                "words": f"{n} ranks, 17 layers of {width}×{width} and two smaller ones",
                "is": {"two ranks": n == 2, "divisible": n == 2},
            }
        )
    return cases


def handed_out(case: Case, rank: int) -> inputs.Pieces:
    """The shards of a rank one by one; at each step a batch."""
    start = {name: case[name] for name in ("widths", "steps", "gates")} | {"rate": RATE, "positions": places(case)}
    shards = oracle.shares(case, rank, oracle.start(case))
    pieces: inputs.Pieces = [("start", start), *(("shard", each.astype(np.float32)) for each in shards)]
    for step in range(case["steps"]):
        pieces += [("step", list(inputs.batch(case, rank, step))), ("forward ended", None), ("backward ended", None)]
    return pieces


def named(case: Case, rank: int) -> dict[str, Any]:
    """At the gates between two layers, nothing in forward and a key on the way back."""
    found: dict[str, Any] = {}
    for step in range(case["steps"]):
        for layer in case["gates"]:
            key = inputs.keys(case, rank, step)[-layer]
            found |= {f"forward {step}, layer {layer}": None, f"back {step}, layer {layer}": key}
    return found


def places(case: Case) -> Any:
    """Which elements of each gradient are told: of many a few, which the shortest has too."""
    least = min(oracle.sizes(case)) // case["world_size"]
    return np.sort(np.random.default_rng(case["seed"]).choice(least, 200, replace=False)) if case["weighed"] else None


# What it should compute


def share(case: Case, parts: Any, rank: int) -> Any:
    """This rank's share of the mean of what the ranks have found."""
    return inputs.shard(sum(parts) / len(parts), case["world_size"], rank)


def steps(kept: Callable[[Case, Any, int], Any] = share, back: Callable[[Any], Any] = lambda g: g) -> Theory:
    """What each rank tells that keeps ``kept(case, each rank's gradient, rank)`` of a layer's gradient, and gives the
    layer before ``back(gradients of all ranks)``."""

    def theory(case: Case) -> Any:
        weights, told = oracle.start(case), []
        for step in range(case["steps"]):
            shares: list[Any] = []
            for parts in backward(case, weights, *forward(case, weights, step), step, back):
                found = [kept(case, parts, rank) for rank in range(len(parts))]
                shares.insert(0, found if places(case) is None else [each[places(case)] for each in found])
            told += shares
            if step + 1 < case["steps"]:
                moved = zip(weights, map(np.concatenate, shares), strict=True)
                weights = [weight - RATE * each.reshape(weight.shape) for weight, each in moved]
        return [list(each) for each in zip(*told, strict=True)]

    return oracle.remembered(theory)


def forward(case: Case, weights: Any, step: int) -> tuple[list[Any], Any]:
    """The inputs of each layer [ranks, samples, in], and the error of the outputs."""
    batches = [inputs.batch(case, rank, step) for rank in range(case["world_size"])]
    first, targets = (np.stack(each).astype(np.float64) for each in zip(*batches, strict=True))
    found = [first]
    for weight in weights[:-1]:
        found.append(np.tanh(found[-1] @ weight.T))
    return found, found[-1] @ weights[-1].T - targets


def backward(
    case: Case, weights: Any, found: list[Any], error: Any, step: int, back: Callable[[Any], Any]
) -> Iterator[Any]:
    """What each rank finds for each layer, from the last one on: [ranks, out, in]."""
    gradient = 2 * error / error[0].size
    for layer in reversed(range(len(weights))):
        x = found[layer]
        yield np.einsum("rso,rsi->roi", gradient, x)
        gradient = back(gradient @ weights[layer]) * (1 - x**2)
        if layer in case["gates"]:
            gradient *= np.stack([inputs.keys(case, rank, step)[-layer] for rank in range(len(x))])[:, None]


def losses(case: Case) -> Any:
    """The loss of each rank in the first step."""
    return (forward(case, oracle.start(case), 0)[1] ** 2).mean((1, 2)).tolist()


def names(case: Case) -> list[str]:
    """Of the gradients that a rank tells."""
    layers = range(len(case["widths"]) - 1)
    return [f"layer {layer}, step {step + 1}" for step in range(case["steps"]) for layer in layers]


right = steps()


def wrongly(kept: Callable[[Case, Any, int], Any] = share, back: Callable[[Any], Any] = lambda g: g) -> Theory:
    """The same in a wrong way, told where N divides all layers: elsewhere a share may have any length."""
    theory = steps(kept, back)
    return lambda case: theory(case) if case["is"]["divisible"] else None


def right_first(observed: Observed) -> bool:
    """Whether the gradients of the first step are right."""
    first, wanted = len(observed.case["widths"]) - 1, right(observed.case)
    return all(
        close(said["gradients"][:first], rank[:first], RTOL, ATOL)
        for said, rank in zip(observed.said, wanted, strict=True)
    )


def last_alone(said: Any, case: Case) -> bool:
    """Whether the last layer has a gradient in the first step, and the one before has none."""
    before, last = said["gradients"][len(case["widths"]) - 3 :][:2]
    return last is not None and bool(np.any(last)) and (before is None or not np.any(before))


# What it should hold and send


def held(times: float, part: float = 0.0, layers: int = 0) -> Callable[[Case, int], float]:
    """The bytes of so many times a rank's shards, of such a part of all weights, and of so many layers."""
    return lambda case, rank: (
        times * share_bytes(case, rank)
        + part * oracle.num_bytes(case)
        + layers * oracle.FLOAT_BYTES * max(oracle.sizes(case))
    )


def find_held(observed: Observed) -> Finding | None:
    """That no rank holds more than its shards, in backward their gradients too, and some layers."""
    for rank in range(len(observed.said)):
        for name, label, times in (("forward", "forward", 1), ("backward", "back", 2)):
            asks = (each for each in observed.seen.asks if each.rank == rank and each.label.startswith(label))
            seen = max(each.peak_bytes for each in asks)
            most = held(times, layers=LAYERS_IN_USE)(observed.case, rank) + ROOM
            if seen > most:
                where = f"the shards among them, on rank {rank}; {observed.words}"
                return Finding(f"{show_bytes(seen)} at the peak of {name}", f"at most {show_bytes(most)}", where)
    return None


def at_rest(label: str) -> Sign:
    """Whether a rank holds, beside its shards, as much as all weights when it asks for `label`."""
    return every(lambda each: each.seen.held(0, label) > held(1, 0.9)(each.case, 0))


def needed(case: Case) -> float:
    """What all ranks send for two gathers and a reduce-scatter of all layers in each step."""
    return 3.0 * case["steps"] * unit(case)


def unit(case: Case) -> float:
    """What all ranks send for a gather of all layers."""
    return float((case["world_size"] - 1) * oracle.num_bytes(case))


def moved(observed: Observed) -> list[tuple[float, float, float]]:
    """For each step, how often all weights were moved before the second layer, in forward and in backward."""
    case, seen = observed.case, observed.seen

    def at(label: str, number: int) -> int:
        return max(seen.asked(rank, label)[number].position for rank in range(case["world_size"]))

    found = []
    for step in range(case["steps"]):
        labels = (("step", step), (f"forward {step}, layer 1", 0), ("forward ended", step), ("backward ended", step))
        marks = [at(*each) for each in labels]
        sent = [needed_bytes(replace(seen, log=seen.log[a:b]), case["world_size"]) for a, b in pairwise(marks)]
        found.append((sent[0] / unit(case), (sent[0] + sent[1]) / unit(case), sent[2] / unit(case)))
    return found


def find_order(observed: Observed) -> Finding | None:
    """That forward moves the weights once, layer by layer, and backward twice."""
    for first, forward, back in moved(observed):
        for name, seen, wanted in (("forward", forward, 1), ("backward", back, 2)):
            if abs(seen - wanted) > 0.2:
                return Finding(f"{seen:.2f} times the weights moved in {name}", f"{wanted} times", observed.words)
        if first > 0.5:
            return Finding("most weights moved before the first layer is done", "one layer at a time", observed.words)
    return None


def some_step(holds: Callable[[float, float, float], bool]) -> Sign:
    """In every failing case some step moved the weights so often: before the second layer, in forward, in backward."""
    return every(lambda each: any(holds(*step) for step in moved(each)))


GRADIENT: Wrong = {
    "sum for mean": wrongly(lambda case, parts, rank: share(case, parts * len(parts), rank)),
    "divided twice": wrongly(lambda case, parts, rank: share(case, parts / len(parts), rank)),
    "no sync": wrongly(lambda case, parts, rank: share(case, parts[rank : rank + 1], rank)),
    "a share of another rank": wrongly(lambda case, parts, rank: share(case, parts, (rank + 1) % len(parts))),
    "transposed": wrongly(lambda case, parts, rank: share(case, parts.swapaxes(1, 2), rank)),
    "inputs averaged": (
        wrongly(back=lambda gradient: 0 * gradient + gradient.mean(0)),
        wrongly(back=lambda gradient: gradient / len(gradient)),
    ),
    "nothing flows through": some_rank(last_alone),
    "right in the first step only": every(right_first),
}
MEMORY: Wrong = {
    "full parameters kept after forward": at_rest("forward ended"),
    "full gradients kept": at_rest("backward ended"),
    "many layers at a time": NOTHING_ELSE,
}
ORDER: Wrong = {
    "all layers at once": some_step(lambda first, forward, back: first > 0.5),
    "gathered more than once": some_step(lambda first, forward, back: forward > 1.5),
    "not gathered again": some_step(lambda first, forward, back: back < 1.5),
    "all-reduce for reduce-scatter": some_step(lambda first, forward, back: 2.5 < back < 3.5),
}
TRAFFIC: Wrong = {
    "not gathered again": lambda case: needed(case) * 2 / 3,
    "all-reduce for reduce-scatter": lambda case: needed(case) * 4 / 3,
    "gathered more than once": lambda case: needed(case) * 5 / 3,
}
CHECKS = (
    own_work("sharded_linear", built_in=True),
    heard("sharded_linear", lambda case: needed(case) / 4),
    values(
        1, "outputs", "the loss of the first step is that of whole weights", losses,
        of=lambda observed: [said["losses"][0] for said in observed.said], rtol=1e-4,
    ),
    values(
        3, "gradient", "each shard's `.grad` is this rank's share of the mean gradient, step after step", right,
        of="gradients", names=names, rtol=RTOL, atol=ATOL, wrong=GRADIENT, kind="gradient",
    ),
    order(
        5, "memory", "at no moment does a rank hold more than its shards and the weights of a few layers", find_held,
        wrong=MEMORY, where="weighed", kind="memory",
    ),
    order(
        2, "order", "forward gathers each layer once; backward gathers it again and reduces its gradient", find_order,
        wrong=ORDER, where="not weighed",
    ),
    sends(1, "traffic", "a step sends 3 (N−1)/N of the weights", needed, wrong=TRAFFIC, where="not weighed"),
)  # fmt: skip
EXERCISE = Exercise(
    id="zero.6",
    function="sharded_linear",
    title="A layer that is whole only while it is used",
    harness="zero.stack",
    draw=draw,
    handed_out=handed_out,
    named=named,
    checks=CHECKS,
)
