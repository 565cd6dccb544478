"""ep.2: rows and tokens of each rank from a table of experts, and how long all wait for the busiest; on paper."""

from functools import partial
from typing import Any

import numpy as np

from dtlib.grading.exercises.inputs import Case, Rng, call, in_order
from dtlib.grading.exercises.kinds import on_paper, values

from . import _routing

#: Tokens, experts a token, experts, ranks, and a rank that gets nothing (None: none does).
KINDS = (
    (6, 2, 6, 3, None), (9, 2, 8, 4, 3), (8, 3, 12, 1, None), (12, 1, 10, 5, 0), (10, 4, 8, 2, None), (14, 3, 12, 3, 2),
    (12, 2, 12, 6, 2), (11, 2, 7, 7, None),
)  # fmt: skip


def drawn(rng: Rng, tokens: int, top_k: int, num_experts: int, ep: int, empty: int | None) -> dict[str, Any]:
    """Nobody has balanced the router. Of three ranks with four experts each, most tokens come to another one than most
    rows."""
    while True:
        popular = _routing.uneven(rng, num_experts).reshape(ep, -1)
        if empty is not None:
            popular[empty] = 0
        told = case(_routing.experts(rng, tokens, top_k, popular.ravel()), num_experts, ep)
        rows, come, _ = right(told)
        is_other = rows[come == come.max()].max() < rows.max() and (come < np.minimum(rows, tokens)).any()
        if is_other or (ep, num_experts) != (3, 12):
            return told


def case(experts: Any, num_experts: int, ep: int) -> dict[str, Any]:
    return call(f"experts {experts.tolist()}, E={num_experts}, N={ep}", [experts, num_experts, ep])


def right(case: Case) -> list[Any]:
    experts, num_experts, ep = case["arguments"]
    has = np.zeros((len(experts), num_experts), np.int64)
    np.put_along_axis(has, experts, 1, axis=1)
    of_ranks = has.reshape(len(experts), ep, -1).sum(2)
    rows, tokens = of_ranks.sum(0), (of_ranks > 0).sum(0)
    return [rows, tokens, float(ep * rows.max() / rows.sum())]


part = partial(values, right=right, parts="rows, tokens, slowdown")

EXERCISE = on_paper(
    "ep.2", "busiest_rank", "The busiest rank", in_order(KINDS, drawn),
    part(2, "rows", "rows that each rank computes", part=0),
    part(3, "tokens", "tokens that come to each rank", part=1),
    part(2, "slowdown", "how many times longer the busiest rank computes", part=2),
)  # fmt: skip
