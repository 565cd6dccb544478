"""Context parallelism as algebra: attention whose tokens lie on N ranks, each with a part of every sequence.

Letters: b sequences (`micro_batch`) of s tokens (`seq`), N ranks (`cp`), a heads of queries (`num_heads`) and g of keys
and values (`num_kv_heads`) of d entries (`head_dim`), w bytes an element, F operations a second (`flop_per_s`), B bytes
a second in one direction (`link_bytes_per_s`).

Arguments out of range raise ``ValueError``, which names the argument, its value and the rule.
"""

from .hiding import forward_flops, hiding_tokens, kept_bytes, ring_step_seconds
from .merge import merge, partial
from .order import ORDERS, pieces, scores
from .traffic import ring_elements, ulysses_elements

__all__ = [
    "ORDERS",
    "forward_flops",
    "hiding_tokens",
    "kept_bytes",
    "merge",
    "partial",
    "pieces",
    "ring_elements",
    "ring_step_seconds",
    "scores",
    "ulysses_elements",
]
