"""`lab.cluster`: nodes and links of known speed, on one machine."""

from __future__ import annotations

from dtlib.theory.cluster import Cluster
from dtlib.theory.units import format_rate
from dtlib.theory.valid import amount, whole

MAX_RANKS = 128
MIN_BYTES_PER_S = 100_000  # a packet takes a sixth of a second there


def cluster(
    nodes: int = 2,
    ranks_per_node: int = 4,
    *,
    inside: float,
    across: float,
    inside_alpha_seconds: float = 0.0,
    across_alpha_seconds: float = 0.0,
) -> Cluster:
    """A cluster for ``lab.run(fn, cluster=...)``: `nodes` nodes of `ranks_per_node` ranks, with links of these rates.

    Each rank has two cables: one to the other ranks of its node, which carries `inside` bytes per second in each
    direction, headers apart, and one to all other nodes, which carries `across`. The kernel shapes them (see
    `launch.cables`), so that whatever the ranks do with torch.distributed is as fast as the links allow, and `lab.wire`
    reads each cable's counter. Choose rates that leave the machine idle, some 1 to 200 MB/s: ranks that wait for the
    network then cost nothing, and many fit on two cores.

    A latency is what a message waits before its first byte leaves. Where the kernel can delay packets (netem)
    everything is delayed; elsewhere each ``send`` and ``isend`` of torch.distributed waits, and its collectives do
    not. ``dtlib doctor`` says which it is here.

    The result is a `theory.cluster.Cluster`: ``theory.cluster.plans("all_reduce", it, full_bytes)`` says what should
    happen on it. ``ValueError`` for counts and rates out of range.
    """
    nodes, ranks_per_node = whole("nodes", nodes, 1), whole("ranks_per_node", ranks_per_node, 1)
    if nodes * ranks_per_node > MAX_RANKS:
        raise ValueError(f"nodes and ranks_per_node must make at most {MAX_RANKS} ranks, not {nodes * ranks_per_node}")
    for name, rate in (("inside", inside), ("across", across)):
        if amount(name, rate, positive=True) < MIN_BYTES_PER_S:
            raise ValueError(f"{name} must be at least {MIN_BYTES_PER_S:,} bytes per second, not {rate:,}")
    for name, alpha in (("inside_alpha_seconds", inside_alpha_seconds), ("across_alpha_seconds", across_alpha_seconds)):
        if amount(name, alpha) > 1:
            raise ValueError(f"{name} must be at most 1 second, not {alpha}")
    return Cluster(
        name=f"{nodes} × {ranks_per_node} ranks, {format_rate(inside)} inside, {format_rate(across)} across",
        num_nodes=nodes,
        ranks_per_node=ranks_per_node,
        inside_alpha_seconds=inside_alpha_seconds,
        inside_bytes_per_s=inside,
        across_alpha_seconds=across_alpha_seconds,
        across_bytes_per_s=across,
    )
