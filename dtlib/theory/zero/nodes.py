"""ZeRO across nodes, where the slow links are: hybrid sharding and ZeRO++."""

from __future__ import annotations

from dataclasses import dataclass

from dtlib.theory.breakdown import Breakdown
from dtlib.theory.collectives._valid import amount, node_size, sized

from .step import traffic


@dataclass(frozen=True)
class NodeTraffic(Breakdown):
    """Bytes that one rank sends in a step: to ranks of its own node, and in groups that span nodes."""

    within_node: float
    across_nodes: float


def hybrid_traffic(full_bytes: float, n: int, ranks_per_node: int) -> NodeTraffic:
    """Bytes that a rank sends with hybrid sharding: stage 3 inside each node of g ranks, copies across nodes.

    Inside the node 3 (g−1)/g · D; across, one all-reduce of the shard among the m = N/g nodes: 2 (m−1)/m · D/g. D
    (`full_bytes`) is the size of the weights and of the gradients. Memory pays for it: the states are split among g
    ranks, not N. ``ValueError`` for negative bytes, N below 1, or a
    node that does not divide N. Source: Zhao et al. 2023, arXiv 2304.11277, section 3.2.2.
    """
    n = sized(full_bytes, n)
    per_node = node_size(n, ranks_per_node)
    shard_bytes = full_bytes / per_node
    return NodeTraffic(traffic(full_bytes, per_node, 3).total, traffic(shard_bytes, n // per_node, 0).total)


@dataclass(frozen=True)
class CrossNodeVolume(Breakdown):
    """Bytes that a step of stage 3 moves between nodes, as the paper counts them: M for each full buffer."""

    gather_forward: float
    gather_backward: float
    reduce_scatter: float


def zero_plus_plus_volume(
    full_bytes: float,
    *,
    quantised_weights: bool = True,
    secondary_shards: bool = True,
    quantised_gradients: bool = True,
) -> CrossNodeVolume:
    """Bytes between nodes in a step of ZeRO++, for weights and gradients of M bytes (`full_bytes`) in 16 bits.

    Stage 3 moves 3M: M to gather before forward, M before backward, M to scatter gradients. int8 weights
    (`quantised_weights`) halve each gather; `secondary_shards` inside the node make the one before backward stay there;
    int4 gradients (`quantised_gradients`) quarter the last: 3M become 0.75M. The scales of the quantised blocks are
    left out. ``ValueError`` for negative bytes. Source: Wang et al. 2023, arXiv 2306.10209, section 3, Table 1.
    """
    amount("full_bytes", full_bytes)
    gather = full_bytes / 2 if quantised_weights else full_bytes
    return CrossNodeVolume(
        gather_forward=gather,
        gather_backward=0 if secondary_shards else gather,
        reduce_scatter=full_bytes / 4 if quantised_gradients else full_bytes,
    )
