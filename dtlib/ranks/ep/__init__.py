"""Expert parallelism on real processes: experts lie on different ranks, and tokens travel to those that they visit.

The mechanism stands on the chapter's page: counts, then rows, by `all_to_all_single` with unequal splits, and back.
What is here sends one copy for each *rank* that a token visits, not for each expert, and cuts a whole GPT:

    model = ep.parallelize(GPT(config), group)           # config.num_experts > 0
    model = dp.BucketedDataParallel(model, group=group)  # an expert belongs to its rank: divided, and not summed again
    optimizer = torch.optim.AdamW(model.parameters())
    with ep.routing(model) as routed:
        loss = next_token_loss(model(tokens), targets)   # each rank's own tokens
    loss = loss + 0.01 * sum(ep.balance_loss(each, group) for each in routed)
    loss.backward()
    optimizer.step()
    ep.move_bias(model, 1e-3, group)                     # balance without a loss

`state_dict`, `load_state_dict`, `unsplit`, `split` and `clip_grad_norm` are those of tensor parallelism. `group` is a
process group, of `ranks.mesh` say; None means all ranks. Sources: Shazeer et al. 2017, arXiv 1701.06538; Lepikhin et
al. 2020, arXiv 2006.16668; DeepSeek-AI 2024, arXiv 2412.19437, section 3.2.2.
"""

from dtlib.ranks.shared.split import clip_grad_norm, load_state_dict, split, state_dict, unsplit

from .balance import balance_loss, move_bias, routing, sequence_balance_loss, with_loss
from .exchange import Arrived, Exchange, Route, combine, dispatch
from .gpt import OwnExperts, parallelize

__all__ = [
    "Arrived",
    "Exchange",
    "OwnExperts",
    "Route",
    "balance_loss",
    "clip_grad_norm",
    "combine",
    "dispatch",
    "load_state_dict",
    "move_bias",
    "parallelize",
    "routing",
    "sequence_balance_loss",
    "split",
    "state_dict",
    "unsplit",
    "with_loss",
]
