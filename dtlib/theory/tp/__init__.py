"""Tensor parallelism as algebra: what t ranks that share each matrix send, and up to how many of them it pays.

Letters: b sequences (`micro_batch`) of s tokens (`seq`), width h (`hidden`), l layers (`num_layers`), t ranks (`tp`), w
bytes an element (`element_bytes`), F operations a second (`flops_per_s`), B bytes a second in one direction
(`link_bytes_per_s`). A layer is all-reduced as `layer_elements` says; what it keeps for its backward pass is
`activations.layer_bytes`.

Arguments out of range raise ``ValueError``, which names the argument, its value and the rule.
"""

from .overlap import chunked_seconds, exposed_seconds, hiding_width
from .scaling import break_even_ranks, efficiency, replicated_share
from .traffic import OutsideElements, layer_elements, outside_elements

__all__ = [
    "OutsideElements",
    "break_even_ranks",
    "chunked_seconds",
    "efficiency",
    "exposed_seconds",
    "hiding_width",
    "layer_elements",
    "outside_elements",
    "replicated_share",
]
