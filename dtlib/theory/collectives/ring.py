"""Closed forms of the algorithms that take one partner after another: naive, the rings, pairwise all-to-all.

What ``_bytes``, ``_steps`` and ``_seconds`` mean, the letters and the errors: see the package.
"""

from __future__ import annotations

from dtlib.theory.formula import formula
from dtlib.theory.valid import Size, ranks, sized, timed


@formula("collectives.naive_all_reduce_bytes", source="chan2007", equation=r"(N-1)\,D")
def naive_all_reduce_bytes(full_bytes: Size, n: int) -> Size:
    """Naive all-reduce, bytes sent by rank 0, the busiest.

    Every other rank sends D.
    """
    full_bytes, n = sized(full_bytes, n)
    return (n - 1) * full_bytes


@formula("collectives.naive_all_reduce_steps", source="chan2007", equation=r"2(N-1)")
def naive_all_reduce_steps(n: int) -> int:
    """Naive all-reduce, steps.

    N−1 buffers arrive at rank 0 one after another, N−1 leave.
    """
    return 2 * (ranks(n) - 1)


@formula(
    "collectives.naive_all_reduce_seconds",
    source="hockney1994",
    equation=r"2(N-1)\left(\alpha + \frac{D}{B}\right)",
)
def naive_all_reduce_seconds(full_bytes: Size, n: int, alpha_seconds: float, link_bytes_per_s: float) -> Size:
    """Naive all-reduce, seconds.

    Rank 0's link carries the full buffer 2(N−1) times.
    """
    full_bytes, n, alpha_seconds, link_bytes_per_s = timed(full_bytes, n, alpha_seconds, link_bytes_per_s)
    return 2 * (n - 1) * (alpha_seconds + full_bytes / link_bytes_per_s)


@formula(
    "collectives.ring_reduce_scatter_bytes",
    source="patarasuk2009",
    label="thm-col-ring",
    equation=r"\frac{N-1}{N}\,D",
)
def ring_reduce_scatter_bytes(full_bytes: Size, n: int) -> Size:
    """Ring reduce-scatter, bytes sent by each rank.

    Every chunk but the one it keeps.
    """
    full_bytes, n = sized(full_bytes, n)
    return (n - 1) * full_bytes / n


@formula("collectives.ring_reduce_scatter_steps", source="patarasuk2009", label="thm-col-ring", equation=r"N-1")
def ring_reduce_scatter_steps(n: int) -> int:
    """Ring reduce-scatter, steps.

    A chunk visits every other rank on its way home.
    """
    return ranks(n) - 1


@formula(
    "collectives.ring_reduce_scatter_seconds",
    source="patarasuk2009",
    label="thm-col-ring",
    equation=r"(N-1)\,\alpha + \frac{N-1}{N}\,\frac{D}{B}",
)
def ring_reduce_scatter_seconds(full_bytes: Size, n: int, alpha_seconds: float, link_bytes_per_s: float) -> Size:
    """Ring reduce-scatter, seconds.

    N−1 steps of one chunk each.
    """
    full_bytes, n, alpha_seconds, link_bytes_per_s = timed(full_bytes, n, alpha_seconds, link_bytes_per_s)
    return (n - 1) * (alpha_seconds + full_bytes / n / link_bytes_per_s)


@formula(
    "collectives.ring_all_gather_bytes",
    source="patarasuk2009",
    label="thm-col-ring",
    equation=r"\frac{N-1}{N}\,D",
)
def ring_all_gather_bytes(full_bytes: Size, n: int) -> Size:
    """Ring all-gather, bytes sent by each rank.

    D is the gathered buffer, not the shard.
    """
    full_bytes, n = sized(full_bytes, n)
    return (n - 1) * full_bytes / n


@formula("collectives.ring_all_gather_steps", source="patarasuk2009", label="thm-col-ring", equation=r"N-1")
def ring_all_gather_steps(n: int) -> int:
    """Ring all-gather, steps.

    The chunk from the farthest rank takes N−1 hops.
    """
    return ranks(n) - 1


@formula(
    "collectives.ring_all_gather_seconds",
    source="patarasuk2009",
    label="thm-col-ring",
    equation=r"(N-1)\,\alpha + \frac{N-1}{N}\,\frac{D}{B}",
)
def ring_all_gather_seconds(full_bytes: Size, n: int, alpha_seconds: float, link_bytes_per_s: float) -> Size:
    """Ring all-gather, seconds.

    N−1 steps of one chunk each.
    """
    full_bytes, n, alpha_seconds, link_bytes_per_s = timed(full_bytes, n, alpha_seconds, link_bytes_per_s)
    return (n - 1) * (alpha_seconds + full_bytes / n / link_bytes_per_s)


@formula(
    "collectives.ring_all_reduce_bytes",
    source="patarasuk2009",
    label="thm-col-ring",
    equation=r"2\,\frac{N-1}{N}\,D",
)
def ring_all_reduce_bytes(full_bytes: Size, n: int) -> Size:
    """Ring all-reduce, bytes sent by each rank.

    A reduce-scatter, then an all-gather.
    """
    full_bytes, n = sized(full_bytes, n)
    return 2 * (n - 1) * full_bytes / n


@formula("collectives.ring_all_reduce_steps", source="patarasuk2009", label="thm-col-ring", equation=r"2(N-1)")
def ring_all_reduce_steps(n: int) -> int:
    """Ring all-reduce, steps.

    N−1 to add up, N−1 to hand out.
    """
    return 2 * (ranks(n) - 1)


@formula(
    "collectives.ring_all_reduce_seconds",
    source="patarasuk2009",
    label="thm-col-ring",
    equation=r"2(N-1)\,\alpha + 2\,\frac{N-1}{N}\,\frac{D}{B}",
)
def ring_all_reduce_seconds(full_bytes: Size, n: int, alpha_seconds: float, link_bytes_per_s: float) -> Size:
    """Ring all-reduce, seconds.

    The α term grows with N, the D/B term stops growing.
    """
    full_bytes, n, alpha_seconds, link_bytes_per_s = timed(full_bytes, n, alpha_seconds, link_bytes_per_s)
    return 2 * (n - 1) * (alpha_seconds + full_bytes / n / link_bytes_per_s)


@formula(
    "collectives.pairwise_all_to_all_bytes",
    source="thakur2005",
    equation=r"\frac{N-1}{N}\,D",
)
def pairwise_all_to_all_bytes(full_bytes: Size, n: int) -> Size:
    """Pairwise all-to-all, bytes sent by each rank.

    All it holds but the chunk for itself.
    """
    full_bytes, n = sized(full_bytes, n)
    return (n - 1) * full_bytes / n


@formula("collectives.pairwise_all_to_all_steps", source="thakur2005", equation=r"N-1")
def pairwise_all_to_all_steps(n: int) -> int:
    """Pairwise all-to-all, steps.

    A different partner in each.
    """
    return ranks(n) - 1


@formula(
    "collectives.pairwise_all_to_all_seconds",
    source="thakur2005",
    equation=r"(N-1)\,\alpha + \frac{N-1}{N}\,\frac{D}{B}",
)
def pairwise_all_to_all_seconds(full_bytes: Size, n: int, alpha_seconds: float, link_bytes_per_s: float) -> Size:
    """Pairwise all-to-all, seconds.

    N−1 steps of one chunk each.
    """
    full_bytes, n, alpha_seconds, link_bytes_per_s = timed(full_bytes, n, alpha_seconds, link_bytes_per_s)
    return (n - 1) * (alpha_seconds + full_bytes / n / link_bytes_per_s)
