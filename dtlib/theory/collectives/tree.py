"""Closed forms of the binomial trees: broadcast, reduce, all-reduce.

What ``_bytes``, ``_steps`` and ``_seconds`` mean, the letters and the errors: see the package.
"""

from __future__ import annotations

from dtlib.theory.formula import formula
from dtlib.theory.valid import Size, ranks, sized, timed

from .chunks import ceil_log2


@formula(
    "collectives.tree_broadcast_bytes",
    source="thakur2005",
    equation=r"\lceil\log_2 N\rceil\,D",
)
def tree_broadcast_bytes(full_bytes: Size, n: int) -> Size:
    """Binomial-tree broadcast, bytes sent by the root, the busiest."""
    full_bytes, n = sized(full_bytes, n)
    return ceil_log2(n) * full_bytes


@formula(
    "collectives.tree_broadcast_steps",
    source="thakur2005",
    equation=r"\lceil\log_2 N\rceil",
)
def tree_broadcast_steps(n: int) -> int:
    """Binomial-tree broadcast, steps.

    The ranks that know it double each time.
    """
    return ceil_log2(ranks(n))


@formula(
    "collectives.tree_broadcast_seconds",
    source="thakur2005",
    equation=r"\lceil\log_2 N\rceil\left(\alpha + \frac{D}{B}\right)",
)
def tree_broadcast_seconds(full_bytes: Size, n: int, alpha_seconds: float, link_bytes_per_s: float) -> Size:
    """Binomial-tree broadcast, seconds.

    Each step carries the full buffer.
    """
    full_bytes, n, alpha_seconds, link_bytes_per_s = timed(full_bytes, n, alpha_seconds, link_bytes_per_s)
    return ceil_log2(n) * (alpha_seconds + full_bytes / link_bytes_per_s)


@formula("collectives.tree_reduce_bytes", source="thakur2005", equation="D")
def tree_reduce_bytes(full_bytes: Size, n: int) -> Size:
    """Binomial-tree reduce, bytes sent by each rank but the root.

    The root sends nothing.
    """
    full_bytes, n = sized(full_bytes, n)
    return (n > 1) * full_bytes


@formula("collectives.tree_reduce_steps", source="thakur2005", equation=r"\lceil\log_2 N\rceil")
def tree_reduce_steps(n: int) -> int:
    """Binomial-tree reduce, steps.

    The buffers still to be added halve each time.
    """
    return ceil_log2(ranks(n))


@formula(
    "collectives.tree_reduce_seconds",
    source="thakur2005",
    equation=r"\lceil\log_2 N\rceil\left(\alpha + \frac{D}{B}\right)",
)
def tree_reduce_seconds(full_bytes: Size, n: int, alpha_seconds: float, link_bytes_per_s: float) -> Size:
    """Binomial-tree reduce, seconds.

    A broadcast run backwards.
    """
    return tree_broadcast_seconds(full_bytes, n, alpha_seconds, link_bytes_per_s)


@formula(
    "collectives.tree_all_reduce_bytes",
    source="thakur2005",
    equation=r"\lceil\log_2 N\rceil\,D",
)
def tree_all_reduce_bytes(full_bytes: Size, n: int) -> Size:
    """Binomial-tree all-reduce, bytes sent by the root, the busiest."""
    full_bytes, n = sized(full_bytes, n)
    return ceil_log2(n) * full_bytes


@formula(
    "collectives.tree_all_reduce_steps",
    source="thakur2005",
    equation=r"2\lceil\log_2 N\rceil",
)
def tree_all_reduce_steps(n: int) -> int:
    """Binomial-tree all-reduce, steps.

    Up the tree, then down.
    """
    return 2 * ceil_log2(ranks(n))


@formula(
    "collectives.tree_all_reduce_seconds",
    source="thakur2005",
    equation=r"2\lceil\log_2 N\rceil\left(\alpha + \frac{D}{B}\right)",
)
def tree_all_reduce_seconds(full_bytes: Size, n: int, alpha_seconds: float, link_bytes_per_s: float) -> Size:
    """Binomial-tree all-reduce, seconds.

    Few steps, each with the full buffer.
    """
    full_bytes, n, alpha_seconds, link_bytes_per_s = timed(full_bytes, n, alpha_seconds, link_bytes_per_s)
    return 2 * ceil_log2(n) * (alpha_seconds + full_bytes / link_bytes_per_s)
