"""More than one token a pass, as algebra: what heads weigh and keep, what the last stage of a pipeline carries, and
what a draft earns.

Letters: n tokens predicted at each position, the next one among them (`predicted`), so that n = 1 is a plain model;
width h (`hidden`), vocabulary V (`vocab`), l layers, b sequences (`micro_batch`) of s tokens (`seq`); p stages
(`stages`), m micro-batches; k tokens drafted (`drafted`), each accepted with probability q (`acceptance`), at c passes
of the model (`draft_cost`).

Arguments out of range raise ``ValueError``, which names the argument, its value and the rule.
"""

from .draft import accepted_tokens, best_draft, break_even_acceptance, speedup
from .heads import KINDS, extra_flops_per_token, extra_parameters, logits_bytes
from .pipeline import best_stages, bubble_of_stages, last_stage_layers, most_stages, stage_costs, trunk_costs

__all__ = [
    "KINDS",
    "accepted_tokens",
    "best_draft",
    "best_stages",
    "break_even_acceptance",
    "bubble_of_stages",
    "extra_flops_per_token",
    "extra_parameters",
    "last_stage_layers",
    "logits_bytes",
    "most_stages",
    "speedup",
    "stage_costs",
    "trunk_costs",
]
