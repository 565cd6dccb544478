"""zero.3: parameters of any shape as one shard a rank, and back.

Twice the desk tells each rank a number by which its shard is multiplied, and twice the parameters are gathered: so what
comes back holds what nobody could know before.
"""

from collections.abc import Callable
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np

from dtlib.grading.exercises import inputs, kinds, signs
from dtlib.grading.exercises.compare import close
from dtlib.grading.exercises.exercise import Exercise
from dtlib.grading.exercises.inputs import Case, Cases, Rng, tensors
from dtlib.grading.exercises.oracle import FLOAT_BYTES, flat, remembered, rescaled, shares

from ._shared import each_rank, positions, sent_before

TIMES = ("the first unshard()", "the second unshard()")


def draw(rng: Rng) -> Cases:
    """Lengths that N divides and others, fewer elements than ranks, tensors of no dimension and of no elements; so many
    that a shard too many, and what is no shard of the whole, weigh more than what is granted."""

    def case(n: int, left: int, *shapes: tuple[int, ...], weighed: bool = False) -> dict[str, Any]:
        """With a tensor more, so that `left` elements are left over where N divides all; none for -1."""
        more = n * int(rng.integers(2000, 3000)) + (left - sum(map(prod, shapes))) % n
        shapes = shapes if left < 0 else (*shapes, (more,))
        total = sum(map(prod, shapes))
        is_a = {
            "two ranks": n == 2,
            "divisible": total % n == 0,
            "padded at the end only": total < n or total % n in (0, n - 1),  # where cutting it off does no harm
            "long enough": total >= n,
            "large": total > 2**14,
        }
        words = f"{n} ranks, shapes {', '.join('×'.join(map(str, shape)) or '()' for shape in shapes)}"
        seeds = {name: int(rng.integers(2**31)) for name in ("seed", "weights_seed")}
        return (
            {"world_size": n, "words": words, "is": is_a}
            | seeds
            | {"shapes": list(map(list, shapes)), "weighed": weighed}
        )

    a, b, c = (int(each) for each in rng.integers(150, 300, 3))
    return [
        case(2, 0, (a, 256)),
        case(3, 0, (a, b), (7,)),
        case(2, 1, (b, c), ()),
        case(3, 1, (a, b), (2, 0), (1,), (2, 3, c)),
        case(4, int(rng.integers(1, 3)), (1,), (301, b), ()),
        case(4, -1, (), (1,)),
        case(3, 2, (3500, 3400 + a), (c, 7, 100), weighed=True),
    ]


def handed_out(case: Case, rank: int) -> inputs.Pieces:
    start = {name: case[name] for name in ("shapes", "weights_seed")}
    start |= {"positions": positions(case, len(whole(case)))} if case["weighed"] else {}
    return [("start", start), *(("between", inputs.factor(case, rank, time)) for time in range(len(TIMES)))]


@remembered
def whole(case: Case) -> Any:
    return flat(tensors(case))


def shards(case: Case) -> list[Any]:
    return np.array_split(whole(case), case["world_size"])


def cut(case: Case, cuts: int, *, up: bool = False) -> list[Any]:
    """Shards of N-ths, rounded down or up, if there are so many cuts less than ranks."""
    n = case["world_size"]
    each = -(-len(whole(case)) // n) if up else len(whole(case)) // n
    return np.split(whole(case), each * np.arange(1, n + 1 - cuts))[:n]


def gathered(times: tuple[int, int] = (1, 2), *, own: bool = False, shaped: bool = True) -> signs.Theory:
    """What `unshard` gives each rank, if it has so many of the changes each time, or those of its own shard alone."""

    def found(case: Case, times: int, ranks: list[int] | None) -> Any:
        line = rescaled(case, whole(case), times, ranks)
        if case["weighed"]:
            return line[positions(case, len(line))]
        parts = zip(np.split(line, list(accumulate(map(prod, case["shapes"])))[:-1]), case["shapes"], strict=True)
        return [(part.reshape(shape) if shape else part.item()) if shaped else part for part, shape in parts]

    def theory(case: Case) -> Any:
        ranks = range(case["world_size"])
        changed = [[rank] for rank in ranks] if own else [None]
        return [[found(case, time, each) for time in times] for each in changed] * (1 if own else len(ranks))

    return remembered(theory)


def held(wholes: int, number: float) -> Callable[[Case, int], float]:
    """The bytes of all parameters so many times, and of so many shards."""
    return lambda case, rank: FLOAT_BYTES * len(whole(case)) * (wholes + number / case["world_size"])


def needed(case: Case) -> float:
    return float(len(TIMES) * (case["world_size"] - 1) * FLOAT_BYTES * len(whole(case)))


def nearly(of: str, theory: signs.Theory) -> signs.Sign:
    return signs.every(lambda each: close([said[of] for said in each.said], theory(each.case), 0.01, 1e-4))


SHARD: signs.Wrong = {
    "padded": lambda case: [np.pad(e, (0, len(cut(case, 1, up=True)[0]) - len(e))) for e in cut(case, 1, up=True)],
    "chunk for tensor_split": lambda case: cut(case, 1, up=True),
    "the rest to the last rank": lambda case: cut(case, 1),
    "the rest is lost": lambda case: cut(case, 0),
    "each parameter by itself": each_rank(lambda case, rank: flat(shares(case, rank, tensors(case)))),
    "a share of another rank": lambda case: [*shards(case)[1:], shards(case)[0]],
    "rounded on the way": nearly("shard", shards),
    "a result of the parameters": signs.raised("must require no gradient"),
}
REBUILT: signs.Wrong = {
    "an old copy": gathered((0, 0)),
    "gathered once for all": gathered((1, 1)),
    "only the own shard is new": gathered(own=True),
    "right for divisible lengths only": signs.only_if("padded at the end only"),
    "rounded on the way": nearly("rebuilt", gathered()),
    "flat, not in shape": gathered(shaped=False),
}
MEMORY: kinds.Ranges = {
    "the shard twice": (held(0, 1.5), held(0, 2.4)),
    "everything is kept": (held(1, -0.5), held(1, 0.5)),
    "the whole and the shard": (held(1, 0.5), None),
}
TRAFFIC: signs.Wrong = {
    "sent while splitting": signs.every(lambda each: sent_before(each, "between", 0) > 0.1),
    "an all-reduce of zeros and a shard": signs.every(lambda each: each.seen.collectives()[-1][0] == "all_reduce"),
    "whole buffers gathered": lambda case: case["world_size"] * needed(case),
    "rounded on the way": lambda case: needed(case) / 2,
    "gathered once for all": signs.every(lambda each: sent_before(each, "between", 1) > 0.99),
}
CHECKS = (
    kinds.own_work("split", built_in=True),
    kinds.heard("split", lambda case: needed(case) / 4 if case["is"]["long enough"] else 0),
    kinds.values(
        2, "shard", "the shard holds this rank's elements, whatever the shapes", shards, of="shard", wrong=SHARD,
        where="not weighed",
    ),
    kinds.values(
        2, "rebuilt", "`unshard()` gives the parameters that the shards hold now", gathered(), of="rebuilt",
        wrong=REBUILT, names=lambda case: TIMES,
    ),
    kinds.keeps(
        2, "memory", "when the parameters are gone, a rank keeps 1/N of their bytes",
        kinds.held_at("between"), lambda case, rank: held(0, 1)(case, rank) + kinds.ROOM,
        "kept when the parameters are gone", wrong=MEMORY,
        least=lambda case, rank: held(0, 1)(case, rank) - kinds.ROOM, early=kinds.showed("between"),
    ),
    kinds.sends(
        1, "traffic", "the ranks send one all-gather of the shards, and nothing else", needed, wrong=TRAFFIC,
        where="large",
    ),
)  # fmt: skip
EXERCISE = Exercise(
    id="zero.3", function="split", title="One shard a rank, and back", harness="zero.split",
    draw=draw, handed_out=handed_out, checks=CHECKS,
)  # fmt: skip
