"""Collectives: closed forms, exact traffic, schedules as data, and simulations on numpy rows.

For each algorithm `a` of `ALGORITHMS` there are three closed forms, registered as ``collectives.<name>``:

- ``a_bytes(full_bytes, n)``: bytes sent by the busiest rank, exact when chunks are equal; `traffic` has the
  integers of any length.
- ``a_steps(n)``: rounds one after another; in each a rank sends at most one message and receives at most one.
- ``a_seconds(full_bytes, n, alpha_seconds, link_bytes_per_s)``: over the rounds, Σ α + (longest message)/B;
  links carry both directions at once, adding is free.

Letters: N ranks (``n``), D bytes of the full buffer (``full_bytes``, a number or an array), α seconds a
message (``alpha_seconds``), B bytes a second in one direction (``link_bytes_per_s``). The two-level
all-reduce also takes ``ranks_per_node``. Every function raises ``ValueError`` for n below 1, a size or
latency that is negative, or a rate that is not positive.
"""

from .bounds import (
    algbw_bytes_per_s,
    all_reduce_lower_bound_bytes,
    all_reduce_lower_bound_seconds,
    busbw_bytes_per_s,
    busbw_factor,
    half_lower_bound_bytes,
    lower_bound_steps,
    ring_tree_crossover_bytes,
)
from .chunks import chunk_bounds, chunk_elements
from .doubling import (
    halving_doubling_all_reduce_bytes,
    halving_doubling_all_reduce_seconds,
    halving_doubling_all_reduce_steps,
    recursive_doubling_all_reduce_bytes,
    recursive_doubling_all_reduce_seconds,
    recursive_doubling_all_reduce_steps,
)
from .ring import (
    naive_all_reduce_bytes,
    naive_all_reduce_seconds,
    naive_all_reduce_steps,
    pairwise_all_to_all_bytes,
    pairwise_all_to_all_seconds,
    pairwise_all_to_all_steps,
    ring_all_gather_bytes,
    ring_all_gather_seconds,
    ring_all_gather_steps,
    ring_all_reduce_bytes,
    ring_all_reduce_seconds,
    ring_all_reduce_steps,
    ring_reduce_scatter_bytes,
    ring_reduce_scatter_seconds,
    ring_reduce_scatter_steps,
)
from .schedule import ALGORITHMS, ROOTED, Round, Schedule, Transfer, schedule
from .simulate import OPS, Simulation, contributions, run_round, simulate
from .traffic import Traffic, sent_bytes, traffic
from .tree import (
    tree_all_reduce_bytes,
    tree_all_reduce_seconds,
    tree_all_reduce_steps,
    tree_broadcast_bytes,
    tree_broadcast_seconds,
    tree_broadcast_steps,
    tree_reduce_bytes,
    tree_reduce_seconds,
    tree_reduce_steps,
)
from .two_level import (
    two_level_all_reduce_bytes,
    two_level_all_reduce_seconds,
    two_level_all_reduce_steps,
    two_level_slow_link_bytes,
)

__all__ = [
    "ALGORITHMS",
    "OPS",
    "ROOTED",
    "Round",
    "Schedule",
    "Simulation",
    "Traffic",
    "Transfer",
    "algbw_bytes_per_s",
    "all_reduce_lower_bound_bytes",
    "all_reduce_lower_bound_seconds",
    "busbw_bytes_per_s",
    "busbw_factor",
    "chunk_bounds",
    "chunk_elements",
    "contributions",
    "half_lower_bound_bytes",
    "halving_doubling_all_reduce_bytes",
    "halving_doubling_all_reduce_seconds",
    "halving_doubling_all_reduce_steps",
    "lower_bound_steps",
    "naive_all_reduce_bytes",
    "naive_all_reduce_seconds",
    "naive_all_reduce_steps",
    "pairwise_all_to_all_bytes",
    "pairwise_all_to_all_seconds",
    "pairwise_all_to_all_steps",
    "recursive_doubling_all_reduce_bytes",
    "recursive_doubling_all_reduce_seconds",
    "recursive_doubling_all_reduce_steps",
    "ring_all_gather_bytes",
    "ring_all_gather_seconds",
    "ring_all_gather_steps",
    "ring_all_reduce_bytes",
    "ring_all_reduce_seconds",
    "ring_all_reduce_steps",
    "ring_reduce_scatter_bytes",
    "ring_reduce_scatter_seconds",
    "ring_reduce_scatter_steps",
    "ring_tree_crossover_bytes",
    "run_round",
    "schedule",
    "sent_bytes",
    "simulate",
    "traffic",
    "tree_all_reduce_bytes",
    "tree_all_reduce_seconds",
    "tree_all_reduce_steps",
    "tree_broadcast_bytes",
    "tree_broadcast_seconds",
    "tree_broadcast_steps",
    "tree_reduce_bytes",
    "tree_reduce_seconds",
    "tree_reduce_steps",
    "two_level_all_reduce_bytes",
    "two_level_all_reduce_seconds",
    "two_level_all_reduce_steps",
    "two_level_slow_link_bytes",
]
