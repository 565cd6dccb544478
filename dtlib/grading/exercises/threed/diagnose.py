"""threed.4: what is wrong with a run on a mesh, by what each rank has sent to each other; on paper."""

from itertools import pairwise
from typing import Any

import numpy as np

from dtlib.grading.exercises.inputs import Array, Cases, Rng, call, in_any_order
from dtlib.grading.exercises.kinds import by, on_paper

from .groups import place

NOTHING, PLACED, EACH, AGAIN, WHOLE = (
    "nothing wrong", "other order", "each micro-batch", "computed again", "whole messages",
)  # fmt: skip
AXES = ("dp", "pp", "tp")

#: What is wrong, sizes of the axes as meant, their order, the farthest ranks first, micro-batches, layers of a stage.
KINDS = (
    (NOTHING, (2, 2, 2), ("dp", "pp", "tp"), 4, 2), (NOTHING, (4, 1, 4), ("dp", "pp", "tp"), 3, 4),
    (NOTHING, (2, 4, 2), ("pp", "dp", "tp"), 8, 1), (NOTHING, (3, 2, 4), ("dp", "pp", "tp"), 5, 3),
    (PLACED, (2, 2, 4), ("dp", "pp", "tp"), 4, 2), (PLACED, (4, 2, 2), ("pp", "dp", "tp"), 4, 2),
    (PLACED, (2, 3, 4), ("dp", "pp", "tp"), 6, 1), (PLACED, (2, 2, 2), ("dp", "pp", "tp"), 3, 4),
    (EACH, (2, 2, 2), ("dp", "pp", "tp"), 4, 2), (EACH, (4, 1, 2), ("dp", "pp", "tp"), 2, 3),
    (EACH, (3, 4, 2), ("pp", "dp", "tp"), 8, 1),
    (AGAIN, (2, 2, 2), ("dp", "pp", "tp"), 4, 2), (AGAIN, (2, 2, 4), ("dp", "pp", "tp"), 2, 1),
    (AGAIN, (2, 1, 4), ("dp", "pp", "tp"), 8, 2), (AGAIN, (1, 1, 4), ("dp", "pp", "tp"), 4, 2),
    (WHOLE, (2, 2, 2), ("dp", "pp", "tp"), 4, 2), (WHOLE, (1, 4, 4), ("dp", "pp", "tp"), 3, 1),
    (WHOLE, (3, 2, 2), ("pp", "dp", "tp"), 5, 3),
)  # fmt: skip


def draw(rng: Rng) -> Cases:
    """Each kind once, and each fault on a mesh that is drawn, in any order, with sizes of its own."""
    kinds = [*KINDS, *(drawn(rng, fault) for fault in (NOTHING, PLACED, EACH, AGAIN, WHOLE))]
    return in_any_order(kinds, case)(rng)


def drawn(rng: Rng, fault: str) -> tuple[str, tuple[int, ...], tuple[str, ...], int, int]:
    """A run with a fault on a mesh of three axes in any order."""
    degrees = tuple(int(each) for each in (*rng.integers(2, 4, 2), 2 * rng.integers(1, 3)))
    order = tuple(str(each) for each in rng.permutation(AXES))
    return fault, degrees, order, int(rng.integers(3, 9)), int(rng.integers(1, 5))


def case(
    rng: Rng, number: int, kind: str, degrees: tuple[int, ...], order: tuple[str, ...], m: int, layers: int
) -> dict[str, Any]:
    axes = {name: degrees[AXES.index(name)] for name in order}
    run: dict[str, Any] = {"axes": axes, "micro_batches": m, "layers": layers}
    while True:  # axes that send about as much are not told apart by what they send
        run |= {name: 1024 * int(rng.integers(2, 9)) for name in ("tokens", "hidden")}
        run["gradient_bytes"] = int(rng.integers(50, 900)) * 10**6
        each = bytes_by_axis(run, axes, kind)
        is_told = (kind, layers) != (AGAIN, 1) or each["dp"] > each["tp"]  # most of the bytes are as they should be
        if is_told and all(one > 1.3 * other for other, one in pairwise(sorted(filter(None, each.values())))):
            break
    real = dict(reversed(axes.items())) if kind == PLACED else axes
    sent = bytes_between(run, real, kind) * rng.uniform(1.001, 1.006, (np.prod(degrees),) * 2)
    row = ", ".join(f"{size:.4g} B to rank {there}" for there, size in enumerate(sent[0]) if size)
    words = (
        f"run {number}, on {', '.join(f'{name} {size}' for name, size in axes.items())}, {m} micro-batches, {layers} "
        f"layers, {run['tokens']} tokens, hidden {run['hidden']}, {run['gradient_bytes']:,} B of gradients; rank 0 "
        f"sent {row}"
    )
    return call(words, [run | {"sent": np.round(sent)}]) | {"wrong": kind}


def bytes_by_axis(run: dict[str, Any], axes: dict[str, int], kind: str) -> dict[str, float]:
    """What a rank sends to the next one along each axis."""
    m, activation = run["micro_batches"], 2 * run["tokens"] * run["hidden"]
    return {
        "tp": (12 if kind == AGAIN else 8) * (axes["tp"] - 1) / axes["tp"] * m * run["layers"] * activation,
        "dp": 2 * (axes["dp"] - 1) / axes["dp"] * run["gradient_bytes"] * (m if kind == EACH else 1),
        "pp": m * activation / (1 if kind == WHOLE else axes["tp"]),
    }


def bytes_between(run: dict[str, Any], axes: dict[str, int], kind: str) -> Array:
    """What each rank sends to each: around the rings of tp and dp, and to the stages in front and behind."""
    each, n = bytes_by_axis(run, axes, kind), int(np.prod(list(axes.values())))
    sent = np.zeros((n, n))
    for rank in range(n):
        at = place(axes, rank)
        for name in ("tp", "dp"):
            sent[rank, number(axes, at | {name: (at[name] + 1) % axes[name]})] += each[name]
        for there in (at["pp"] - 1, at["pp"] + 1):
            if 0 <= there < axes["pp"]:
                sent[rank, number(axes, at | {"pp": there})] += each["pp"]
    return sent


def number(axes: dict[str, int], at: dict[str, int]) -> int:
    """The rank that stands there."""
    return int(np.ravel_multi_index([at[name] for name in axes], list(axes.values())))


of = by("wrong", kind="traffic")

EXERCISE = on_paper(
    "threed.4", "diagnose_mesh", "What is wrong with this mesh?", draw,
    of(PLACED, NOTHING)(4, "order", "ranks that stand elsewhere than meant, and runs with nothing wrong"),
    of(EACH, AGAIN, WHOLE)(4, "axis", "an axis that sends too much"),
)  # fmt: skip
