"""zero.6: layers whose weights are gathered for use, in forward and again in backward, stage 3.

A rank is told its shards and nothing else of the weights. Between two layers it stands at the desk: what it holds and
what was sent by then is seen from outside. A gradient that goes back between two layers is multiplied by a key.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from dtlib.grading.exercises import inputs, kinds, oracle, signs
from dtlib.grading.exercises.compare import show_bytes
from dtlib.grading.exercises.exercise import EARLY, Exercise, Finding
from dtlib.grading.exercises.seen import Case, Observed

from ._shared import positions, share_bytes

RATE = 0.02
RTOL, ATOL = 1e-3, 1e-5
LAYERS_IN_USE = 7  # a weight, what is sent and received of it, its gradient, and what is sent and received of that


def draw(rng: inputs.Rng) -> inputs.Cases:
    """Sizes that N divides and others; two backwards before one update; so many weights that each can be weighed, and
    in each case a last layer, which is used again at once, whose bytes are seen."""
    cases = []
    for n, width, weighed in (
        (2, 2 * int(rng.integers(46, 54)), False),
        (3, 3 * int(rng.integers(31, 35)) + 1, False),
        (4, 4 * int(rng.integers(23, 26)), False),
        (3, 1450, True),
    ):
        large, last = (13, width) if weighed else (5, width // 2)
        widths = [*[width] * (large + 1), width - n * int(rng.integers(1, 4)), last]
        adds = n == 4
        words = f"{large} layers of {width}×{width} and two smaller ones{', no update in between' * adds}"
        own = {"steps": 1, "gates": list(range(1, large + 2))} if weighed else {"steps": 2, "gates": [1]}
        own |= {"biases": False, "weighed": weighed, "adds": adds}
        cases.append(inputs.training(rng, n, widths, words, {"divisible": n != 3, "no gradients yet": not adds}, **own))
    return cases


def handed_out(case: Case, rank: int) -> inputs.Pieces:
    """The shards of a rank one by one; at each step a batch."""
    start = {name: case[name] for name in ("widths", "steps", "gates", "adds")} | {
        "rate": RATE,
        "positions": places(case),
    }
    shards = oracle.shares(case, rank, oracle.start(case))
    pieces: inputs.Pieces = [("start", start), *(("shard", each.astype(np.float32)) for each in shards)]
    for step in range(case["steps"]):
        pieces += [("step", list(inputs.batch(case, rank, step))), ("forward ended", None), ("backward ended", None)]
    return pieces


def named(case: Case, rank: int) -> dict[str, Any]:
    """At the gates between two layers, nothing in forward and a key on the way back."""
    gates = [(step, layer) for step in range(case["steps"]) for layer in case["gates"]]
    keys = {f"back {step}, layer {layer}": inputs.keys(case, rank, step)[-layer] for step, layer in gates}
    return {f"forward {step}, layer {layer}": None for step, layer in gates} | keys


def places(case: Case) -> Any:
    """Which elements of each gradient are told: of many a few, which the shortest has too."""
    return positions(case, min(oracle.sizes(case)) // case["world_size"]) if case["weighed"] else None


# What it should compute


def share(case: Case, parts: Any, rank: int) -> Any:
    return inputs.shard(parts.mean(0), case["world_size"], rank)


def steps(
    kept: Callable[[Case, Any, int], Any] = share,
    back: Callable[[Any], Any] = lambda gradient: gradient,
    told: Callable[[Case], bool] = lambda case: case["is"]["divisible"],
) -> signs.Theory:
    """What each rank tells that keeps ``kept(case, each rank's gradient, rank)`` of a layer's gradient, and gives the
    layer before ``back(gradients of all ranks)``.

    What is wrong is told where N divides all layers: elsewhere a share may have any length.
    """

    def theory(case: Case) -> Any:
        weights, found, before = oracle.start(case), list[Any](), list[Any]()
        ranks = range(case["world_size"])
        for step in range(case["steps"] if told(case) else 0):
            shares: list[Any] = []
            for _, (parts,) in oracle.backward(case, weights, ranks, step, back):
                each = [kept(case, parts, rank) for rank in ranks]
                shares.insert(0, each if places(case) is None else [one[places(case)] for one in each])
            if case["adds"] and before:
                shares = [[a + b for a, b in zip(*both, strict=True)] for both in zip(before, shares, strict=True)]
            found, before = found + shares, shares
            if step + 1 < case["steps"] and not case["adds"]:
                moved = zip(weights, map(np.concatenate, shares), strict=True)
                weights = [weight - RATE * gradient.reshape(weight.shape) for weight, gradient in moved]
        return [list(each) for each in zip(*found, strict=True)] or None

    return oracle.remembered(theory)


right = steps(told=lambda case: True)


def losses(case: Case) -> Any:
    return (oracle.forward(case, oracle.start(case), range(case["world_size"]), 0)[1] ** 2).mean((1, 2)).tolist()


def last_alone(said: Any, case: Case) -> bool:
    """Whether the last layer has a gradient in the first step, and the one before has none."""
    before, last = said["gradients"][len(case["widths"]) - 3 :][:2]
    return last is not None and bool(np.any(last)) and (before is None or not np.any(before))


# What it should hold and send

ASKED_EARLY = kinds.showed("forward ended", "backward ended")


def find_held(observed: Observed) -> Finding | None:
    """That no rank holds more than its shards, in backward their gradients too, and some layers; when it ends, none."""
    for rank in range(len(observed.said)):
        if ASKED_EARLY(observed, rank):
            return kinds.asked_early(f"on rank {rank}; {observed.words}")
    if found := find_peak(observed):
        return found
    for rank in range(len(observed.said)):
        for name, times in (("forward", 1), ("backward", 2)):
            most = times * share_bytes(observed.case, rank) + kinds.ROOM
            seen = observed.seen.held(rank, f"{name} ended")
            if seen > most:
                where = f"the shards among them, on rank {rank}; {observed.words}"
                return Finding(f"{show_bytes(seen)} when {name} has ended", f"at most {show_bytes(most)}", where)
    return None


def find_peak(observed: Observed) -> Finding | None:
    for rank in range(len(observed.said)):
        for name, label, times in (("forward", "forward", 1), ("backward", "back", 2)):
            asks = (each for each in observed.seen.asks if each.rank == rank and each.label.startswith(label))
            seen, layer = max(each.peak_bytes for each in asks), oracle.FLOAT_BYTES * max(oracle.sizes(observed.case))
            most = times * share_bytes(observed.case, rank) + LAYERS_IN_USE * layer + kinds.ROOM
            if seen > most:
                where = f"the shards among them, on rank {rank}; {observed.words}"
                return Finding(f"{show_bytes(seen)} at the peak of {name}", f"at most {show_bytes(most)}", where)
    return None


def at_rest(label: str) -> signs.Sign:
    """Whether a rank holds, beside its shards, as much as all weights when it asks for `label`."""
    return signs.every(
        lambda each: each.seen.held(0, label) > share_bytes(each.case, 0) + 0.9 * oracle.num_bytes(each.case)
    )


def needed(case: Case) -> float:
    return 3 * case["steps"] * oracle.gather_bytes(case)


def moved(observed: Observed) -> list[tuple[float, float, float]]:
    """For each step, how often all weights were moved before the second layer, in forward and in backward."""
    seen, n, found = observed.seen, observed.case["world_size"], []

    def sent_by(label: str, number: int) -> float:
        position = max(seen.asked(rank, label)[number].position for rank in range(n))
        return kinds.needed_bytes(replace(seen, log=seen.log[:position]), n) / oracle.gather_bytes(observed.case)

    for step in range(observed.case["steps"]):
        start, forward = sent_by("step", step), sent_by("forward ended", step)
        first = sent_by(f"forward {step}, layer 1", 0)
        found.append((first - start, forward - start, sent_by("backward ended", step) - forward))
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


def some_step(holds: Callable[[float, float, float], bool]) -> signs.Sign:
    """In every failing case some step moved the weights so often: before the second layer, in forward, in backward."""
    return signs.every(lambda each: any(holds(*step) for step in moved(each)))


def all_reduced(each: Observed) -> bool:
    """Whether backward, and it alone, moved the weights once too often, and something was all-reduced."""
    once_more = any(forward < 1.5 and 2.5 < back < 3.5 for _, forward, back in moved(each))
    return once_more and "all_reduce" in dict(each.seen.collectives())


GRADIENT: signs.Wrong = {
    "sum for mean": steps(lambda case, parts, rank: share(case, parts * len(parts), rank)),
    "divided twice": steps(lambda case, parts, rank: share(case, parts / len(parts), rank)),
    "no sync": steps(lambda case, parts, rank: share(case, parts[rank : rank + 1], rank)),
    "a share of another rank": steps(lambda case, parts, rank: share(case, parts, (rank + 1) % len(parts))),
    "transposed": steps(lambda case, parts, rank: share(case, parts.swapaxes(1, 2), rank)),
    "inputs averaged": (
        steps(back=lambda gradient: 0 * gradient + gradient.mean(0)),
        steps(back=lambda gradient: gradient / len(gradient)),
    ),
    "nothing flows through": signs.some_rank(last_alone),
    "earlier gradients are gone": signs.only_if("no gradients yet"),
    "right in the first step only": signs.first_step("gradients", right, RTOL, ATOL),
}
MEMORY: signs.Wrong = {
    EARLY: signs.NEVER,
    "full parameters kept after forward": at_rest("forward ended"),
    "full gradients kept": at_rest("backward ended"),
    "the last layers stay": signs.every(lambda each: find_peak(each) is None),
    "many layers at a time": signs.NOTHING_ELSE,
}
ORDER: signs.Wrong = {
    "all layers at once": some_step(lambda first, forward, back: first > 0.5),
    "gathered more than once": some_step(lambda first, forward, back: forward > 1.5 or back > 2.5),
    "not gathered again": (
        some_step(lambda first, forward, back: back < 1.5),
        signs.every(lambda each: find_order(each) is None and each.seen.total_bytes < needed(each.case)),
    ),
    "all-reduce for reduce-scatter": signs.every(all_reduced),
}
CHECKS = (
    kinds.own_work("sharded_linear", built_in=True),
    kinds.heard("sharded_linear", lambda case: needed(case) / 4),
    kinds.values(
        1, "outputs", "the loss of the first step is that of whole weights", losses,
        of=lambda observed: [said["losses"][0] for said in observed.said], rtol=1e-4,
    ),
    kinds.values(
        3, "gradient", "each shard's `.grad` is this rank's share of the mean gradient, step after step", right,
        of="gradients", names=oracle.names_of_steps, rtol=RTOL, atol=ATOL, wrong=GRADIENT, kind="gradient",
    ),
    kinds.order(
        5, "memory", "at no moment does a rank hold more than its shards and the weights of a few layers", find_held,
        wrong=MEMORY, where="weighed", kind="memory",
    ),
    kinds.order(
        2, "order", "forward gathers each layer once; backward gathers it again and reduces its gradient", find_order,
        wrong=ORDER, where="not weighed",
    ),
    kinds.sends(1, "traffic", "a step sends 3 (N−1)/N of the weights", needed, wrong=ORDER, where="not weighed"),
)  # fmt: skip
EXERCISE = Exercise(
    id="zero.6", function="sharded_linear", title="A layer that is whole only while it is used", harness="zero.stack",
    draw=draw, handed_out=handed_out, named=named, checks=CHECKS,
)  # fmt: skip
