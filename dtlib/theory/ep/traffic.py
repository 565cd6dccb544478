"""What travels: copies of tokens to the ranks that hold their experts, and the experts' results back.

The regime of all of it: uniform routing. A token's k experts are drawn from E without replacement, all sets alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from typing import Any

from dtlib.theory.breakdown import Breakdown
from dtlib.theory.formula import formula
from dtlib.theory.valid import amount, node_size, whole

from .routing import allowed_groups, choices, groups_of

COPIES = ("expert", "rank", "node")
"""What a token has one copy for: each expert that it chose, each rank that holds one, or each node that holds one."""


@formula(
    "ep.expected_visits",
    source="derived here",
    label="thm-ep-visits",
    equation=r"N\left(1 - \binom{E - E/N}{k} \Big/ \binom{E}{k}\right)",
)
def expected_visits(num_experts: int, top_k: int, groups: int) -> float:
    """Ranks that a token visits, in the mean: those that hold at least one of its experts.

    A rank with E/N experts is not visited when all k are among the others: C(E − E/N, k) of C(E, k) sets. `groups` is
    N, the ranks, or the nodes. Where N does not divide E, some hold one expert more, and the sum has two kinds of
    terms. ``ValueError`` for sizes below 1 or more choices than experts.
    """
    e, k = choices(num_experts, top_k)
    n = whole("groups", groups, 1)
    size, longer = divmod(e, n)
    missed = sum(many * comb(e - held, k) for held, many in ((size, n - longer), (size + 1, longer)) if many)
    return n - missed / comb(e, k)


@formula(
    "ep.expected_visits_limited",
    source="derived here",
    label="thm-ep-visits",
    equation=r"M\left(1 - \binom{(M-1)E/G}{k} \Big/ \binom{M E/G}{k}\right)",
)
def expected_visits_limited(
    num_experts: int, top_k: int, groups: int, top_groups: int, parts: int | None = None
) -> float:
    """Groups that a token visits, in the mean, where only M of G are allowed.

    M of the `groups` G are drawn, all sets alike, then k of their ME/G experts: `expected_visits` of M. `parts` asks
    for other pieces than the groups: so many ranks or nodes, of which each holds whole groups, or each group whole
    ones. A piece of several groups holds j allowed ones with a hypergeometric chance, and is missed in C((M − j)E/G, k)
    of C(ME/G, k) sets.

    A router does not draw groups: it takes those with the best experts, which then lie in more of them. With 256
    experts, k = 8, and 4 of 8 groups by their two best, independent scores visit 3.95 groups, and the law says 3.63.
    ``ValueError`` where G does not divide E, or `parts` neither divides G nor is a multiple of it that divides E.
    """
    e, k = choices(num_experts, top_k)
    g = groups_of(e, groups)
    m = allowed_groups(e, k, g, top_groups)
    n = g if parts is None else groups_of(e, parts, "parts")
    allowed = m * e // g
    if n % g == 0:  # each piece lies in one group
        return n * m / g * (1 - comb(allowed - e // n, k) / comb(allowed, k))
    if g % n:
        raise ValueError(f"parts must divide groups, {g}, or be a multiple of them, not {n}")
    of = g // n  # groups of a piece
    missed = sum(comb(of, j) * comb(g - of, m - j) * comb((m - j) * e // g, k) for j in range(min(of, m) + 1))
    return n * (1 - missed / (comb(g, m) * comb(allowed, k)))


@dataclass(frozen=True)
class LinkElements(Breakdown):
    """Elements that a rank sends in one direction: to ranks of its own node, and to other nodes."""

    inside: float
    across: float


def link_elements(
    tokens: int,
    hidden: int,
    num_experts: int,
    top_k: int,
    ep: int,
    *,
    copies: str = "rank",
    ranks_per_node: int | None = None,
    groups: int = 1,
    top_groups: int | None = None,
) -> LinkElements:
    """What `dispatch_elements` counts, by link; nodes have g ranks, by default all N.

    A copy for each expert or rank goes where it must, one of N places alike: g − 1 of them in the node, N − g not. A
    copy for each node goes to the rank with the sender's place there, t h V_m (m − 1)/m across with V_m nodes visited
    of m = N/g, and on to the visited ranks but the one it is on: t h V_N (g − 1)/g inside; N must divide E.
    """
    t, h, n = whole("tokens", tokens, 0), whole("hidden", hidden, 1), whole("ep", ep, 1)
    e, k = choices(num_experts, top_k)
    g = n if ranks_per_node is None else node_size(n, ranks_per_node)
    if copies not in COPIES:
        raise ValueError(f"copies must be one of {', '.join(COPIES)}, not {copies!r}")

    def visits(parts: int) -> float:
        if top_groups is None:
            return expected_visits(e, k, parts)
        return expected_visits_limited(e, k, groups, top_groups, parts)

    if copies == "node":
        groups_of(e, n, "ep")
        return LinkElements(t * h * visits(n) * (g - 1) / g, t * h * visits(n // g) * (n - g) / n)
    sent = t * h * (k if copies == "expert" else visits(n))
    return LinkElements(sent * (g - 1) / n, sent * (n - g) / n)


@formula(
    "ep.dispatch_elements",
    source="derived here",
    label="eq-ep-copies",
    equation=(
        r"\frac{N-1}{N}\, t\,h \cdot"
        r" \begin{cases} k & \text{a copy an expert} \\ V & \text{a copy a rank} \end{cases}"
    ),
)
def dispatch_elements(
    tokens: int, hidden: int, num_experts: int, top_k: int, ep: int, copies: str = "rank", **nodes: Any
) -> float:
    """Elements that a rank sends to others so that its t tokens reach their experts: forward, one direction.

    With a copy for each expert k a token, with one for each rank as many as `expected_visits` V; one of N goes to the
    rank itself. The mean over the ranks. ``"node"`` with `ranks_per_node`, and the limit of `groups` and `top_groups`:
    as `link_elements`. ``ValueError`` for sizes below 1, more choices than experts, other `copies`.
    """
    return link_elements(tokens, hidden, num_experts, top_k, ep, copies=copies, **nodes).total


def fp8_bytes_per_element(block: int = 128) -> float:
    """1 + 4/`block`: one byte, and a float32 scale for each `block` of elements."""
    return 1 + 4 / whole("block", block, 1)


@dataclass(frozen=True)
class StepBytes(Breakdown):
    """Bytes that a rank sends in a step for one layer: tokens to experts, results back, their gradients, and what
    travels beside them for each `visits` of an expert."""

    dispatch_forward: float
    combine_forward: float
    dispatch_backward: float
    combine_backward: float
    visits: float


@formula(
    "ep.step_bytes",
    source="deepseek2024",
    label="eq-ep-copies",
    equation=r"2\,\frac{N-1}{N}\, t\,V h\,(w_\text{out} + w_\text{back})",
)
def step_bytes(
    tokens: int,
    hidden: int,
    num_experts: int,
    top_k: int,
    ep: int,
    copies: str = "rank",
    *,
    dispatch_bytes_per_element: float = 2,
    combine_bytes_per_element: float = 2,
    visit_bytes: float = 0,
    **nodes: Any,
) -> StepBytes:
    """Bytes that a rank sends in a step, for one layer.

    Each way back has the elements of the way out: a rank adds up its experts' results of a token, weighted, before it
    returns them. Backward, the gradients of the results go the dispatch's way and those of the tokens the combine's.
    w_out is `dispatch_bytes_per_element`, `fp8_bytes_per_element()` in DeepSeek-V3 both forward and backward, w_back
    `combine_bytes_per_element`, bf16 there. With a copy an expert, k in place of V. `visit_bytes` are those that go to
    and fro beside the copies for each of k choices: its expert, its weight, the weight's gradient. Errors as
    `dispatch_elements`.
    """
    elements = dispatch_elements(tokens, hidden, num_experts, top_k, ep, copies, **nodes)
    out = elements * amount("dispatch_bytes_per_element", dispatch_bytes_per_element, positive=True)
    back = elements * amount("combine_bytes_per_element", combine_bytes_per_element, positive=True)
    beside = dispatch_elements(tokens, 1, num_experts, top_k, ep, "expert") * amount("visit_bytes", visit_bytes)
    return StepBytes(out, back, out, back, beside)
