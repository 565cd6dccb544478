"""Why one device is not enough: bytes of the model states, operations of a step, utilisation.

Letters: Ψ parameters (`num_params`), l layers (`num_layers`), h width (`hidden`), s tokens of a sequence (`seq`), V
vocabulary (`vocab`).

Arguments out of range raise ``ValueError``, which names the argument, its value and the rule.
"""

from . import bf16
from .bf16 import lost_update, rounding_error
from .flops import (
    RECOMPUTE,
    ForwardFlops,
    TokenFlops,
    checked_recompute,
    forward_flops_per_token,
    hfu,
    mfu,
    paper_flops_per_step,
    training_flops_per_token,
    utilisation,
)
from .recipes import OPTIMIZER_PARTS, RECIPES, ModelStates, Recipe, adam_8bit, recipe
from .roofline import matmul_intensity, ridge_intensity, roofline_flop_per_s
from .states import largest_num_params, model_state_bytes, model_states

__all__ = [
    "OPTIMIZER_PARTS",
    "RECIPES",
    "RECOMPUTE",
    "ForwardFlops",
    "ModelStates",
    "Recipe",
    "TokenFlops",
    "adam_8bit",
    "bf16",
    "checked_recompute",
    "forward_flops_per_token",
    "hfu",
    "largest_num_params",
    "lost_update",
    "matmul_intensity",
    "mfu",
    "model_state_bytes",
    "model_states",
    "paper_flops_per_step",
    "recipe",
    "ridge_intensity",
    "roofline_flop_per_s",
    "rounding_error",
    "training_flops_per_token",
    "utilisation",
]
