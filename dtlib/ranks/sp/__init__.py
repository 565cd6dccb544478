"""Sequence parallelism on real processes: tensor parallelism whose ranks split the tokens between the matrices.

The mechanism stands on the chapter's page: a conjugate pair, here `gather_tokens` and `scatter_sum`. `parallelize`
splits a GPT:

    model = sp.parallelize(GPT(config), group)
    optimizer = torch.optim.AdamW(model.parameters())
    sp.next_token_loss(model(tokens), targets, vocab=config.vocab, group=group).backward()

Loss, clipping and checkpoints are those of `ranks.tp`. Source: Korthikanti et al. 2022, arXiv 2205.05198, section
4.2.2.
"""

from dtlib.ranks.shared.split import clip_grad_norm, load_state_dict, split, state_dict, unsplit
from dtlib.ranks.tp import next_token_loss

from .conjugate import GatherTokens, ScatterSum, all_tokens, gather_tokens, scatter_sum, summed_tokens
from .gpt import SplitNorm, SplitPositions, SplitTokens, parallelize

__all__ = [
    "GatherTokens",
    "ScatterSum",
    "SplitNorm",
    "SplitPositions",
    "SplitTokens",
    "all_tokens",
    "clip_grad_norm",
    "gather_tokens",
    "load_state_dict",
    "next_token_loss",
    "parallelize",
    "scatter_sum",
    "split",
    "state_dict",
    "summed_tokens",
    "unsplit",
]
