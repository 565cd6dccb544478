"""ZeRO as algebra: the bytes of a rank at stages 0 to 3, exact for any shapes and ranks, and what a step sends.

Letters: N ranks (`n`), Ψ parameters (`num_params`), w, g, o bytes of one parameter's weight, gradient and optimizer
state, D bytes of the full weights or gradients (`full_bytes`).

Arguments out of range raise ``ValueError``, which names the argument, its value and the rule.
"""

from .nodes import CrossNodeVolume, NodeTraffic, hybrid_traffic, zero_plus_plus_volume
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
from .step import ZeroTraffic, gathered_bytes, sent_bytes, traffic
from .timeline import Held, Moment, peak, step_timeline

__all__ = [
    "STAGES",
    "CrossNodeVolume",
    "Held",
    "Layout",
    "Moment",
    "NodeTraffic",
    "ZeroTraffic",
    "bytes_per_param",
    "checked_stage",
    "gathered_bytes",
    "hybrid_traffic",
    "limit_bytes_per_param",
    "peak",
    "sent_bytes",
    "shard_elements",
    "split_parts",
    "states",
    "states_of_rank",
    "step_timeline",
    "traffic",
    "zero_plus_plus_volume",
]
