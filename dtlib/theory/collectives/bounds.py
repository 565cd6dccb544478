"""What no algorithm can beat, where one overtakes another, and the two bandwidths that benchmarks print."""

from __future__ import annotations

from dtlib.theory.formula import formula
from dtlib.theory.valid import Size, amount, ranks, sized, timed

from .chunks import ceil_log2


@formula(
    "collectives.all_reduce_lower_bound_bytes",
    source="patarasuk2009",
    label="thm-col-bound",
    equation=r"2\,\frac{N-1}{N}\,D",
)
def all_reduce_lower_bound_bytes(full_bytes: Size, n: int) -> Size:
    """All-reduce, the fewest bytes of the busiest rank.

    Holds when a word on the wire says something about one element only (no coding across elements).
    """
    full_bytes, n = sized(full_bytes, n)
    return 2 * (n - 1) * full_bytes / n


@formula(
    "collectives.half_lower_bound_bytes",
    source="chan2007",
    label="cor-col-half",
    equation=r"\frac{N-1}{N}\,D",
)
def half_lower_bound_bytes(full_bytes: Size, n: int) -> Size:
    """Reduce-scatter or all-gather, the fewest bytes of the busiest rank."""
    full_bytes, n = sized(full_bytes, n)
    return (n - 1) * full_bytes / n


@formula("collectives.lower_bound_steps", source="chan2007", label="prop-col-steps", equation=r"\lceil\log_2 N\rceil")
def lower_bound_steps(n: int) -> int:
    """All-reduce, either of its halves, broadcast or reduce: the fewest steps.

    In a step a rank hears from one other at most, so the number of ranks it can know about at most doubles.
    """
    return ceil_log2(ranks(n))


@formula(
    "collectives.all_reduce_lower_bound_seconds",
    source="chan2007",
    equation=r"\max\left(\lceil\log_2 N\rceil\,\alpha,\ 2\,\frac{N-1}{N}\,\frac{D}{B}\right)",
)
def all_reduce_lower_bound_seconds(full_bytes: float, n: int, alpha_seconds: float, link_bytes_per_s: float) -> float:
    """All-reduce, the fewest seconds under the α–β model.

    Neither term can be avoided.
    """
    full_bytes, n, alpha_seconds, link_bytes_per_s = timed(full_bytes, n, alpha_seconds, link_bytes_per_s)
    return max(ceil_log2(n) * alpha_seconds, 2 * (n - 1) * full_bytes / n / link_bytes_per_s)


@formula(
    "collectives.ring_tree_crossover_bytes",
    source="derived here",
    label="eq-col-crossover",
    equation=r"D^{*} = \alpha B\,\frac{N-1-\lceil\log_2 N\rceil}{\lceil\log_2 N\rceil - (N-1)/N}\quad(N > 1)",
    use="Below it the tree is faster, above it the ring.",
)
def ring_tree_crossover_bytes(n: int, alpha_seconds: float, link_bytes_per_s: float) -> float:
    """Ring against tree, bytes at which both take equally long.

    Below it the binomial tree is faster, above it the ring. 0 for up to three ranks, where the ring is never
    slower.
    """
    _, n, alpha_seconds, link_bytes_per_s = timed(0, n, alpha_seconds, link_bytes_per_s)
    if n == 1:
        return 0.0
    levels = ceil_log2(n)
    return alpha_seconds * link_bytes_per_s * (n - 1 - levels) / (levels - (n - 1) / n)


@formula("collectives.algbw_bytes_per_s", source="nccltests", label="eq-col-busbw", equation=r"\frac{D}{t}")
def algbw_bytes_per_s(full_bytes: Size, seconds: Size) -> Size:
    """Algorithm bandwidth (algbw), bytes a second.

    The buffer over the time, as the caller sees it.
    """
    full_bytes = amount("full_bytes", full_bytes)
    seconds = amount("seconds", seconds, positive=True)
    return full_bytes / seconds


@formula(
    "collectives.busbw_bytes_per_s",
    source="nccltests",
    label="eq-col-busbw",
    equation=r"\frac{D}{t}\cdot\begin{cases}2(N-1)/N & \text{all-reduce}\\"
    r"(N-1)/N & \text{all-gather, reduce-scatter, all-to-all}\\1 & \text{broadcast, reduce}\end{cases}",
)
def busbw_bytes_per_s(full_bytes: Size, seconds: Size, n: int, collective: str = "all_reduce") -> Size:
    """Bus bandwidth (busbw), bytes a second.

    What each link must have carried, whatever the number of ranks.

    `collective` is one of all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce. Comparable
    with the rate of the hardware in one direction; it may exceed it when a switch does the adding. Raises
    ``ValueError`` for another name.
    """
    return algbw_bytes_per_s(full_bytes, seconds) * busbw_factor(n, collective)


def busbw_factor(n: int, collective: str = "all_reduce") -> float:
    """busbw over algbw, a pure number: the share of D that the lower bound makes a rank send."""
    n = ranks(n)
    factors = {
        "all_reduce": 2 * (n - 1) / n,
        "all_gather": (n - 1) / n,
        "reduce_scatter": (n - 1) / n,
        "all_to_all": (n - 1) / n,
        "broadcast": 1.0,
        "reduce": 1.0,
    }
    if collective not in factors:
        raise ValueError(f"collective must be one of {', '.join(factors)}, not {collective!r}")
    return factors[collective]
