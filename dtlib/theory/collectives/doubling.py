"""Closed forms of the exchanges across powers of two: recursive doubling, halving–doubling.

P is the largest power of two up to N, and e = 1 when N is no power of two, else 0: then the N − P ranks
beyond P first send all they have to a partner below P, and get the result from it at the end. The rest: see
the package.
"""

from __future__ import annotations

from dtlib.theory.formula import formula
from dtlib.theory.valid import Size, ranks, sized, timed

from .chunks import ceil_log2, floor_log2, is_power_of_two


@formula(
    "collectives.recursive_doubling_all_reduce_bytes",
    source="thakur2005",
    equation=r"\lceil\log_2 N\rceil\,D",
)
def recursive_doubling_all_reduce_bytes(full_bytes: Size, n: int) -> Size:
    """Recursive-doubling all-reduce, bytes sent by the busiest rank.

    All ranks send as much when N is a power of two.
    """
    full_bytes, n = sized(full_bytes, n)
    return ceil_log2(n) * full_bytes


@formula(
    "collectives.recursive_doubling_all_reduce_steps",
    source="thakur2005",
    equation=r"\lfloor\log_2 N\rfloor + 2e",
)
def recursive_doubling_all_reduce_steps(n: int) -> int:
    """Recursive-doubling all-reduce, steps.

    One a power of two, and two more to fold in the ranks beyond.
    """
    n = ranks(n)
    return floor_log2(n) + 2 * (not is_power_of_two(n))


@formula(
    "collectives.recursive_doubling_all_reduce_seconds",
    source="thakur2005",
    equation=r"\left(\lfloor\log_2 N\rfloor + 2e\right)\left(\alpha + \frac{D}{B}\right)",
)
def recursive_doubling_all_reduce_seconds(
    full_bytes: Size, n: int, alpha_seconds: float, link_bytes_per_s: float
) -> Size:
    """Recursive-doubling all-reduce, seconds.

    The fewest steps there can be, each with the full buffer.
    """
    full_bytes, n, alpha_seconds, link_bytes_per_s = timed(full_bytes, n, alpha_seconds, link_bytes_per_s)
    return recursive_doubling_all_reduce_steps(n) * (alpha_seconds + full_bytes / link_bytes_per_s)


@formula(
    "collectives.halving_doubling_all_reduce_bytes",
    source="rabenseifner2004",
    equation=r"2\,\frac{P-1}{P}\,D + e\,D",
)
def halving_doubling_all_reduce_bytes(full_bytes: Size, n: int) -> Size:
    """Halving–doubling all-reduce, bytes sent by the busiest rank.

    The algorithm is Rabenseifner's.
    """
    full_bytes, n = sized(full_bytes, n)
    power = 1 << floor_log2(n)
    return 2 * (power - 1) * full_bytes / power + (not is_power_of_two(n)) * full_bytes


@formula(
    "collectives.halving_doubling_all_reduce_steps",
    source="rabenseifner2004",
    equation=r"2\lfloor\log_2 N\rfloor + 2e",
)
def halving_doubling_all_reduce_steps(n: int) -> int:
    """Halving–doubling all-reduce, steps.

    The exchanged part halves each time, then doubles back.
    """
    n = ranks(n)
    return 2 * floor_log2(n) + 2 * (not is_power_of_two(n))


@formula(
    "collectives.halving_doubling_all_reduce_seconds",
    source="rabenseifner2004",
    equation=r"2\left(\lfloor\log_2 N\rfloor + e\right)\alpha + 2\left(\frac{P-1}{P} + e\right)\frac{D}{B}",
)
def halving_doubling_all_reduce_seconds(
    full_bytes: Size, n: int, alpha_seconds: float, link_bytes_per_s: float
) -> Size:
    """Halving–doubling all-reduce, seconds.

    A tree's steps with a ring's bytes, if N is a power of two.
    """
    full_bytes, n, alpha_seconds, link_bytes_per_s = timed(full_bytes, n, alpha_seconds, link_bytes_per_s)
    power = 1 << floor_log2(n)
    crossings = 2 * (power - 1) / power + 2 * (not is_power_of_two(n))
    return halving_doubling_all_reduce_steps(n) * alpha_seconds + crossings * full_bytes / link_bytes_per_s
