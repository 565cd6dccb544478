"""Tensor parallelism on real processes: each rank has a slice of every matrix, and all compute the same tokens.

The mechanism stands on the chapter's page: the conjugate pair, `copy_to_ranks` and `sum_over_ranks`, and an MLP between
them. `parallelize` splits all of a GPT:

    model = tp.parallelize(GPT(config), group)
    optimizer = torch.optim.AdamW(model.parameters())
    tp.next_token_loss(model(tokens), targets, vocab=config.vocab, group=group).backward()
    tp.clip_grad_norm(model, 1.0, group=group)
    optimizer.step()

`state_dict` is the one of the whole model and `load_state_dict` takes it, at any number of ranks; `unsplit` and `split`
do the same for gradients and an optimizer's moments. `group` is a process group, of `ranks.mesh` say; None means all
ranks. Sources: Shoeybi et al. 2019, arXiv 1909.08053, section 3; Korthikanti et al. 2022, arXiv 2205.05198.
"""

from dtlib.ranks.shared.split import clip_grad_norm, load_state_dict, split, state_dict, unsplit

from .blocks import OwnDice, sharers_of, split_attention, split_mlp
from .conjugate import copy_to_ranks, sum_over_ranks
from .experts import AroundExperts, split_experts
from .gpt import parallelize
from .linear import ColumnParallelLinear, RowParallelLinear
from .vocabulary import VocabularyParallelEmbedding, next_token_loss, vocabulary_of

__all__ = [
    "AroundExperts",
    "ColumnParallelLinear",
    "OwnDice",
    "RowParallelLinear",
    "VocabularyParallelEmbedding",
    "clip_grad_norm",
    "copy_to_ranks",
    "load_state_dict",
    "next_token_loss",
    "parallelize",
    "sharers_of",
    "split",
    "split_attention",
    "split_experts",
    "split_mlp",
    "state_dict",
    "sum_over_ranks",
    "unsplit",
    "vocabulary_of",
]
