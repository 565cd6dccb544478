"""One call that lays the experts of a GPT of `ranks.model` on the ranks of a group."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from dtlib.ranks.experts import Experts, MoE
from dtlib.ranks.mesh import Group
from dtlib.ranks.model import GPT
from dtlib.ranks.shared.alike import size_of
from dtlib.ranks.shared.replicas import begin_alike, belongs_to, split_modules
from dtlib.ranks.shared.split import Split, SplitModule, evenly

from .exchange import Exchange


class OwnExperts(SplitModule, Experts):
    """This rank's experts of `experts`, which must be the same on all ranks of `group`.

    | | whole | this rank |
    |---|---|---|
    | `up_ehf`, `down_efh` | (e, h, f), (e, f, h) | (e/N, h, f), (e/N, f, h) |

    Their gradients are sums over the tokens of all ranks: nothing is left to be sent. Where `tp` has split their width,
    each rank has this share of its own part.
    """

    def __init__(self, experts: Experts, group: Group) -> None:
        nn.Module.__init__(self)
        self.group, self.splits, self.gated = group, {}, experts.gated
        split = Split(0, evenly("num_experts", len(experts.up_ehf), dist.get_world_size(group)))
        for name, whole in experts.named_parameters():
            self.take(name, whole, split, before=experts.splits[name] if isinstance(experts, SplitModule) else ())


def parallelize(model: GPT, group: Group = None, *, holders: dist.ProcessGroup | None = None) -> GPT:
    """Lay the experts of `model`, which is changed and returned, on the ranks of `group` (None: all ranks).

    | | whole | this rank | sent |
    |---|---|---|---|
    | tokens | its own | its own | |
    | experts of each layer | e | e/N, the first e mod N ranks have one more | rows, as `dispatch` and `combine` |
    | all other weights, routers too | all | all | by whoever wraps it |

    Each rank calls it with tokens of its own, any number of them, and all ranks equally often. The loss is each rank's.
    All ranks begin with the weights of the group's rank 0. Put `activations.recompute` on top, then data parallelism or
    ZeRO over all ranks that have other tokens, then an optimizer: an expert belongs to `holders` (`dp.belongs_to`), the
    ranks of other such groups that have the same one, or to this rank alone (None). So its gradient, a sum over the
    tokens of `group` already, is summed over these, and divided as all others are.

    ``ValueError`` before anything is sent for another model, one without experts or split already, fewer experts than
    ranks, or a group without this rank; on all ranks where their models are not alike.
    """
    if not isinstance(model, GPT):
        raise ValueError(f"model must be a GPT of ranks.model, not {type(model).__name__}")
    if not dist.is_initialized():
        raise ValueError("group needs torch.distributed: call this in a rank of lab.run, or after init_process_group")
    n, config = size_of(group), model.config
    if not config.num_experts:
        raise ValueError("model must have experts, and its num_experts is 0")
    if any(isinstance(each, OwnExperts) or each in split_modules for each in model.modules()):
        raise ValueError("model must have its experts whole, and is split already")
    evenly("num_experts", config.num_experts, n)
    begin_alike(model, group)
    if holders is None:
        holders = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    for layer in model.modules():
        if isinstance(layer, MoE):
            layer.experts = OwnExperts(layer.experts, group)
            layer.way = Exchange(config.num_experts, group, config.capacity_factor)
            for parameter in layer.experts.parameters():
                belongs_to(parameter, holders)
    return model
