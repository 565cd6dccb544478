"""ep.3: which pairs of a token and a choice an expert with a capacity takes, what is dropped and padded; on paper."""

from functools import partial
from math import ceil
from typing import Any

import numpy as np

from dtlib.grading.exercises.inputs import Case, Cases, Rng, call
from dtlib.grading.exercises.kinds import on_paper, values

from . import _routing

#: Tokens, choices, experts, factor: room that comes out whole, also where the factor times the tokens does not, and
#: that is rounded up, far from the next number and near it; more room than any expert needs, and less than half.
KINDS = (
    (6, 2, 4, 1.0), (9, 1, 4, 1.0), (9, 2, 4, 1.0), (10, 3, 8, 1.25), (12, 2, 8, 0.375), (11, 2, 5, 0.5),
    (8, 2, 6, 2.5), (13, 4, 8, 0.75), (14, 1, 6, 1.5), (15, 2, 8, 1.125), (7, 2, 7, 1.5),
)  # fmt: skip
TRIPLE = "stays, dropped, padded"


def draw(rng: Rng) -> Cases:
    """Each kind, with tables in which it counts who is seated first wherever tokens have several choices."""
    cases = []
    for tokens, top_k, num_experts, factor in KINDS:
        while True:
            popular = _routing.uneven(rng, num_experts)
            told = case(_routing.experts(rng, tokens, top_k, popular), num_experts, factor)
            others = [seated(told, order) for order in ("token by token", "last tokens first", "last choices first")]
            is_full = not right(told)[0].all()
            alike = sum(bool((right(told)[0] == each).all()) for each in others)
            if factor > 2 or (is_full and not alike) or (is_full and top_k == 1):
                cases.append(told)
                break
    return cases


def case(experts: Any, num_experts: int, factor: float) -> dict[str, Any]:
    return call(f"experts {experts.tolist()}, E={num_experts}, factor {factor}", [experts, num_experts, factor])


def seated(case: Case, order: str) -> Any:
    """Which pairs stay if they are seated in this order: those before a pair in the queue of its expert leave one."""
    experts = case["arguments"][0]
    token, choice = np.indices(experts.shape)
    keys = {"": (choice, token), "token by token": (token, choice), "last tokens first": (choice, -token)}
    first, second = keys.get(order, (-choice, token))
    before = (first[..., None, None] > first) | ((first[..., None, None] == first) & (second[..., None, None] > second))
    same = experts[..., None, None] == experts
    return (before & same).sum((2, 3)) < room(case)


def room(case: Case) -> int:
    experts, num_experts, factor = case["arguments"]
    return ceil(factor * experts.size / num_experts)


def right(case: Case) -> list[Any]:
    stays, places = seated(case, ""), case["arguments"][1] * room(case)
    return [stays, float((~stays).mean()), float(1 - stays.sum() / places)]


part = partial(values, right=right, parts=TRIPLE, atol=1e-12)

EXERCISE = on_paper(
    "ep.3", "fill", "Capacity and drops", draw,
    part(3, "stays", "the pairs that stay", part=0),
    part(2, "dropped", "the share of the pairs that is dropped", part=1),
    part(2, "padded", "the share of the room that stays empty", part=2),
)  # fmt: skip
