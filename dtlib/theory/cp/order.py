"""Which tokens a rank has, and how many scores it then computes in each round of a ring."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dtlib.theory.formula import formula
from dtlib.theory.valid import whole

ORDERS = ("contiguous", "zigzag")


def pieces(seq: int, cp: int, order: str = "zigzag") -> list[list[range]]:
    """The positions of each rank, as ranges without gaps.

    ``"contiguous"``: rank r has the r-th of N parts. ``"zigzag"``: of 2N parts it has the r-th from the front and the
    r-th from the back. Parts are as even as they get: the first have one more. ``ValueError`` for fewer positions than
    parts, or another order.
    """
    s, n = whole("seq", seq, 1), whole("cp", cp, 1)
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, not {order!r}")
    parts = n if order == "contiguous" else 2 * n
    if s < parts:
        raise ValueError(f"seq must be at least {parts}, the parts of {n} ranks in {order} order, not {s}")
    size, longer = divmod(s, parts)
    starts = [part * size + min(part, longer) for part in range(parts + 1)]
    all_parts = [range(*bounds) for bounds in pairwise(starts)]
    if order == "contiguous":
        return [[part] for part in all_parts]
    return [[all_parts[r], all_parts[2 * n - 1 - r]] for r in range(n)]


@formula(
    "cp.scores",
    source="derived here",
    label="thm-cp-zigzag",
    equation=r"\text{zig-zag: } \frac{3 s^2}{4 N^2} \text{ in round } 0,\; \frac{s^2}{2 N^2} \text{ in every other}",
)
def scores(seq: int, cp: int, order: str = "zigzag", *, causal: bool = True) -> NDArray[np.int64]:
    """Scores that each rank computes for a head.

    Round by round, as an array (rank, round): in round i rank r has the keys of rank r − i. A range of queries meets a
    range of keys as a whole or, if the mask leaves nothing, not at all. In zig-zag order every rank has the same to do
    in every round: with s a multiple of 2N, three of four quarters of a block in round 0, and two in every other.
    ``ValueError`` as `pieces`.
    """
    ranges = pieces(seq, cp, order)
    return np.array(
        [
            [
                sum(len(q) * len(k) for q in own for k in ranges[(rank - i) % cp] if not causal or k.start < q.stop)
                for i in range(cp)
            ]
            for rank, own in enumerate(ranges)
        ]
    )
