"""ZeRO across nodes, where the slow links are: hybrid sharding and ZeRO++."""

from __future__ import annotations

from dataclasses import dataclass

from dtlib.theory.breakdown import Breakdown
from dtlib.theory.formula import formula
from dtlib.theory.valid import amount, node_size, ranks, sized, whole

from .step import traffic


@dataclass(frozen=True)
class NodeTraffic(Breakdown):
    """Bytes that one rank sends in a step: to ranks of its own node, and in groups that span nodes."""

    within_node: float
    across_nodes: float


@formula(
    "zero.hybrid_traffic",
    source="zhao2023fsdp",
    label="eq-zero-hybrid",
    equation=r"3\,\frac{q-1}{q}\,D \text{ inside}, \quad 2\,\frac{N/q-1}{N/q}\,\frac{D}{q} \text{ across}",
)
def hybrid_traffic(
    full_bytes: float, n: int, ranks_per_node: int, stage: int = 3, weight_bytes: float | None = None
) -> NodeTraffic:
    """Hybrid sharding, bytes that a rank sends inside its node and across nodes.

    `stage` (the equation: 3) inside each node of q ranks, copies across nodes: inside what `traffic` counts for q
    ranks; across, one all-reduce of the shard among the m = N/q nodes, 2 (m−1)/m · D/q. D (`full_bytes`) is the size of
    the gradients, and of the weights where these have no `weight_bytes` of their own. Memory pays for it: the states
    are split among q ranks, not N. ``ValueError`` for negative bytes, N below 1, stage 0, or a node that does not
    divide N. Source: Zhao et al. 2023, arXiv 2304.11277, section 3.2.2.
    """
    full_bytes, n = sized(full_bytes, n)
    per_node = node_size(n, ranks_per_node)
    shard_bytes = full_bytes / per_node
    inside = traffic(full_bytes, per_node, whole("stage", stage, 1), weight_bytes).total
    return NodeTraffic(inside, traffic(shard_bytes, n // per_node, 0).total)


@dataclass(frozen=True)
class CrossNodeVolume(Breakdown):
    """Bytes that a step of stage 3 moves between nodes, as the paper counts them: M for each full buffer."""

    gather_forward: float
    gather_backward: float
    reduce_scatter: float


@formula(
    "zero.zero_plus_plus_volume",
    source="wang2023zeropp",
    label="eq-zero-plus-plus",
    equation=r"M + M + M \;\to\; \tfrac12 M + 0 + \tfrac14 M",
)
def zero_plus_plus_volume(
    full_bytes: float,
    *,
    quantised_weights: bool = True,
    secondary_shards: bool = True,
    quantised_gradients: bool = True,
) -> CrossNodeVolume:
    """ZeRO++, bytes between nodes in a step.

    For weights and gradients of M bytes (`full_bytes`) in 16 bits. Stage 3 moves 3M: M to gather before forward, M
    before backward, M to scatter gradients. int8 weights (`quantised_weights`) halve each gather; `secondary_shards`
    inside the node make the one before backward stay there; int4 gradients (`quantised_gradients`) quarter the last: 3M
    become 0.75M. The scales of the quantised blocks are left out. ``ValueError`` for negative bytes. Source: Wang et
    al. 2023, arXiv 2306.10209, section 3, Table 1.
    """
    full_bytes = amount("full_bytes", full_bytes)
    gather = full_bytes / 2 if quantised_weights else full_bytes
    return CrossNodeVolume(
        gather_forward=gather,
        gather_backward=0 if secondary_shards else gather,
        reduce_scatter=full_bytes / 4 if quantised_gradients else full_bytes,
    )


@formula(
    "zero.zero_plus_plus_traffic",
    source="wang2023zeropp",
    label="eq-zero-plus-plus",
    equation=r"\tfrac{q-1}{q}\,\Psi\left(2 + \tfrac{b}{8} + \tfrac{12}{c}\right) \text{ inside}, \quad "
    r"\tfrac{N-q}{N}\,\tfrac{\Psi}{q}\left(1 + \tfrac{b}{8} + \tfrac{8}{c}\right) \text{ across}",
)
def zero_plus_plus_traffic(
    num_params: float, n: int, ranks_per_node: int, *, block: int, gradient_bits: int = 4
) -> NodeTraffic:
    """ZeRO++, bytes that a rank sends inside its node of q and across nodes in a step, scales counted.

    Codes of weights cross nodes before forward, one rank of each node for each chunk, and go round inside it, then and
    before backward; codes of gradients, b = `gradient_bits`, are added up inside, then across. Each `block` of c shares
    a float32 scale. Times q, for many nodes and large blocks: the 0.75M of `zero_plus_plus_volume`. ``ValueError`` for
    negative parameters, a node that does not divide N, a `block` below 1 or fewer than 2 bits. Source: Wang et al.
    2023, arXiv 2306.10209, section 3.
    """
    num_params, n = amount("num_params", num_params), ranks(n)
    q, scale = node_size(n, ranks_per_node), 4 / whole("block", block, 1)
    weight, gradient = 1 + scale, whole("gradient_bits", gradient_bits, 2) / 8 + scale
    inside = (q - 1) / q * num_params * (2 * weight + gradient)
    return NodeTraffic(inside, (1 - q / n) * num_params / q * (weight + gradient))


@formula(
    "zero.quantised_gather_bytes",
    source="wang2023zeropp",
    label="eq-zero-plus-plus",
    equation=r"\frac{N-1}{N}\,\Psi\left(1 + \frac{4}{c}\right)",
)
def quantised_gather_bytes(num_params: float, n: int, block: int) -> float:
    """All-gather of weights in 8 bits, bytes that a rank sends.

    One byte a parameter, and a float32 scale for each `block` of c of them. ``ValueError`` for a negative number of
    parameters, N or `block` below 1. Source: Wang et al. 2023, arXiv 2306.10209, section 3.1.
    """
    num_params = amount("num_params", num_params)
    n = ranks(n)
    return (n - 1) / n * num_params * (1 + 4 / whole("block", block, 1))


@formula(
    "zero.quantised_error",
    source="wang2023zeropp",
    label="eq-zero-plus-plus",
    equation=r"\tfrac{1}{254} \max_{\text{block}} |w|",
)
def quantised_error(largest: float, bits: int = 8) -> float:
    """Weights in few bits, how far one is off at most.

    `largest` is the largest magnitude of its block. It is cut into 2^(bits−1) − 1 steps on either side of zero, and a
    weight is off by half a step at most: 1/254 of it for 8 bits, 1/14 for 4. ``ValueError`` for a negative or infinite
    `largest` or fewer than 2 bits.
    """
    largest = amount("largest", largest)
    return largest / (2 * (2 ** (whole("bits", bits, 2) - 1) - 1))
