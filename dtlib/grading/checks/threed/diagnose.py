"""threed.4: what is wrong with a run on a mesh, by what each rank has sent to each other; on paper."""

from functools import partial
from typing import Any

import numpy as np

from dtlib.grading.inputs import Array, Case, Cases, Rng, call
from dtlib.grading.kinds import on_paper, values

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
    (AGAIN, (2, 2, 2), ("dp", "pp", "tp"), 4, 2), (AGAIN, (2, 1, 4), ("dp", "pp", "tp"), 2, 4),
    (AGAIN, (2, 4, 4), ("dp", "pp", "tp"), 8, 1),
    (WHOLE, (2, 2, 2), ("dp", "pp", "tp"), 4, 2), (WHOLE, (1, 4, 4), ("dp", "pp", "tp"), 3, 1),
    (WHOLE, (3, 2, 2), ("pp", "dp", "tp"), 5, 3),
)  # fmt: skip


def draw(rng: Rng) -> Cases:
    """Each kind once, in any order, with sizes of its own."""
    return [case(rng, number, *KINDS[kind]) for number, kind in enumerate(rng.permutation(len(KINDS)), 1)]


def case(
    rng: Rng, number: int, kind: str, degrees: tuple[int, ...], order: tuple[str, ...], m: int, layers: int
) -> dict[str, Any]:
    sizes = dict(zip(AXES, degrees, strict=True))
    axes = {name: sizes[name] for name in order}
    run: dict[str, Any] = {
        "axes": axes, "micro_batches": m, "layers": layers, "tokens": 1024 * int(rng.integers(2, 9)),
        "hidden": 1024 * int(rng.integers(1, 9)), "gradient_bytes": int(rng.integers(50, 900)) * 10**6,
    }  # fmt: skip
    real = dict(reversed(axes.items())) if kind == PLACED else axes
    sent = bytes_between(run, real, kind) * rng.uniform(1.001, 1.006, (np.prod(degrees),) * 2)
    words = f"run {number}, on {', '.join(f'{name} {size}' for name, size in axes.items())}"
    return call(words, [run | {"sent": np.round(sent)}]) | {"wrong": kind}


def bytes_between(run: dict[str, Any], axes: dict[str, int], kind: str) -> Array:
    """What each rank sends to each: around the rings of tp and dp, and to the stages in front and behind."""
    n, m, activation = int(np.prod(list(axes.values()))), run["micro_batches"], 2 * run["tokens"] * run["hidden"]
    each = {
        "tp": (12 if kind == AGAIN else 8) * (axes["tp"] - 1) / axes["tp"] * m * run["layers"] * activation,
        "dp": 2 * (axes["dp"] - 1) / axes["dp"] * run["gradient_bytes"] * (m if kind == EACH else 1),
        "pp": m * activation / (1 if kind == WHOLE else axes["tp"]),
    }
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


def right(case: Case) -> str:
    return str(case["wrong"])


def of(*kinds: str) -> Any:
    return partial(values, right=right, kind="traffic", where=lambda case: case["wrong"] in kinds)


EXERCISE = on_paper(
    "threed.4", "diagnose_mesh", "What is wrong with this mesh?", draw,
    of(PLACED)(2, "order", "ranks that stand elsewhere than meant"),
    of(EACH, AGAIN, WHOLE)(4, "axis", "an axis that sends too much"),
    of(NOTHING)(2, "nothing", "nothing is found where nothing is wrong"),
)  # fmt: skip
