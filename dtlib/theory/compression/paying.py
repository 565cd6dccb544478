"""When it pays: seconds that compression adds, against seconds that the links save.

One gradient a step, of which `window_seconds` W of the transfer hide behind the backward pass, compressed or not.
Compression computes where the backward pass does, so that its own T_c seconds do not hide.
"""

from __future__ import annotations

import math
from dataclasses import replace

from dtlib.theory import cluster
from dtlib.theory.cluster import Cluster
from dtlib.theory.formula import formula
from dtlib.theory.valid import number

HOW = ("all_reduce", "all_gather", "two_pass")
"""How a payload travels: summed on the way, from each rank to all, or to a rank that sums a part and on to all."""


@formula(
    "compression.break_even_bandwidth",
    source="derived here",
    label="thm-compression-pays",
    equation=r"\min\left(\frac{D - D'}{T_c}, \frac{D}{T_c + W}\right)",
    use="On faster links the dense gradient arrives earlier than the compressed one.",
)
def break_even_bandwidth(
    dense_bytes: float, compressed_bytes: float, seconds: float, window_seconds: float = 0.0
) -> float:
    """The bandwidth below which compressing pays, bytes a second.

    D (`dense_bytes`) and D' (`compressed_bytes`) are what a rank *sends*, T_c (`seconds`) what compression adds: to
    compress, to restore, and rounds of messages more than the dense exchange has. W (`window_seconds`) of the transfer
    hide; without them (D − D')/T_c. 0 where D' is not below D, infinite where T_c and W leave no time to save.
    """
    dense, compressed = number("dense_bytes", dense_bytes), number("compressed_bytes", compressed_bytes)
    added, window = number("seconds", seconds), number("window_seconds", window_seconds)
    if compressed >= dense:
        return 0.0
    return min(
        (dense - compressed) / added if added else math.inf,
        dense / (added + window) if added + window else math.inf,
    )


def step_seconds(transfer_seconds: float, seconds: float = 0.0, window_seconds: float = 0.0) -> float:
    """What a step takes beyond its forward and backward pass: T_c, and of the transfer what W does not hide."""
    exposed = number("transfer_seconds", transfer_seconds) - number("window_seconds", window_seconds)
    return number("seconds", seconds) + max(0.0, exposed)


def exchange_seconds(of: Cluster, payload_bytes: float, how: str = "all_reduce") -> float:
    """Seconds of one exchange of each rank's `payload_bytes`, by the best plans that `cluster` knows.

    ``"all_reduce"`` for what adds up, ``"all_gather"`` of all N payloads for what does not, ``"two_pass"`` an
    all-to-all and an all-gather of one payload's parts, as `HOW` says.
    """
    payload = number("payload_bytes", payload_bytes)
    if how not in HOW:
        raise ValueError(f"how must be one of {', '.join(HOW)}, not {how!r}")
    if how == "all_reduce":
        return cluster.best("all_reduce", of, payload).seconds
    if how == "all_gather":
        return cluster.best("all_gather", of, of.world_size * payload).seconds
    return cluster.best("all_to_all", of, payload).seconds + cluster.best("all_gather", of, payload).seconds


def hierarchy_seconds(of: Cluster, dense_bytes: float, payload_bytes: float, how: str = "all_reduce") -> float:
    """Seconds of an exchange that is exact inside nodes and compressed across.

    Each node scatters the sum of its D bytes, so that a rank has a g-th; ranks with one place in their nodes exchange
    it, compressed to `payload_bytes` each; each node gathers. Inside by the best plans, across as `exchange_seconds` of
    m ranks that all send at once.
    """
    dense, g = number("dense_bytes", dense_bytes), of.ranks_per_node
    node = replace(of, num_nodes=1)
    inside = sum(cluster.best(half, node, dense).seconds for half in ("reduce_scatter", "all_gather"))
    across = replace(
        of, ranks_per_node=1, ports_per_node=None, across_bytes_per_s=of.across_bytes_per_s * of.num_ports / g
    )
    return inside + exchange_seconds(across, payload_bytes, how)


def across_break_even(
    of: Cluster,
    dense_bytes: float,
    payload_bytes: float,
    seconds: float,
    window_seconds: float = 0.0,
    *,
    how: str = "all_reduce",
    hierarchy: bool = False,
) -> float:
    """The highest bandwidth of a port, bytes a second, at which compressing pays on a cluster; its other numbers stay.

    Both contenders by their best plan for each bandwidth, latencies with them; with `hierarchy` the compressed one as
    `hierarchy_seconds`. 0 where it pays at none from a kB to an EB a second, infinite where at an EB. Slower links than
    this pay too where the compressed gradient sends less across; a gathering that sends more there may still save time
    inside. Where both are bound by the bytes across, this is `break_even_bandwidth` of what a port sends.
    """

    def pays(exponent: float) -> bool:
        at = replace(of, across_bytes_per_s=10.0**exponent)
        sent = (payload_bytes, how)
        compressed = hierarchy_seconds(at, dense_bytes, *sent) if hierarchy else exchange_seconds(at, *sent)
        dense = step_seconds(exchange_seconds(at, dense_bytes), 0.0, window_seconds)
        return step_seconds(compressed, seconds, window_seconds) < dense

    grid = [each / 8 for each in range(3 * 8, 18 * 8 + 1)]
    paying = [each for each in grid if pays(each)]
    if not paying or paying[-1] == grid[-1]:
        return math.inf if paying else 0.0
    low, high = paying[-1], paying[-1] + 1 / 8
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if pays(middle) else (low, middle)
    return 10.0**low


@formula(
    "compression.end_to_end_speedup",
    source="tang2021",
    label="eq-compression-warm-up",
    equation=r"\frac{1}{f + (1 - f)/S}",
)
def end_to_end_speedup(dense_share: float, speedup: float) -> float:
    """How many times faster a run is whose first steps are not compressed.

    f (`dense_share`) of the steps are dense, the others S (`speedup`) times as fast: at most 1/f. The same for bytes,
    with their ratio for S. Source: Tang et al. 2021, arXiv 2102.02888.
    """
    share = number("dense_share", dense_share)
    if share > 1:
        raise ValueError(f"dense_share must be from 0 to 1, not {share!r}")
    return 1 / (share + (1 - share) / number("speedup", speedup, positive=True))
