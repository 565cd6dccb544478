"""Expert parallelism as algebra: who gets a token, what travels, what an uneven router costs, and when it hides.

Letters: E experts (`num_experts`) of width f (`expert_hidden`), k of which a token chooses (`top_k`), S that all meet
(`num_shared`); N ranks that share them (`ep`), of t tokens each (`tokens`) of width h (`hidden`), T tokens in all; G
groups of experts (`groups`), of which a token may use M (`top_groups`). Experts lie in order, E/N on a rank, or one
more on the first ones. "Uniform routing": each token draws its k experts without replacement, all sets alike,
independent of the others.

Arguments out of range raise ``ValueError``, which names the argument, its value and the rule.
"""

from .balance import busiest_rank_tokens, capacity, dropped_share, largest_normal, padded_share
from .hiding import all_to_all_seconds, hiding_tokens, hiding_width, layer_seconds, reading_tokens
from .layer import Layer
from .memory import KeptBytes, kept_bytes, layer_parameters, state_bytes
from .routing import SCORINGS, Routing, checked_routing, loads, route, scores
from .steering import (
    balance_loss,
    balance_loss_gradient,
    balanced_violation,
    bias_step,
    bias_steps,
    max_violation,
)
from .traffic import (
    COPIES,
    dispatch_elements,
    expected_visits,
    expected_visits_limited,
    fp8_bytes_per_element,
    link_elements,
    step_bytes,
)

__all__ = [
    "COPIES",
    "SCORINGS",
    "KeptBytes",
    "Layer",
    "Routing",
    "all_to_all_seconds",
    "balance_loss",
    "balance_loss_gradient",
    "balanced_violation",
    "bias_step",
    "bias_steps",
    "busiest_rank_tokens",
    "capacity",
    "checked_routing",
    "dispatch_elements",
    "dropped_share",
    "expected_visits",
    "expected_visits_limited",
    "fp8_bytes_per_element",
    "hiding_tokens",
    "hiding_width",
    "kept_bytes",
    "largest_normal",
    "layer_parameters",
    "layer_seconds",
    "link_elements",
    "loads",
    "max_violation",
    "padded_share",
    "reading_tokens",
    "route",
    "scores",
    "state_bytes",
    "step_bytes",
]
