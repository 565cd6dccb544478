"""One call that lays the experts of a GPT of `ranks.model` on the ranks of a group, and the sums of its gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtlib.ranks.experts import Experts, MoE
from dtlib.ranks.mesh import Group
from dtlib.ranks.model import GPT
from dtlib.ranks.shared.alike import size_of
from dtlib.ranks.shared.replicas import begin_alike, split_modules
from dtlib.ranks.shared.split import Split, SplitModule, evenly, splits_of

from .exchange import Exchange


class OwnExperts(SplitModule, Experts):
    """This rank's experts of `experts`, which must be the same on all ranks of `group`.

    | | whole | this rank |
    |---|---|---|
    | `up_ehf`, `down_efh` | (e, h, f), (e, f, h) | (e/N, h, f), (e/N, f, h) |

    Their gradients are sums over the tokens of all ranks: nothing is left to be sent.
    """

    def __init__(self, experts: Experts, group: Group) -> None:
        nn.Module.__init__(self)
        self.group, self.splits, self.gated = group, {}, experts.gated
        split = Split(0, evenly("num_experts", len(experts.up_ehf), dist.get_world_size(group)))
        self.take("up_ehf", experts.up_ehf, split)
        self.take("down_efh", experts.down_efh, split)


def parallelize(model: GPT, group: Group = None) -> GPT:
    """Lay the experts of `model`, which is changed and returned, on the ranks of `group` (None: all ranks).

    | | whole | this rank | sent |
    |---|---|---|---|
    | tokens | its own | its own | |
    | experts of each layer | e | e/N, the first e mod N ranks have one more | rows, as `dispatch` and `combine` |
    | all other weights, routers too | all | all | never: `average_gradients` |

    Each rank calls it with tokens of its own, any number of them, and all ranks equally often. The loss is each rank's.
    All ranks begin with the weights of the group's rank 0; build the optimizer afterwards. Put `activations.recompute`
    on top.

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
    for layer in model.modules():
        if isinstance(layer, MoE):
            layer.experts = OwnExperts(layer.experts, group)
            layer.way = Exchange(config.num_experts, group, config.capacity_factor)
    return model


@torch.no_grad()
def average_gradients(model: nn.Module, group: Group = None, *, replicas: Group | tuple[()] = ()) -> None:
    """Make the gradients of `model` those of the mean loss over the ranks of `group`, in place; all must call it.

    `group` are the ranks with different tokens: those that share the experts, or several such groups. Then `replicas`
    are the ranks of it that have the same experts as this one; without it there is no other.

    | | after the backward pass | what it does |
    |---|---|---|
    | experts | sums over the tokens of the ranks that share them out | sum over `replicas`, divide by all of `group` |
    | all others | of this rank's tokens | sum over `group`, divide by all of `group` |

    So an expert's gradient is divided as any other, and never multiplied by the ranks that have other experts. What is
    trained and has no gradient counts as zero. One all-reduce for each dtype and kind.
    """
    n = size_of(group)
    split = splits_of(model)
    kinds: dict[tuple[bool, torch.dtype], list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        kinds.setdefault((name in split, parameter.dtype), []).append(parameter.grad)
    for (is_expert, _), gradients in kinds.items():
        if is_expert and replicas == ():
            torch._foreach_div_(gradients, n)
            continue
        flat = torch.cat([each.flatten() for each in gradients])
        dist.all_reduce(flat, group=replicas if is_expert else group)
        flat /= n
        for gradient, part in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
