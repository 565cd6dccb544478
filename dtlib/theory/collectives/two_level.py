"""Closed forms of the two-level all-reduce, which sends little over the slow links between nodes.

g ranks a node, m = N/g nodes. Inside each node a ring reduce-scatter leaves a rank with D/g; then the ranks
with the same place in their nodes all-reduce that part in a ring across the nodes; then each node gathers.
The rest: see the package.
"""

from __future__ import annotations

from dtlib.theory.formula import formula
from dtlib.theory.valid import Size, amount, node_size, ranks, sized, timed


@formula(
    "collectives.two_level_all_reduce_bytes",
    source="cho2019",
    equation=r"2\,\frac{g-1}{g}\,D + 2\,\frac{m-1}{m}\,\frac{D}{g} = 2\,\frac{N-1}{N}\,D",
)
def two_level_all_reduce_bytes(full_bytes: Size, n: int, *, ranks_per_node: int) -> Size:
    """Two-level all-reduce, bytes sent by each rank.

    Over both kinds of link together, as many as in one ring.

    Raises ``ValueError`` unless `ranks_per_node` divides `n`.
    """
    full_bytes, n = sized(full_bytes, n)
    node_size(n, ranks_per_node)
    return 2 * (n - 1) * full_bytes / n


@formula(
    "collectives.two_level_slow_link_bytes",
    source="cho2019",
    equation=r"2\,\frac{m-1}{m}\,\frac{D}{g}",
)
def two_level_slow_link_bytes(full_bytes: Size, n: int, *, ranks_per_node: int) -> Size:
    """Two-level all-reduce, bytes that each rank sends to another node.

    Raises ``ValueError`` unless `ranks_per_node` divides `n`.
    """
    full_bytes, n = sized(full_bytes, n)
    per_node = node_size(n, ranks_per_node)
    nodes = n // per_node
    return 2 * (nodes - 1) * full_bytes / nodes / per_node


@formula(
    "collectives.two_level_all_reduce_steps",
    source="cho2019",
    equation=r"2(g-1) + 2(m-1)",
)
def two_level_all_reduce_steps(n: int, *, ranks_per_node: int) -> int:
    """Two-level all-reduce, steps.

    Two short rings in place of a long one.
    """
    n = ranks(n)
    per_node = node_size(n, ranks_per_node)
    return 2 * (per_node - 1) + 2 * (n // per_node - 1)


@formula(
    "collectives.two_level_all_reduce_seconds",
    source="cho2019",
    equation=(
        r"2(g-1)\left(\alpha + \frac{D}{g B}\right)"
        r" + 2(m-1)\left(\alpha_{\text{slow}} + \frac{D}{g\,m\,B_{\text{slow}}}\right)"
    ),
)
def two_level_all_reduce_seconds(
    full_bytes: Size,
    n: int,
    alpha_seconds: float,
    link_bytes_per_s: float,
    *,
    ranks_per_node: int,
    slow_alpha_seconds: float | None = None,
    slow_link_bytes_per_s: float | None = None,
) -> Size:
    """Two-level all-reduce, seconds.

    The slow links carry a g-th of the buffer.

    `slow_alpha_seconds` and `slow_link_bytes_per_s` describe the links between nodes, one for each rank; left
    out, they are like those inside. Raises ``ValueError`` unless `ranks_per_node` divides `n`.
    """
    full_bytes, n, alpha_seconds, link_bytes_per_s = timed(full_bytes, n, alpha_seconds, link_bytes_per_s)
    per_node = node_size(n, ranks_per_node)
    nodes = n // per_node
    slow_alpha = alpha_seconds if slow_alpha_seconds is None else slow_alpha_seconds
    slow_rate = link_bytes_per_s if slow_link_bytes_per_s is None else slow_link_bytes_per_s
    slow_alpha = amount("slow_alpha_seconds", slow_alpha)
    slow_rate = amount("slow_link_bytes_per_s", slow_rate, positive=True)
    inside = 2 * (per_node - 1) * (alpha_seconds + full_bytes / per_node / link_bytes_per_s)
    return inside + 2 * (nodes - 1) * (slow_alpha + full_bytes / n / slow_rate)
