"""zero.3: parameters of any shape as one shard a rank, and back.

Twice the desk tells each rank a number by which its shard is multiplied, and twice the parameters are gathered: so what
comes back holds what nobody could know before.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np

from dtlib.grading import inputs
from dtlib.grading.compare import close
from dtlib.grading.exercise import Exercise
from dtlib.grading.inputs import Case, tensors
from dtlib.grading.kinds import (
    Ranges,
    Theory,
    Wrong,
    every,
    heard,
    keeps,
    only_if,
    own_work,
    sends,
    values,
)
from dtlib.grading.oracle import FLOAT_BYTES, flat, remembered, rescaled
from dtlib.grading.seen import Observed

ROOM = 6 * 2**20
TIMES = ("the first unshard()", "the second unshard()")


def draw(rng: np.random.Generator) -> list[dict[str, Any]]:
    """Lengths that N divides and others, fewer elements than ranks, tensors of no dimension and of no elements; so many
    that they can be weighed."""

    def case(n: int, left: int, *shapes: tuple[int, ...], weighed: bool = False) -> dict[str, Any]:
        """With a tensor more, so that `left` elements are left over where N divides all; none for -1."""
        more = n * int(rng.integers(2000, 3000)) + (left - sum(map(prod, shapes))) % n
        shapes = shapes if left < 0 else (*shapes, (more,))
        total = sum(map(prod, shapes))
        return {
            "world_size": n,
            "shapes": [list(shape) for shape in shapes],
            "weighed": weighed,
            "seed": int(rng.integers(2**31)),
            "words": f"{n} ranks, shapes {', '.join('×'.join(map(str, shape)) or '()' for shape in shapes)}",
            "is": {
                "two ranks": n == 2,
                "divisible": total % n == 0,
                "padded at the end only": total < n or total % n in (0, n - 1),  # where cutting it off does no harm
                "long enough": total >= n,
                "large": total > 2**14,
            },
        }

    a, b, c = (int(each) for each in rng.integers(150, 300, 3))
    return [
        case(2, 0, (a, 256)),
        case(3, 0, (a, b), (7,)),
        case(2, 1, (b, c), ()),
        case(3, 1, (a, b), (2, 0), (1,), (2, 3, c)),
        case(4, int(rng.integers(1, 3)), (1,), (301, b), ()),
        case(4, -1, (), (1,)),
        case(4, 2, (1500, 2000 + a), (c, 7, 1000), weighed=True),
    ]


def handed_out(case: Case, rank: int) -> inputs.Pieces:
    """How the parameters are made; twice a number."""
    start = {name: case[name] for name in ("shapes", "seed")}
    start |= {"positions": positions(case)} if case["weighed"] else {}
    return [("start", start), *(("between", inputs.factor(case, rank, time)) for time in range(len(TIMES)))]


def positions(case: Case) -> Any:
    """Which elements are asked for, of many."""
    return np.sort(np.random.default_rng(case["seed"]).choice(len(whole(case)), 5000, replace=False))


@remembered
def whole(case: Case) -> Any:
    """All of them end to end."""
    return flat(tensors(case))


def shards(case: Case) -> list[Any]:
    """The shard of each rank."""
    return np.array_split(whole(case), case["world_size"])


def cut(case: Case, cuts: int, *, up: bool = False) -> list[Any]:
    """Shards of N-ths, rounded down or up, if there are so many cuts less than ranks."""
    n = case["world_size"]
    each = -(-len(whole(case)) // n) if up else len(whole(case)) // n
    return np.split(whole(case), each * np.arange(1, n + 1 - cuts))[:n]


def gathered(times: tuple[int, int] = (1, 2), *, own: bool = False, shaped: bool = True) -> Theory:
    """What `unshard` gives each rank, if it has so many of the changes each time, or those of its own shard alone."""

    def found(case: Case, times: int, ranks: list[int] | None) -> Any:
        line = rescaled(case, whole(case), times, ranks)
        if case["weighed"]:
            return line[positions(case)]
        parts = zip(np.split(line, list(accumulate(map(prod, case["shapes"])))[:-1]), case["shapes"], strict=True)
        return [(part.reshape(shape) if shape else part.item()) if shaped else part for part, shape in parts]

    return remembered(
        lambda case: [[found(case, t, [rank] if own else None) for t in times] for rank in range(case["world_size"])]
    )


def all_bytes(case: Case) -> int:
    """The bytes of all elements."""
    return FLOAT_BYTES * len(whole(case))


def with_shares(number: float) -> Callable[[Case, int], float]:
    """The bytes of all parameters, and of so many shards."""
    return lambda case, rank: all_bytes(case) * (1 + number / case["world_size"])


def needed(case: Case) -> float:
    """What all ranks send for all gathers."""
    return float(len(TIMES) * (case["world_size"] - 1) * all_bytes(case))


def sent_before(observed: Observed, number: int) -> float:
    """Which part of all bytes the ranks had sent when they asked for a number."""
    asks = [observed.seen.asked(rank, "between")[number] for rank in range(len(observed.said))]
    return sum(map(observed.seen.sent_by, asks)) / max(1, observed.seen.total_bytes)


SHARD: Wrong = {
    "padded": lambda case: [np.pad(e, (0, len(cut(case, 1, up=True)[0]) - len(e))) for e in cut(case, 1, up=True)],
    "chunk for tensor_split": lambda case: cut(case, 1, up=True),
    "the rest to the last rank": lambda case: cut(case, 1),
    "the rest is lost": lambda case: cut(case, 0),
    "each parameter by itself": lambda case: [
        flat([np.array_split(each.ravel(), case["world_size"])[rank] for each in tensors(case)])
        for rank in range(case["world_size"])
    ],
    "the whole as a shard": lambda case: [whole(case)] * case["world_size"],
    "the next rank's shard": lambda case: [*shards(case)[1:], shards(case)[0]],
    "rounded on the way": every(lambda each: close([said["shard"] for said in each.said], shards(each.case), 0.01)),
}
REBUILT: Wrong = {
    "an old copy": gathered((0, 0)),
    "gathered once for all": gathered((1, 1)),
    "only the own shard is new": gathered(own=True),
    "right for divisible lengths only": only_if("padded at the end only"),
    "rounded on the way": every(
        lambda each: close([said["rebuilt"] for said in each.said], gathered()(each.case), 0.01)
    ),
    "flat, not in shape": gathered(shaped=False),
}
MEMORY: Ranges = {
    "everything is kept": (with_shares(-0.5), with_shares(0.5)),
    "the whole and the shard": (with_shares(0.5), None),
}
TRAFFIC: Wrong = {
    "sent while splitting": every(lambda each: sent_before(each, 0) > 0.1),
    "an all-reduce of zeros and a shard": every(lambda each: each.seen.collectives()[-1][0] == "all_reduce"),
    "whole buffers gathered": (
        lambda case: case["world_size"] * needed(case),
        lambda case: (case["world_size"] + 1) * needed(case),
    ),
    "rounded on the way": lambda case: needed(case) / 2,
    "gathered once for all": every(lambda each: sent_before(each, 1) > 0.99),
}
CHECKS = (
    own_work("split", built_in=True),
    heard("split", lambda case: needed(case) / 4 if case["is"]["long enough"] else 0),
    values(
        2, "shard", "the shard holds this rank's elements, whatever the shapes", shards, of="shard", wrong=SHARD,
        where="not weighed",
    ),
    values(
        2, "rebuilt", "`unshard()` gives the parameters that the shards hold now", gathered(), of="rebuilt",
        wrong=REBUILT, names=lambda case: TIMES,
    ),
    keeps(
        2, "memory", "when the parameters are gone, a rank keeps 1/N of their bytes",
        lambda seen, rank: seen.held(rank, "between"), lambda case, rank: all_bytes(case) / case["world_size"] + ROOM,
        "kept when the parameters are gone", wrong=MEMORY,
    ),
    sends(
        1, "traffic", "the ranks send one all-gather of the shards, and nothing else", needed, wrong=TRAFFIC,
        where="large",
    ),
)  # fmt: skip
EXERCISE = Exercise(
    id="zero.3",
    function="split",
    title="One shard a rank, and back",
    harness="zero.split",
    draw=draw,
    handed_out=handed_out,
    checks=CHECKS,
)
