"""ZeRO as algebra: the bytes of a rank at stages 0 to 3, exact for any shapes and ranks, and what a step sends.

Letters: N ranks (`n`), Ψ parameters (`num_params`), w, g, o bytes of one parameter's weight, gradient and optimizer
state, D bytes of the full weights or gradients (`full_bytes`).

Arguments out of range raise ``ValueError``, which names the argument, its value and the rule.
"""

from .nodes import (
    CrossNodeVolume,
    NodeTraffic,
    hybrid_traffic,
    quantised_error,
    quantised_gather_bytes,
    zero_plus_plus_traffic,
    zero_plus_plus_volume,
)
from .stages import (
    STAGES,
    Layout,
    bytes_per_param,
    checked_stage,
    limit_bytes_per_param,
    shard_elements,
    split_parts,
    states,
    states_of_rank,
)
from .step import (
    ZeroTraffic,
    exchange_messages,
    exchange_seconds,
    gathered_bytes,
    peak_bytes,
    sent_bytes,
    traffic,
)

__all__ = [
    "STAGES",
    "CrossNodeVolume",
    "Layout",
    "NodeTraffic",
    "ZeroTraffic",
    "bytes_per_param",
    "checked_stage",
    "exchange_messages",
    "exchange_seconds",
    "gathered_bytes",
    "hybrid_traffic",
    "limit_bytes_per_param",
    "peak_bytes",
    "quantised_error",
    "quantised_gather_bytes",
    "sent_bytes",
    "shard_elements",
    "split_parts",
    "states",
    "states_of_rank",
    "traffic",
    "zero_plus_plus_traffic",
    "zero_plus_plus_volume",
]
