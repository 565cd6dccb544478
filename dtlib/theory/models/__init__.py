"""Models by their sizes, and their parameters counted part by part.

Letters: l layers (`num_layers`), h width (`hidden`), a heads (`num_heads`), V vocabulary (`vocab`), s positions
(`seq`), Ψ parameters (`num_params`). ``model("llama3-70b")`` finds a published one; `gpt` and `llama` make others.

Arguments out of range raise ``ValueError``, which names the argument, its value and the rule.
"""

from .adapters import MODULES, Adapters
from .architecture import Architecture, Norm, gpt, llama
from .experts import Experts, LatentAttention
from .parameters import (
    LayerParameters,
    ModelParameters,
    active_parameters,
    gpt_num_params,
    has_experts,
    last_has_experts,
    layer_of_rank,
    layer_parameters,
    layers_of_rank,
    llama_num_params,
    model_parameters,
    mtp_parameters,
    norm_parameters,
)
from .presets import MODELS, checked_dense, checked_model, model, not_dense
from .tensor_parallel import checked_ep, checked_tp, kv_width_of_rank, tp_degrees

__all__ = [
    "MODELS",
    "MODULES",
    "Adapters",
    "Architecture",
    "Experts",
    "LatentAttention",
    "LayerParameters",
    "ModelParameters",
    "Norm",
    "active_parameters",
    "checked_dense",
    "checked_ep",
    "checked_model",
    "checked_tp",
    "gpt",
    "gpt_num_params",
    "has_experts",
    "kv_width_of_rank",
    "last_has_experts",
    "layer_of_rank",
    "layer_parameters",
    "layers_of_rank",
    "llama",
    "llama_num_params",
    "model",
    "model_parameters",
    "mtp_parameters",
    "norm_parameters",
    "not_dense",
    "tp_degrees",
]
