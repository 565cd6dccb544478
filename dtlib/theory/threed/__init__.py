"""Several ways to split at once: what a rank sends along each axis of a mesh, what it holds, and where two ways cross.

Letters: N ranks share a batch, c of them its sequences; p stages of l layers in all, t ranks split each matrix; m
micro-batches, T tokens of a micro-batch on a rank, h hidden, Ψ parameters.

Arguments out of range raise ``ValueError``, which names the argument, its value and the rule.
"""

from .crossing import pp_over_dp_tokens, tp_over_dp_tokens
from .kept import activation_bytes, layer_bytes
from .states import state_bytes
from .traffic import AxisBytes, sent_bytes

__all__ = [
    "AxisBytes",
    "activation_bytes",
    "layer_bytes",
    "pp_over_dp_tokens",
    "sent_bytes",
    "state_bytes",
    "tp_over_dp_tokens",
]
