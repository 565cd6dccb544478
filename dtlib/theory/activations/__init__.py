"""The other memory: what a layer keeps for its backward pass, in closed form and tensor by tensor.

Letters: s tokens of a sequence (`seq`), b sequences of a micro-batch (`micro_batch`), h width (`hidden`), a heads
(`num_heads`), l layers (`num_layers`), t ranks of tensor parallelism (`tp`), p stages (`stages`), v chunks of a rank
(`chunks`).

Arguments out of range raise ``ValueError``, which names the argument, its value and the rule.
"""

from .closed import (
    Moment,
    checkpoint_walk,
    checkpointed_bytes,
    first_stage_layers,
    layer_bytes,
    optimal_every,
    recompute_factor,
)
from .layer import (
    PAPER,
    Attention,
    LayerActivations,
    Widths,
    checked_attention,
    layer_activations,
    torch_cpu_widths,
    written_out_widths,
)

__all__ = [
    "PAPER",
    "Attention",
    "LayerActivations",
    "Moment",
    "Widths",
    "checked_attention",
    "checkpoint_walk",
    "checkpointed_bytes",
    "first_stage_layers",
    "layer_activations",
    "layer_bytes",
    "optimal_every",
    "recompute_factor",
    "torch_cpu_widths",
    "written_out_widths",
]
