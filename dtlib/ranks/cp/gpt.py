"""A GPT whose tokens lie on the ranks of a group, from the embedding to the loss.

Shapes: b sequences, s positions, h hidden, v vocabulary, N ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtlib.ranks import model as whole_model
from dtlib.ranks.mesh import Group
from dtlib.ranks.model import GPT, IGNORED, Attention
from dtlib.ranks.shared.replicas import broadcast, refuse_unlike_ranks, split_modules
from dtlib.ranks.tp import sum_over_ranks
from dtlib.theory.cp import ORDERS
from dtlib.theory.cp.traffic import refuse_heads

from .layout import Layout
from .ring import ring_attention
from .tiles import Mask
from .ulysses import ulysses_attention

WAYS = {"ring": ring_attention, "ulysses": ulysses_attention}


@dataclass
class Context:
    """How a model's tokens lie, and of the batch that it is called with which tokens these are."""

    group: Group
    order: str
    way: str
    layout: Layout | None = None
    mask: Mask = field(default_factory=Mask)

    def enter(self, tokens_bs: Tensor, documents_bs: Tensor | None = None) -> tuple[Tensor, Layout, Tensor]:
        """A batch comes: this rank's tokens of it (b, s/N), how they lie, and the offset (s/N,) of each column."""
        if documents_bs is not None and documents_bs.shape != tokens_bs.shape:
            shape = tuple(tokens_bs.shape)
            raise ValueError(f"documents_bs must be of shape {shape}, as tokens_bs, not {tuple(documents_bs.shape)}")
        self.layout = Layout(tokens_bs.shape[1], self.group, self.order)
        self.mask = Mask(documents_bs=documents_bs)
        positions_s = self.layout.positions(tokens_bs.device)
        offsets_s = positions_s - torch.arange(len(positions_s), device=tokens_bs.device)
        return tokens_bs[:, positions_s], self.layout, offsets_s

    def before_forward(self, model: nn.Module, arguments: tuple[Tensor], where: dict[str, Any]) -> tuple[Any, Any]:
        """The model is called with all tokens: let it go on with this rank's."""
        own_bs, _, offsets_s = self.enter(*arguments, where.pop("documents_bs", None))
        return (own_bs,), where | {"offset": offsets_s + where.get("offset", 0)}


class ContextAttention(Attention):
    """`attention` over the tokens of all ranks; weights, shapes and positions are those of the rank's own tokens."""

    def __init__(self, attention: Attention, context: Context) -> None:
        nn.Module.__init__(self)
        self.num_heads, self.num_kv_heads, self.rotary = attention.num_heads, attention.num_kv_heads, attention.rotary
        self.qkv, self.out, self.context = attention.qkv, attention.out, context
        self.train(attention.training)

    def core(self, q_basd: Tensor, k_bgsd: Tensor, v_bgsd: Tensor) -> Tensor:
        """As in the whole attention, by a ring or all-to-alls."""
        context = self.context
        if context.layout is None:
            raise ValueError("attention must be reached through the model, which knows where its tokens stand")
        return WAYS[context.way](q_basd, k_bgsd, v_bgsd, context.layout, context.mask)


def parallelize(
    model: GPT, group: Group = None, *, order: str = "zigzag", way: str = "ring", sum_gradients: bool = True
) -> GPT:
    """Split the tokens of `model`, which is changed and returned, over the ranks of `group` (None: all ranks).

    | | whole | this rank |
    |---|---|---|
    | weights | all | all |
    | tokens, activations, logits | (b, s), (b, s, h), (b, s, v) | (b, s/N), (b, s/N, h), (b, s/N, v) |
    | attention | | `ring_attention` or `ulysses_attention` |

    It is called with all tokens, ``model(tokens_bs)``, on all ranks alike, and with ``documents_bs=`` where several are
    packed into a sequence: each takes its own, in `order`, and gives their logits, for `next_token_loss` of this
    package. The gradients of the weights are summed over the ranks as autograd has them, an all-reduce for each, unless
    `sum_gradients` is False: then somebody else does, who knows when the last one of a step is there. All ranks begin
    with the weights of the group's rank 0.

    ``ValueError`` before anything is sent for another model, one that is split already, dropout, another `order` or
    `way`, or heads that `way` cannot share; on all ranks where their models are not alike.
    """
    n = _refuse(model, group, order, way)
    parameters = list(model.parameters())
    if n > 1 and not parameters[0].is_meta:
        refuse_unlike_ranks(model, parameters[0].device, group)
        broadcast([parameter.detach() for parameter in parameters], group)
    context = Context(group, order, way)
    for block in model.blocks:
        block.attention = ContextAttention(block.attention, context)
    model.register_forward_pre_hook(context.before_forward, with_kwargs=True)
    for parameter in parameters:
        if parameter.requires_grad and n > 1 and sum_gradients:
            parameter.register_hook(lambda gradient: _summed(gradient, group))
    return model


def _summed(gradient: Tensor, group: Group) -> Tensor:
    total = gradient.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def next_token_loss(logits_bsv: Tensor, targets_bs: Tensor, *, group: Group = None, order: str = "zigzag") -> Tensor:
    """Cross-entropy in nats, the mean over all tokens that count, on all ranks the same.

    From this rank's logits (b, s/N, v) and all targets (b, s). The mean is taken over the tokens of all ranks: a mean
    of the ranks' means would weigh tokens of short parts more. ``ValueError`` for logits of another length.
    """
    layout = Layout(targets_bs.shape[1], group, order)
    own_bs = layout.take(targets_bs)
    if logits_bsv.shape[:2] != own_bs.shape:
        shape = tuple(own_bs.shape)
        raise ValueError(f"logits_bsv must be of shape {shape} and a vocabulary, not {tuple(logits_bsv.shape)}")
    own = whole_model.next_token_loss(logits_bsv, own_bs, reduction="sum")
    return sum_over_ranks(own, group) / (targets_bs != IGNORED).sum()


def _refuse(model: GPT, group: Group, order: str, way: str) -> int:
    if not isinstance(model, GPT):
        raise ValueError(f"model must be a GPT of ranks.model, not {type(model).__name__}")
    if not dist.is_initialized() or dist.get_rank(group) < 0:
        raise ValueError("group needs torch.distributed, and must contain this rank: call this in a rank of lab.run")
    if any(isinstance(each, ContextAttention) or each in split_modules for each in model.modules()):
        raise ValueError("model must be whole, and is split already")
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, not {order!r}")
    if way not in WAYS:
        raise ValueError(f"way must be one of {', '.join(WAYS)}, not {way!r}")
    if model.config.dropout:
        raise ValueError(f"model must be without dropout, and has {model.config.dropout}")
    n = dist.get_world_size(group)
    if way == "ulysses":
        refuse_heads(model.config.num_heads, model.config.kv_heads, n)
    return n
